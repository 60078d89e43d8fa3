"""What a store does for a chunk beside moving its bytes: index, eviction, metrics and what-if, in this process."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.store.world import CHUNK_TOKENS, keys
from tiertune_connector.counters import Counters
from tiertune_connector.keys import Namespace
from tiertune_connector.protocol.messages import Commit, Load, Lookup, Release, Reserve
from tiertune_connector.sessions.session import Session
from tiertune_connector.store.tiered import TieredStore
from tiertune_connector.tiers.dram import DramTier
from tiertune_connector.tuning import parse_tuning

_NBYTES = 4096
"""Bytes of a chunk here; the index does not depend on them."""
PROMPT = 8
"""Chunks that are asked for together."""


class Index:
    """A store that holds many chunks, and one client's session."""

    def __init__(self, store: TieredStore, prompts: int) -> None:
        name = Namespace(model="bench", chunk_tokens=CHUNK_TOKENS)
        self._store = store
        self._session = Session("bench", "bench", "all", name, _NBYTES, CHUNK_TOKENS)
        self._prompts = [keys(f"prompt {number}", PROMPT) for number in range(prompts)]
        if refused := store.attach(self._session):
            raise RuntimeError(refused)
        for prompt in self._prompts:
            while store.pools.settle():
                pass
            refs = store.storing.reserve(self._session, Reserve(1, "r", prompt, b"")).slots
            store.storing.commit(self._session, Commit(2, prompt, [ref for ref in refs if ref is not None]))

    def book(self, number: int) -> None:
        """Look up, load and release a prompt's chunks, and study at once what a store studies afterwards."""
        prompt = self._prompts[number % len(self._prompts)]
        asked = Lookup(number, f"r{number}", prompt, PROMPT * CHUNK_TOKENS, b"")
        found = self._store.lookups.lookup(self._session, asked, wait=False)
        self._store.lookups.looked_up(self._session, asked, found)
        loaded = self._store.loads.load(self._session, Load(3, prompt, 1.0), time.monotonic() + 1)
        if len(found.tiers) != PROMPT or len(loaded.slots) != PROMPT:
            raise RuntimeError("a chunk was not there")
        self._store.holdings.release(self._session, Release(loaded.lease))
        self._store.observer.settle()


@contextmanager
def index(prompts: int = 512) -> Iterator[Index]:
    """An index whose prompts all lie in DRAM."""
    clock, capacity = time.monotonic, prompts * PROMPT * 2 * _NBYTES
    tuning = parse_tuning({"tiers": {"dram": {"capacity_bytes": capacity}, "remote": {"fetch": "off", "write": "off"}}})
    dram = DramTier(segment_bytes=capacity, clock=clock)
    store = TieredStore("bench", tuning, dram=dram, lanes={}, counters=Counters(), clock=clock)
    store.retune(tuning)
    try:
        yield Index(store, prompts)
    finally:
        store.close()
