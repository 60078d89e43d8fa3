"""From a request's missing keys to the gate's answer, asked once. Imports no vLLM; runs on the scheduler thread.

vLLM asks key by key. As long as the answer is RETRY it goes on to the next key, so that the first step names the whole
missing prefix: it is collected, looked up at the step's end, decided when the reply is there, and then answered HIT for
the leading chunks that pay and MISS after them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from tiertune_connector.cost import Decision, GateSettings
from tiertune_connector.serve.protocol import LookupReply

if TYPE_CHECKING:
    from concurrent.futures import Future


class Answer(Enum):
    """As vLLM's LookupResult."""

    HIT = auto()
    MISS = auto()
    RETRY = auto()


class Client(Protocol):
    """What lookups need of the store's client."""

    @property
    def connected(self) -> bool: ...
    def lookup(self, request: str, keys: list[bytes], *, prompt_tokens: int) -> "Future[LookupReply]": ...


@dataclass(slots=True)
class Ask:
    """What is known of one request; ``fetch`` is None until it is decided."""

    request: str
    prompt_tokens: int = 0
    first_chunk: int = 0
    """Chunks before the first missing one: computed, or in staging."""
    keys: dict[bytes, None] = field(default_factory=dict)
    """Missing keys, in the prompt's order."""
    reply: "Future[LookupReply] | None" = None
    deadline: float = 0.0
    decision: Decision | None = None
    gate: dict[str, GateSettings] = field(default_factory=dict)
    fetch: set[bytes] | None = None


class Lookups:
    """One lookup and one decision per request, each bounded in time."""

    def __init__(
        self,
        client: Client,
        *,
        choose: Callable[[Ask, LookupReply], Decision],
        clock: Callable[[], float],
        chunk_tokens: int,
        deadline_s: float,
    ) -> None:
        """``choose`` is the gate: its ``cut`` counts chunks from the prompt's head."""
        self.late = 0
        """Lookups whose deadline passed before the reply."""
        self._client = client
        self._choose = choose
        self._clock = clock
        self._chunk_tokens = chunk_tokens
        self._deadline_s = deadline_s
        self._asks: dict[str, Ask] = {}
        self._collecting: list[Ask] = []

    def expect(self, request: str, prompt_tokens: int) -> None:
        """A request has come; its lookup follows when the scheduler asks for it."""
        self._asks[request] = Ask(request, prompt_tokens)

    def answer(self, request: str, key: bytes, end_token: int) -> Answer:
        """Of a key that staging does not hold; ``end_token`` is where its chunk ends in the prompt."""
        ask = self._asks.setdefault(request, Ask(request))
        if ask.fetch is None and ask.reply is None:
            return self._collect(ask, key, end_token)
        if not self._settled(ask):
            return Answer.RETRY
        return Answer.HIT if ask.fetch and key in ask.fetch else Answer.MISS

    def waiting(self, request: str) -> bool:
        """Whether the reply is outstanding and its deadline has not passed. Constant time, but for the decision."""
        ask = self._asks.get(request)
        return ask is not None and ask.reply is not None and not self._settled(ask)

    def send(self) -> None:
        """The step ends: look up what it collected."""
        collected, self._collecting = self._collecting, []
        for ask in collected:
            ask.deadline = self._clock() + self._deadline_s
            ask.reply = self._client.lookup(ask.request, list(ask.keys), prompt_tokens=ask.prompt_tokens)

    def get(self, request: str) -> Ask | None:
        return self._asks.get(request)

    def failed(self, request: str, keys: Iterable[bytes]) -> None:
        """Loads of ``keys`` failed: from now on they are MISS, or vLLM would try for ever."""
        ask = self._asks.get(request)
        if ask is not None and ask.fetch is not None:
            ask.fetch.difference_update(keys)

    def forget(self, request: str) -> None:
        ask = self._asks.pop(request, None)
        if ask in self._collecting:
            self._collecting.remove(ask)

    def _collect(self, ask: Ask, key: bytes, end_token: int) -> Answer:
        if not self._client.connected:
            ask.fetch = set()
            return Answer.MISS
        if not ask.keys:
            ask.first_chunk = max(0, end_token // self._chunk_tokens - 1)
            ask.prompt_tokens = max(ask.prompt_tokens, end_token)
            self._collecting.append(ask)
        ask.keys[key] = None
        return Answer.RETRY

    def _settled(self, ask: Ask) -> bool:
        """Decide once, if the reply is there or can be waited for no longer."""
        if ask.fetch is not None:
            return True
        if ask.reply is not None and ask.reply.done():
            reply = ask.reply.result()
            ask.gate, ask.decision = reply.gate, self._choose(ask, reply)
            ask.fetch = set(list(ask.keys)[: max(0, ask.decision.cut - ask.first_chunk)])
        elif self._clock() >= ask.deadline:
            self.late += 1
            ask.fetch = set()
        return ask.fetch is not None
