"""Host memory with its client in this process: a tier as the slower ones are, for tests that need no store."""

from collections.abc import Sequence

import numpy as np

from connector.stores import A, payload, read_chunk, view
from tiertune_connector.chunk import NOBODY, Origin, checksum
from tiertune_connector.tiers.base import Came, Outcome, unheard
from tiertune_connector.tiers.disk import DiskTier
from tiertune_connector.tiers.dram import DramTier
from tiertune_connector.tiers.segment import PAGE
from tiertune_connector.tiers.slots import Slot


class LocalDram(DramTier):
    """Copies from and to slots as clients do: what is read is pinned, what is written is reserved before."""

    why = ""

    def present(self, namespace: str, keys: Sequence[bytes]) -> tuple[Outcome, int]:
        with self.lock:
            held = self.pools.get(namespace)
            return Outcome.OK, held.pool.prefix(keys) if held else 0

    def read(self, namespace: str, key: bytes, out: memoryview, came: Came = unheard) -> tuple[Outcome, Origin]:
        slot = self.pin(namespace, key)
        if slot is None:
            return Outcome.MISS, NOBODY
        try:
            np.copyto(np.frombuffer(out, np.uint8), slot.view())
            if checksum(out) != slot.checksum:
                with self.lock:
                    self.pools[namespace].drop(key)
                return Outcome.CORRUPT, NOBODY
            came(len(out))
            return Outcome.OK, slot.origin
        finally:
            self.unpin(namespace, key)

    def write(self, namespace: str, key: bytes, payload: memoryview, origin: Origin) -> Outcome:
        with self.lock:
            held, slot = self.pools.get(namespace), self.reserve(namespace, key, origin)
            if held is None:
                return Outcome.ERROR
            if slot is None:
                return Outcome.THERE if key in held.pool or held.pool.busy(key) else Outcome.FULL
        np.copyto(np.frombuffer(slot.view(), np.uint8), np.frombuffer(payload, np.uint8))
        self.commit(namespace, key, slot, checksum(payload))
        return Outcome.OK


def fill(tier: LocalDram, keys: Sequence[bytes], namespace: str = A) -> list[tuple[bytes, Slot]]:
    """Commit chunks of a page, the first of them the next victim; their slots."""
    for key in keys:
        assert tier.write(namespace, key, view(payload(key, PAGE)), NOBODY).kept
    return [(key, tier.pools[namespace].pool.get(key)) for key in keys]


def intact(tier: LocalDram, key: bytes) -> bool:
    return read_chunk(tier, A, key, PAGE)[0] is Outcome.OK


def resize(tier: DramTier | DiskTier, capacity_bytes: int) -> None:
    """Steps until nothing is left to do."""
    tier.retune(capacity_bytes, {})
    while tier.settle():
        pass
