"""DRAM: load and store of one chunk through the client, against a memcpy of as much from memory to memory."""

from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.store import events
from benchmarks.store.index import PROMPT, index
from benchmarks.store.rounds import interleaved, ratio
from benchmarks.store.world import MIB, Store, keys, load_chunk, rows, serving, store_chunk, touched
from tiertune_connector.chunk import Bytes

SIZES = {"32m": 32 * MIB, "8m": 8 * MIB, "3m": 3 * MIB}
STORED = ("32m", "8m")
"""Sizes whose storing is measured too."""
POOL = 768 * MIB
"""Far more than caches of the processor hold."""
QUICK_POOL = 128 * MIB
PAGES = 1024
"""Pages of 32 KiB: 256 tokens in an engine with blocks of 16 tokens, keys and values of 32 layers apart."""
STAGED = 2
"""Buffers that chunks are copied into, like an engine's staging; the baseline has as many of its own."""


def measure(folder: Path, rounds: int, *, pool: int = POOL) -> dict[str, Any]:
    """Paths, faults, a metric event, and work beside the copy, relative to its memcpy: round trips, bookkeeping."""
    told: dict[str, Any] = {"paths": {}, "scattered": {}, "faults_per_op": {}, **events.measure(rounds)}
    for size, nbytes in SIZES.items():
        home = folder / size
        home.mkdir()
        with serving(home, dram=pool) as store:
            _measure(_Chunks(store, nbytes, pool // nbytes // 2), size, rounds, told)
    return told


class _Chunks:
    """Chunks to load, and the same in memory of ours. The store is full: every chunk that is stored evicts one."""

    def __init__(self, store: Store, nbytes: int, count: int) -> None:
        self.store = store
        self.nbytes = nbytes
        self.client = store.client(nbytes)
        store.wait_sized()
        self._count = count
        self._here, self._staged = rows(count, nbytes), rows(2 * STAGED, nbytes)
        self._there = keys("load", count)
        self._stored = 0
        self._pages = touched(2 * nbytes).view(np.int64).reshape(2 * PAGES, -1)
        self._where = np.random.default_rng(0).permutation(len(self._pages))[:PAGES]
        for key, data in zip(self._there, self._here, strict=True):
            store_chunk(self.client, key, data)
        for number in range(count):
            self.take(number)

    def load(self, number: int) -> None:
        load_chunk(self.client, self._there[number % self._count], self._staged[number % STAGED])

    def load_scattered(self, number: int) -> None:
        """Load, and scatter the chunk into an engine's blocks."""
        self.load(number)
        self._pages[self._where] = self._paged(self._staged[number % STAGED])

    def ask(self, number: int) -> None:
        load_chunk(self.client, self._there[number % self._count], None)

    def copy(self, number: int) -> None:
        """Copy into buffers that no load copies into: those of loads are in the caches of both processors."""
        np.copyto(self._staged[STAGED + number % STAGED], self._here[number % self._count])

    def take(self, number: int) -> None:
        self._stored += 1
        store_chunk(self.client, sha256(b"store %d" % self._stored).digest(), self._here[number % self._count])

    def take_scattered(self, number: int) -> None:
        """Gather the chunk from an engine's blocks, and store it."""
        gathered = self._paged(self._here[number % self._count])
        np.take(self._pages, self._where, axis=0, out=gathered, mode="clip")
        self.take(number)

    def _paged(self, row: Bytes) -> npt.NDArray[np.int64]:
        return row.view(np.int64).reshape(PAGES, -1)

    def copy_away(self, number: int) -> None:
        """Copy between rows that no cache holds, as storing copies from one to the slot used longest ago."""
        source, target = (self._here[(number + self._count * part // 3) % self._count] for part in (1, 2))
        np.copyto(target, source)


def _measure(chunks: _Chunks, size: str, rounds: int, told: dict[str, Any]) -> None:
    """Measure loads first: what is stored later evicts what was there."""
    whole = size == "32m"
    paths = {"load": chunks.load, "copy": chunks.copy, "round trips": chunks.ask}
    with index() as indexed:
        if whole:
            paths |= {"book": indexed.book, "scattered": chunks.load_scattered}
        seconds = interleaved(paths, rounds)
    told["paths"][f"dram_load_{size}"] = ratio(seconds["load"], seconds["copy"], "memcpy", chunks.nbytes)
    if whole:
        told["overhead"]["bookkeeping_32m"] = median(seconds["book"]) / PROMPT / median(seconds["copy"])
        told["overhead"]["round_trips_32m"] = median(seconds["round trips"]) / median(seconds["copy"])
        told["scattered"]["dram_load_32m"] = ratio(seconds["scattered"], seconds["copy"], "memcpy", chunks.nbytes)
        told["faults_per_op"]["dram_load_32m"] = chunks.store.faults(chunks.load, rounds)
    if size in STORED:
        paths = {"store": chunks.take, "copy": chunks.copy_away}
        seconds = interleaved(paths | ({"scattered": chunks.take_scattered} if whole else {}), rounds)
        told["paths"][f"dram_store_{size}"] = ratio(seconds["store"], seconds["copy"], "memcpy", chunks.nbytes)
    if whole:
        told["scattered"]["dram_store_32m"] = ratio(seconds["scattered"], seconds["copy"], "memcpy", chunks.nbytes)
        told["faults_per_op"]["dram_store_32m"] = chunks.store.faults(chunks.take, rounds)
    chunks.client.close()
