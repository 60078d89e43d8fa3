"""Lookups while a store is tuned, and while nobody tunes it, in turns."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, sleep, thread_time
from typing import Any

from benchmarks.store.lookup import KEYS, lookups
from benchmarks.store.rounds import percentile
from benchmarks.store.world import MIB, POLL_S, Store, keys, rows, serving, wait_until
from tiertune_connector.tiers.segment import PAGE
from tiertune_connector.tiers.shares import HANDED_OVER
from tiertune_connector.whatif.simulated import SimulatedPool

SIZE, QUICK_SIZE = 4096 * MIB, 256 * MIB
RESIZED_CHUNK = MIB // 4
SWITCHED, QUICK_SWITCHED = 100_000, 10_000
"""Chunks, of a page each."""
ALGORITHMS = ("arc", "s3fifo", "lru")
QUIET_S = 1.0
_BATCH = 128
_CLOSE = 0.99
"""Share of a resize's memory that counts as all of it."""


def resize(folder: Path, rounds: int, *, size: int = SIZE) -> dict[str, Any]:
    """A full DRAM tier halved and doubled; each lasts until the machine has got back, or given, the memory."""
    with serving(folder, dram=size) as store:
        probed = _Probed(store, RESIZED_CHUNK, size)
        quiet, tuned = list[list[float]](), list[list[float]]()
        for _ in range(rounds):
            probed.fill()
            for wanted in (size // 2, size):
                quiet.append(probed.during(probed.watched))
                tuned.append(probed.during(lambda wanted=wanted: probed.resized(wanted)))  # type: ignore[misc]
    return _told("resize", quiet, tuned)


def switch(folder: Path, rounds: int, *, chunks: int = SWITCHED) -> dict[str, Any]:
    """Switch many chunks to another eviction algorithm. RuntimeError if one of them is lost."""
    with serving(folder, dram=chunks * PAGE) as store:
        probed = _Probed(store, PAGE, chunks * PAGE)
        probed.fill()
        quiet, tuned = list[list[float]](), list[list[float]]()
        for number in range(rounds):
            name = ALGORITHMS[number % len(ALGORITHMS)]
            quiet.append(probed.during(probed.asked))
            tuned.append(probed.during(lambda name=name: probed.switched(name)))  # type: ignore[misc]
        probed.all_there()
    return _told("switch", quiet, tuned, **_holds(chunks))


class _Probed:
    """A full store, and a client that asks for the chunks that were used last."""

    def __init__(self, store: Store, chunk_bytes: int, size: int) -> None:
        self.store, self._client = store, store.client(chunk_bytes)
        self._size = size
        self._chunks = keys("lookup", size // chunk_bytes)
        (self._data,) = rows(1, chunk_bytes)
        self._once = lookups(self._client, self._chunks[:KEYS])
        wait_until(lambda: self._taken() >= _CLOSE * size, "the store's memory follows")

    def fill(self) -> None:
        """Store what is missing; last the chunks that lookups ask for."""
        for batch in _batches(self._chunks[::-1]):
            slots = [slot for slot in self._client.reserve(batch).result().slots if slot is not None]
            for slot in slots:
                self._client.write(slot, self._data)
            self._client.commit(slots).result()
        self._once()

    def during(self, act: Callable[[], None]) -> list[float]:
        """Seconds of each lookup while another thread acts."""
        taken = list[float]()
        with ThreadPoolExecutor(1) as other:
            acting = other.submit(act)
            while not acting.done():
                start = perf_counter()
                self._once()
                taken.append(perf_counter() - start)
            acting.result()
        return taken

    def watched(self) -> None:
        """Do what ``resized`` does beside resizing: it shares this process's interpreter with the lookups."""
        self.store.total("clients")
        until = monotonic() + QUIET_S
        while monotonic() < until:
            self._taken()
            sleep(POLL_S)

    def asked(self) -> None:
        """Do what ``switched`` does beside switching."""
        self.store.total("clients")
        sleep(QUIET_S)

    def resized(self, wanted: int) -> None:
        more = wanted == self._size
        self.store.tune("tiers", "dram", capacity_bytes=wanted)
        wait_until(
            lambda: self._taken() >= _CLOSE * wanted if more else self._taken() * _CLOSE <= wanted,
            "the store's memory follows",
        )

    def switched(self, algorithm: str) -> None:
        self.store.tune("defaults", eviction=algorithm)
        sleep(QUIET_S)

    def all_there(self) -> None:
        found = sum(
            len(self._client.lookup("bench", batch, prompt_tokens=len(batch)).result().tiers)
            for batch in _batches(self._chunks)
        )
        if found != len(self._chunks):
            raise RuntimeError(f"{found} of {len(self._chunks)} chunks are left")

    def _taken(self) -> int:
        """Bytes of shared memory that the store has from the machine."""
        segments = dict(map(_segment, Path(f"/proc/{self.store.pid}/fd").iterdir()))  # each has two descriptors
        return sum(segments.values())


def _batches(chunks: Sequence[bytes]) -> Iterator[list[bytes]]:
    return (list(chunks[start : start + _BATCH]) for start in range(0, len(chunks), _BATCH))


def _segment(descriptor: Path) -> tuple[int, int]:
    """Inode number and bytes of the file behind a descriptor; zeros if it is no segment."""
    try:
        if "memfd:tiertune" in str(descriptor.readlink()):
            told = descriptor.stat()
            return told.st_ino, told.st_blocks * 512
    except FileNotFoundError:  # closed meanwhile
        pass
    return 0, 0


def _holds(chunks: int) -> dict[str, float]:
    """Processor time of the longest step of a switch, for which a request may wait, and of a switch in one go."""
    pool = SimulatedPool(chunks, ALGORITHMS[-1])
    for key in keys("held", chunks):
        pool.write_through([key])
    steps, wholes = list[float](), list[float]()
    for name in ALGORITHMS:
        switched = [_processor_s(lambda name=name: pool.switch(name, whole=False))]  # type: ignore[misc]
        while len(switched) * HANDED_OVER < chunks + 2 * HANDED_OVER:
            switched.append(_processor_s(lambda: pool.hand_over(HANDED_OVER)))
        steps.append(max(switched))
    for name in ALGORITHMS:
        wholes.append(_processor_s(lambda name=name: pool.switch(name)))  # type: ignore[misc]
    return {"step_us": 1e6 * median(steps), "whole_us": 1e6 * median(wholes)}


def _processor_s(act: Callable[[], object]) -> float:
    start = thread_time()
    act()
    return thread_time() - start


def _told(
    name: str, quiet: Sequence[Sequence[float]], tuned: Sequence[Sequence[float]], **more: float
) -> dict[str, Any]:
    """Tails of all lookups, and the median of the phases' longest ones."""
    told = more
    for prefix, phases in (("", tuned), ("quiet_", quiet)):
        taken = [seconds for phase in phases for seconds in phase]
        told[f"{prefix}p99_us"] = 1e6 * percentile(taken, 0.99)
        told[f"{prefix}stall_us"] = 1e6 * median(map(max, phases))
        told[f"{prefix}longest_us"] = 1e6 * max(taken)
        told[f"{prefix}samples"] = len(taken)
    return {"live": {name: {**told, "ratio": told["p99_us"] / told["quiet_p99_us"]}}}
