"""The latest sampled chunks of a store, for whoever asks before they are pushed out."""

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from tiertune_connector.documents import Json
from tiertune_connector.whatif.sampler import Pick

ROOM = 32_768
PAGE = 8_192


class LookupRecord(NamedTuple):
    """A request that looked its prompt up."""

    number: int
    """Counted per boot of the store; the engine's own name for the request is left out."""
    at_s: float
    """Since the epoch."""
    chunks: int
    """Those of its whole prompt; their keys are not kept here."""
    prompt_tokens: int
    engine: str
    namespace: str
    tenant: bytes
    """Its digest, or nothing."""

    def document(self, sequence: int, pick: Pick) -> Json:
        """One sample as it is handed out."""
        return {
            "seq": sequence,
            "t": self.at_s,
            "req": self.number,
            "key": pick.key.hex(),
            "pos": pick.position,
            "chain_len": self.chunks,
            "prompt_tokens": self.prompt_tokens,
            "engine": self.engine,
            "namespace": self.namespace,
            "tenant": self.tenant.hex(),
            "hot": pick.hot,
        }


class Samples:
    """A ring of at most ``room`` samples; new ones push out the oldest. Not thread-safe."""

    def __init__(self, room: int = ROOM) -> None:
        self._ring: deque[tuple[LookupRecord, Pick]] = deque(maxlen=room)
        self.next = 0
        """Sequence number of the next sample; the first one is 0."""
        self.cleared = 0
        """Samples before this number were dropped on purpose, or earlier for lack of room."""

    @property
    def dropped(self) -> int:
        """Samples no longer here: the sequence number of the oldest one that is."""
        return self.next - len(self._ring)

    def add(self, asked: LookupRecord, picks: Sequence[Pick]) -> None:
        self._ring.extend((asked, pick) for pick in picks)
        self.next += len(picks)

    def clear(self) -> None:
        """Drop all: they were sampled in another way than the next ones."""
        self._ring.clear()
        self.cleared = self.next

    def page(self, since: int, limit: int = PAGE) -> list[Json]:
        """About ``limit`` samples from number ``since`` on, as documents; a request's samples stay together."""
        first = max(0, since - self.dropped)
        told: list[Json] = []
        before: LookupRecord | None = None
        for index, (asked, pick) in enumerate(islice(self._ring, first, None), self.dropped + first):
            if len(told) >= limit and asked is not before:
                break
            told.append(asked.document(index, pick))
            before = asked
        return told
