"""From a request's keys to the gate's answer, asked once. Imports no vLLM; runs on the scheduler thread.

The store is asked for the whole prompt when the request arrives. When the scheduler wants the request, and the reply is
there or can be waited for no longer, it is decided once how far to fetch the prompt. Up to there each missing chunk is
offered to vLLM once, and for a limited time: else requests that push each other's chunks out of staging, or wait for
each other's loads, would be put off again and again.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from tiertune_connector.cost import GateDecision
from tiertune_connector.protocol.glance import Chances
from tiertune_connector.protocol.messages import LookupReply, Own, Side, brief
from tiertune_connector.tracing import RequestTrace
from tiertune_connector.units import Clock

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tiertune_connector.client.store_client import Loaded, StoreClient
    from tiertune_connector.vllm.gate import OwnLoad
    from tiertune_connector.vllm.transfers import Job

PATIENCE_S = 0.001
"""From a lookup's sending on, so long the scheduler waits for its reply. To put a request off costs it a step of all
others, or a millisecond for which vLLM sleeps where there are none."""
STORES_SHARE = 0.9
"""Share of a lookup's or load's deadline; in the rest, what the store knows or has by then arrives here."""


@dataclass(slots=True, eq=False)
class Ask:
    """What is known of one request."""

    request: str
    prompt_tokens: int
    chain: list[bytes]
    """Store keys of the leading group's chunks, in the prompt's order."""
    sides: list[Side]
    """The other groups' chunks."""
    reply: "Future[LookupReply]"
    sent_at: float
    trace: RequestTrace
    """What spans are made of; what is told of the request here is written into it."""
    wanted_at: float | None = None
    """When the scheduler first wanted the request."""
    decision: GateDecision | None = None
    cut_tokens: int | None = None
    """Tokens from the prompt's head to fetch where missing; None: undecided."""
    load_s: float = 0.0
    """How long chunks are offered."""
    until: float | None = None
    """When that ends; None: the scheduler does not want the request yet, or not again yet."""
    wanted: set[bytes] = field(default_factory=set)
    """Keys of chunks that begin before the cut: the store was asked for these; vLLM may look for others."""
    offered: set[bytes] = field(default_factory=set)
    """Keys not to be offered again."""
    prefetch: "Future[Loaded] | None" = None
    prefetched: int = 0
    """Leading chunks to prefetch."""
    under_way: "list[OwnLoad]" = field(default_factory=list)
    """The request's loads that the gate counts."""
    load: "Job | None" = None
    """What came, until the scheduler takes it."""
    had: int | None = None
    """Leading chunks the scheduler took as computed when it began with the request; None: it has not yet."""
    timed: bool = False
    """Its first token has been seen, or it has ended."""


@dataclass(eq=False)
class Lookups:
    """One lookup and one decision per request, each bounded in time."""

    client: "StoreClient"
    choose: Callable[[Ask, int], GateDecision]
    """The gate: it gets the leading chunks that the engine has itself; its cut counts from the head.

    It also sets the request's ``load_s``.
    """
    clock: Clock
    chunk_tokens: int
    deadline_s: float
    _answered: deque[Ask] = field(default_factory=deque)
    _chances: Chances = field(default_factory=Chances)

    def expect(
        self,
        request: str,
        prompt_tokens: int,
        chain: list[bytes],
        sides: list[Side],
        tenant: bytes = b"",
        *,
        trace: RequestTrace,
        backlog_s: float = 0.0,
    ) -> Ask | None:
        """Ask the store for a new request. Without a connection, or a whole chunk, it is recomputed: None.

        The store has as long as the prefills ahead are predicted to take, but at least the deadline.
        """
        if not chain or not self.client.connected:
            return None
        reply = self.client.lookup(
            request, chain, prompt_tokens=prompt_tokens, tenant=tenant, sides=sides, defer=True,
            deadline_s=STORES_SHARE * max(self.deadline_s, backlog_s),
        )  # fmt: skip
        ask = Ask(request, prompt_tokens, chain, sides, reply, self.clock(), trace)
        reply.add_done_callback(lambda _: self._come(ask))
        return ask

    def settled(self, ask: Ask, computed_tokens: int, staged: Callable[[bytes], bool]) -> bool:
        """Whether the request's answer stands; else ask again. Constant time, except for the decision.

        ``computed_tokens`` are on the device; ``staged`` tells whether a chunk lies in staging. When first asked it
        receives the reply itself, and waits for it until ``PATIENCE_S`` after the lookup.
        """
        if ask.until is not None:
            return True
        now = self.clock()
        if ask.cut_tokens is None:
            if ask.wanted_at is None:
                ask.wanted_at = now
                self._receive(ask)
            if ask.reply.done():
                self._decide(ask, computed_tokens // self.chunk_tokens, staged)
            elif now >= ask.sent_at + self.deadline_s:
                ask.cut_tokens = 0
            else:
                return False
        ask.until = now + ask.load_s
        return True

    def offers(self, ask: Ask, key: bytes) -> bool:
        """Whether a missing chunk is to be fetched; says so once."""
        if ask.until is None or key not in ask.wanted or key in ask.offered or self.clock() >= ask.until:
            return False
        ask.offered.add(key)
        return True

    def preempted(self, ask: Ask) -> None:
        """The request will be wanted again, without what it had: all may be offered again."""
        ask.until = None
        ask.offered.clear()

    def answered(self) -> list[Ask]:
        """What was replied to since the last call, each once; also for requests that have ended."""
        return [self._answered.popleft() for _ in range(len(self._answered))]

    def _receive(self, ask: Ask) -> None:
        """Take the reply if it has come, or comes soon: the receiving thread may not have had the interpreter since.

        As the wait is counted from the sending, those who came together are waited for together.
        """
        left_s = ask.sent_at + min(PATIENCE_S, self.deadline_s) - self.clock()
        patient = left_s > 0 and not ask.reply.done() and self._chances.take()
        with suppress(TimeoutError):
            ask.reply.result(left_s if patient else 0.0)
        if patient:
            self._chances.taken(success=ask.reply.done())

    def _come(self, ask: Ask) -> None:
        """Called on whichever thread receives."""
        if not ask.trace.late:
            reply = ask.reply.result()
            ask.trace.looked_up_at, ask.trace.tiers, ask.trace.nothing = self.clock(), reply.tiers, reply.reason
        self._answered.append(ask)

    def _decide(self, ask: Ask, on_device: int, staged: Callable[[bytes], bool]) -> None:
        in_staging = len(list(takewhile(staged, ask.chain[on_device:])))
        self.client.tell(Own(brief(ask.request), on_device, in_staging))
        ask.decision = ask.trace.decision = self.choose(ask, on_device + in_staging)
        ask.trace.decided_at = self.clock()
        ask.cut_tokens = ask.decision.cut * self.chunk_tokens
        ask.wanted.update(ask.chain[: ask.decision.cut])
        for side in ask.sides:
            ask.wanted.update(side.keys[: -(-ask.cut_tokens // side.chunk_tokens)])
