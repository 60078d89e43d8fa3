"""Hits by distance, of hot keys one by one and of sampled keys for all others."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

STEPS = 8
"""Parts of the gap between two sampled keys that are told apart: hot keys fall into it."""


class Distances:
    """A key with k sampled and h hot ones used after it stands for distances from k / rate + h on, 1 / rate wide.

    Sampled keys are scaled by their share of the accesses to keys that came before, not by the rate: only those can be
    hits, and how many they are is known of all keys, by hash (SHARDS-adj does so with the share of all accesses).
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self.sampled: dict[int, int] = defaultdict(int)
        """Hits of sampled keys since then, by distance: steps of which STEPS make up the gap of 1 / rate."""
        self.hot: dict[int, int] = defaultdict(int)
        """Those of hot keys."""
        self._settled: dict[tuple[float, float], float] = {}  # (first distance, width): hits

    def settle(self, scale: float, rate: float) -> None:
        """A hit of a sampled key stood for ``scale`` of the whole stream; from now on keys are sampled at ``rate``."""
        for hits, weight in ((self.sampled, scale), (self.hot, 1.0)):
            for steps, count in hits.items():
                place = steps / STEPS / self._rate, 1 / self._rate
                self._settled[place] = self._settled.get(place, 0.0) + count * weight
            hits.clear()
        self._rate = rate

    def hits(self, sizes: Sequence[float]) -> list[float]:
        """Settled hits of caches of these sizes."""
        places = np.array(list(self._settled), dtype=np.float64).reshape(-1, 2)
        counts = np.fromiter(self._settled.values(), dtype=np.float64)
        within = [np.clip((size - places[:, 0]) / places[:, 1], 0.0, 1.0) for size in sizes]
        return [float(counts @ share) for share in within]
