"""What a store learns from lookups for what-if: samples for the fleet, ghosts of its own pools.

A lookup only leaves its keys here; they are studied later, by a thread of their own or when somebody asks.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

import msgspec

from tiertune_connector.counters import Counters, Gauge
from tiertune_connector.documents import Json
from tiertune_connector.protocol.messages import PrefillLine, Side
from tiertune_connector.sessions.session import Session
from tiertune_connector.whatif.pool_ghosts import PoolGhosts
from tiertune_connector.whatif.sampler import Frequent, Hashes, Pick, Sampler, hashes

_EVERY_S = 0.05
_REST_S, _LEAST_REST_S = 0.02, 2e-3
"""Rests between studied batches, while few lookups wait and while as many wait as are kept: the interpreter is free for
lookups most of the time, however many come."""
_BATCH_CHUNKS = 512
"""Size at which a batch takes no more requests. It keeps others from computing for less than a millisecond."""
_WAITING_CHUNKS = 1 << 18
"""Most chunks kept until they are studied."""
_CANDIDATES = 128

KEPT = 32_768
"""Most samples kept for whoever asks before they are pushed out."""
PAGE = 8_192
_NOTHING = (0.0, 0.0, 0.0)


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

    def __init__(self, room: int = KEPT) -> None:
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


class Room(NamedTuple):
    """A pool's size."""

    chunks: int
    """Chunks that it may hold."""
    stride: int
    """Bytes that each one takes."""

    def of(self, each: float) -> "Room":
        """The same for chains that take ``each`` chunks where one is asked for."""
        return Room(int(self.chunks / each), round(self.stride * each))


class Ghosts:
    """The ghosts of one pool, and what was told of them: estimates may fall, a counter does not. Not thread-safe."""

    def __init__(self, room: Room) -> None:
        """``room`` is the pool's size when requests first come to it."""
        self._room = room
        self._ghosts = PoolGhosts(room.chunks)
        self._told: dict[tuple[str, int], tuple[float, float, float]] = {}
        """By algorithm and capacity: chunks hit, missed, and all that came."""

    def requests(self, room: Room, chains: Iterable[Sequence[bytes]], hashed: Hashes) -> None:
        """Requests looked these chains up, head first; ``hashed`` are the hashes of all their keys.

        ``room`` is the pool's size now.
        """
        if room != self._room:
            self._room = room
            self._ghosts.resize(room.chunks)
        self._ghosts.requests(chains, hashed)

    def rows(self, namespace: str, model: str, chunk_tokens: int) -> Iterator[Gauge]:
        """The pool's series of ``whatif_tokens_total``."""
        counts, before, self._told = self._ghosts.counts(), self._told, {}
        for (algorithm, capacity), (hits, chunks) in counts.items():
            hit, missed, came = before.get((algorithm, capacity), _NOTHING)
            if chunks < came:  # the ghosts count anew there
                hit, missed, _ = _NOTHING
            told = self._told[algorithm, capacity] = max(hit, hits), max(missed, chunks - hits), chunks
            size = str(capacity * self._room.stride)
            for result, count in zip(("hit", "miss"), told, strict=False):
                yield "whatif_tokens_total", (algorithm, size, result, namespace, model), count * chunk_tokens


_Lookup = tuple[LookupRecord, Sequence[bytes]]
"""What ``seen`` leaves: the request, and its keys."""


class StaleError(Exception):
    """A newer way to sample is in force."""


@dataclass(frozen=True)
class Sampling:
    """How all stores of a fleet sample; ``version`` grows with every change."""

    seed: int = 0
    rate: float = 0.01
    hot: tuple[bytes, ...] = ()
    version: int = 0


@dataclass
class _Namespace:
    """What is known of one namespace."""

    chunk_tokens: int
    model: str
    requests: int = 0
    """Those that looked up since the boot, sampled or not; below, all their chunks."""
    chunks: int = 0
    frequent: Frequent = field(default_factory=Frequent)
    prefill: PrefillLine | None = None
    each: float = 1.0
    """Chunks of the pool for each of a chain, with those of other groups of layers that keep whole prompts too."""
    ghosts: Ghosts | None = None
    """None: no request has come to its pool yet."""


@dataclass(eq=False)
class Observer:
    """Thread-safe; ``seen`` never waits for what is being studied.

    ``room`` returns the size of a namespace's DRAM pool, ``wall`` seconds since the epoch.
    """

    room: Callable[[str], Room | None]
    wall: Callable[[], float]
    most_waiting: int = _WAITING_CHUNKS

    def __post_init__(self) -> None:
        self._waiting: deque[_Lookup] = deque()
        self._waiting_chunks = 0
        self._requests = 0
        self._skipped = 0
        self._queue = threading.Lock()
        self._study = threading.RLock()
        self.sampling = Sampling()
        """In force; ``adopt`` replaces it."""
        self._sampler = Sampler(self.sampling.rate)
        self._samples = Samples()
        self._namespaces: dict[str, _Namespace] = {}

    # -- on the way of requests

    def attach(self, session: Session) -> None:
        """A client of a namespace came."""
        assert session.namespace is not None
        known = _Namespace(session.chunk_tokens, session.namespace.model)
        self._namespaces.setdefault(session.digest, known)

    def seen(self, session: Session, keys: Sequence[bytes], prompt_tokens: int, tenant: bytes = b"") -> None:
        """Note that a request asks for its chunks. Constant time."""
        with self._queue:
            self._requests += 1
            if self._waiting_chunks + len(keys) > self.most_waiting:
                self._skipped += 1
                return
            number, engine, namespace = self._requests, session.engine, session.digest
            asked = LookupRecord(number, self.wall(), len(keys), prompt_tokens, engine, namespace, tenant)
            self._waiting.append((asked, keys))
            self._waiting_chunks += len(keys)

    def prefill(self, session: Session, line: PrefillLine | None) -> None:
        """Note what prefilling costs an engine."""
        known = self._namespaces.get(session.digest)
        if line is not None and known is not None:
            known.prefill = line

    def beside(self, session: Session, sides: Sequence[Side]) -> None:
        """Note that other groups of layers keep chunks of the same prompt, which take room too.

        Not those with a window: engines keep only the last chunks of a prompt there, few beside the others.
        """
        whole = (side.chunk_tokens for side in sides if not side.window_chunks)
        each = 1.0 + sum(session.chunk_tokens / tokens for tokens in whole)
        session.chunks_each = max(session.chunks_each, each)  # a short prompt has not all of them
        known = self._namespaces.get(session.digest)
        if known is not None:
            known.each = max(known.each, session.chunks_each)

    def forget(self, namespace: str) -> None:
        """Nobody uses it any more: its totals begin anew if a client of it comes again."""
        self._namespaces.pop(namespace, None)

    # -- afterwards

    def run(self, stopping: threading.Event, counters: Counters) -> None:
        """Study what comes until told to stop. For a thread of its own."""
        while not stopping.wait(_EVERY_S):
            with counters.surviving("observe", "lookups could not be studied"):
                self.settle(lambda: stopping.wait(self._rest_s()))

    def settle(self, breathe: Callable[[], object] = lambda: None) -> None:
        """Study all lookups that came before the call; ``breathe`` is called now and then, to let others compute."""
        newest = self._requests  # lookups that come meanwhile may never end
        while True:
            with self._study:
                batch = self._take(newest)
                for namespace, lookups in batch.items():
                    self._learn(namespace, lookups)
            if not batch:
                return
            breathe()

    def adopt(self, sampling: Sampling) -> None:
        """Sample as the fleet does. StaleError if a newer way is in force, or another of the same version."""
        with self._study:
            if sampling == self.sampling:
                return
            if sampling.version <= self.sampling.version:
                raise StaleError(f"sampling is at version {self.sampling.version}")
            self.settle()
            if (sampling.seed, sampling.rate) != (self.sampling.seed, self.sampling.rate):
                self._samples.clear()
            if sampling.seed != self.sampling.seed:
                for known in list(self._namespaces.values()):
                    known.ghosts = None  # keys are hashed in another way from now on
            self.sampling = sampling
            self._sampler = Sampler(sampling.rate, sampling.hot)

    # -- for those who ask

    def read(self, since: int, limit: int = PAGE) -> tuple[Json, list[Json]]:
        """A header, and the samples from number ``since`` on, or the first of them."""
        with self._study:
            self.settle()
            page, ring, sampling = self._samples.page(since, limit), self._samples, self.sampling
            after = page[-1]["seq"] + 1 if page else ring.next
            header = {
                "next": after,
                "rate": sampling.rate,
                "hash_seed": sampling.seed,
                "hot_version": sampling.version,
                "dropped": ring.dropped,
                "cleared": ring.cleared,
                "behind": ring.next - after,
                "skipped": self._skipped,
                "time_s": self.wall(),
                "namespaces": {
                    digest: {
                        "requests": known.requests,
                        "chunks": known.chunks,
                        "hot_candidates": {key.hex(): count for key, count in known.frequent.top(_CANDIDATES).items()},
                    }
                    for digest, known in list(self._namespaces.items())
                },
            }
        return header, page

    def terms(self, namespace: str) -> Json:
        """Tokens of a namespace's chunk, how many chunks each of a chain takes, and what prefilling costs its engines.

        As far as known.
        """
        known = self._namespaces.get(namespace) or _Namespace(chunk_tokens=0, model="")
        return {
            "chunk_tokens": known.chunk_tokens,
            "chunks_each": known.each,
            "prefill": msgspec.structs.asdict(known.prefill) if known.prefill else None,
        }

    def rows(self) -> list[Gauge]:
        """Series of ``whatif_tokens_total``."""
        with self._study:
            self.settle()
            return [
                row
                for digest, known in list(self._namespaces.items())
                if known.ghosts is not None
                for row in known.ghosts.rows(digest, known.model, known.chunk_tokens)
            ]

    # -- within

    def _rest_s(self) -> float:
        return max(_LEAST_REST_S, _REST_S * (1 - self._waiting_chunks / self.most_waiting))

    def _take(self, newest: int) -> dict[str, list[_Lookup]]:
        """Take some waiting lookups up to number ``newest``, by namespace."""
        batch = defaultdict[str, list[_Lookup]](list)
        with self._queue:
            waiting, chunks = self._waiting, 0
            while waiting and waiting[0][0].number <= newest and chunks < _BATCH_CHUNKS:
                asked, keys = waiting.popleft()
                batch[asked.namespace].append((asked, keys))
                chunks += asked.chunks
            self._waiting_chunks -= chunks
        return batch

    def _learn(self, namespace: str, lookups: list[_Lookup]) -> None:
        known = self._namespaces.get(namespace)
        if known is None:
            return
        chains = [keys for _, keys in lookups]
        hashed = hashes(list(chain.from_iterable(chains)), self.sampling.seed)
        known.requests += len(lookups)
        known.chunks += hashed.size
        for (asked, _), picked in zip(lookups, self._sampler.pick(chains, hashed), strict=True):
            if picked:
                self._samples.add(asked, picked)
        known.frequent.requests(chains)
        if (room := self.room(namespace)) is not None:
            room = room.of(known.each)
            known.ghosts = known.ghosts or Ghosts(room)
            known.ghosts.requests(room, chains, hashed)
