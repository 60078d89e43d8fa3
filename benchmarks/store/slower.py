"""A tier slower than memory: reads of chunks not in DRAM, and batches written behind, beside baselines."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.store.rounds import WARM, Once, interleaved
from benchmarks.store.world import CHUNK_TOKENS, MIB, Store, keys, load_chunk, rows, store_chunk

NBYTES = 32 * MIB
CHUNKS = 24
"""Chunks asked for in turns."""
BATCH = 8
"""Chunks that are written behind in one go: enough that asking whether all are written costs little beside them."""
IN_DRAM = 2 * BATCH
"""Chunks in DRAM: half of them may wait to be written, and the next one asked for has left long ago."""


class NotMeasuredError(Exception):
    """This machine lacks what is to be measured."""


@dataclass(frozen=True)
class Raw:
    """A baseline: one chunk read into memory of ours, and one written."""

    read: Once
    write: Once


@dataclass
class Measured:
    """Seconds by path, of a chunk read and of a batch written; minor faults of one chunk."""

    read: dict[str, list[float]] = field(default_factory=dict)
    write: dict[str, list[float]] = field(default_factory=dict)
    faults: dict[str, float] = field(default_factory=dict)


def measure(
    store: Store,
    tier: str,
    rounds: int,
    raw: Mapping[str, Raw],
    *,
    cold: Callable[[], None],
    written: Callable[[], None],
    fresh: Callable[[], None],
) -> Measured:
    """``ours`` beside each of ``raw``, by name.

    ``cold`` comes before each read, untimed, and ``fresh`` before each batch; ``written`` ends our batch, timed.
    RuntimeError if the tier did not do what was timed.
    """
    client, told = store.client(NBYTES), Measured()
    store.wait_sized()
    (data,), staged = rows(1, NBYTES), rows(2, NBYTES)
    there, new = keys(f"{tier} load", CHUNKS), iter(keys(f"{tier} store", BATCH * 2 * (WARM + rounds)))

    def read(number: int) -> None:
        load_chunk(client, there[number % CHUNKS], staged[number % 2])

    def write(_: int) -> None:
        for _ in range(BATCH):
            store_chunk(client, next(new), data)
        store.wait_written()
        written()

    def batch(once: Once) -> Once:
        def many(number: int) -> None:
            for each in range(BATCH):
                once(number * BATCH + each)

        return many

    def cold_read(number: int) -> None:
        cold()
        read(number)

    with moved(store, tier, "write", CHUNKS):
        for start in range(0, CHUNKS, BATCH):
            for key in there[start : start + BATCH]:
                store_chunk(client, key, data)
            store.wait_written()
    with moved(store, tier, "read", WARM + rounds):
        paths = {name: each.read for name, each in raw.items()}
        told.read = interleaved({"ours": read, **paths}, rounds, between=cold)
    few = min(rounds, IN_DRAM)
    first = WARM + rounds  # goes on with the turns: what was asked for lately is still in DRAM
    with moved(store, tier, "read", few):
        told.faults["read"] = store.faults(lambda number: cold_read(first + number), few)
    with moved(store, tier, "write", (WARM + rounds) * BATCH):
        paths = {name: batch(each.write) for name, each in raw.items()}
        told.write = interleaved({"ours": write, **paths}, rounds, between=fresh)
    with moved(store, tier, "write", BATCH):
        fresh()
        told.faults["write"] = store.faults(write, 1) / BATCH
    client.close()
    return told


@contextmanager
def moved(store: Store, tier: str, operation: str, chunks: int) -> Iterator[None]:
    """RuntimeError unless exactly ``chunks`` go to or come from the tier; lookups must find those that come."""
    before = _seen(store, tier, operation)
    yield
    nbytes, tokens = (now - then for now, then in zip(_seen(store, tier, operation), before, strict=True))
    found = tokens // CHUNK_TOKENS if operation == "read" else chunks
    if nbytes // NBYTES != chunks or found != chunks:  # probes of the remote are small beside a chunk
        raise RuntimeError(f"{tier}: {chunks} chunks were to be moved by {operation}, not {nbytes / NBYTES}, {found}")


def _seen(store: Store, tier: str, operation: str) -> tuple[float, float]:
    moved_bytes = store.total("tier_transfer_bytes_total", tier=tier, operation=operation)
    return moved_bytes, store.total("tier_lookup_tokens_total", tier=tier, result="hit")


def faults(told: Measured, read: str, write: str) -> dict[str, Any]:
    return {read: told.faults["read"], write: told.faults["write"]}
