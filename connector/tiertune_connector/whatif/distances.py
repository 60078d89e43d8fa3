"""Hits by distance: of hot keys one by one, and of sampled keys for all others."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

STEPS = 8
"""Parts told apart in the gap between two sampled keys: hot keys fall into it."""

Floats = NDArray[np.float64]
Hits = dict[int, int]
"""By distance in steps."""


class Distances:
    """A key with k sampled and h hot ones used after it stands for distances from k / rate + h on, 1 / rate wide.

    Sampled keys are scaled by their share of the accesses to keys that came before, not by the rate: only those can be
    hits, and how many they are is known of all keys, by hash (SHARDS-adj does so with the share of all accesses).
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self.sampled: Hits = defaultdict(int)
        """Hits of sampled keys since the settlement, by distance in steps, STEPS to the gap of 1 / rate."""
        self.hot: Hits = defaultdict(int)
        """Those of hot keys."""
        self._rises: Hits = defaultdict(int)  # of sampled keys: hits more than a gap before
        self._settled: dict[float, Floats] = {}  # by rate: hits at each distance in steps

    def run(self, nearest: int, count: int) -> None:
        """Count hits of ``count`` sampled keys at distances a gap apart, from ``nearest`` steps on."""
        self._rises[nearest] += 1
        self._rises[nearest + STEPS * count] -= 1

    def unroll(self) -> None:
        """Turn runs into hits at each of their distances."""
        if not self._rises:
            return
        rises = np.zeros((max(self._rises) // STEPS + 1, STEPS), dtype=np.int64)
        rises.flat[list(self._rises)] = list(self._rises.values())
        hits = rises.cumsum(axis=0).ravel()
        for distance in hits.nonzero()[0].tolist():
            self.sampled[distance] += int(hits[distance])
        self._rises.clear()

    def settle(self, scale: float, rate: float) -> None:
        """A sampled key's hit stood for ``scale`` of the whole stream; keys are sampled at ``rate`` from now on."""
        self.unroll()
        for hits, weight in ((self.sampled, scale), (self.hot, 1.0)):
            if hits:
                self._add(hits, weight)
                hits.clear()
        self._rate = rate

    def hits(self, sizes: Sequence[float]) -> list[float]:
        """Settled hits of caches of these sizes. O(distances + sizes).

        A hit counts from its distance on, whole a gap above it, and in proportion between.
        """
        total = np.zeros(len(sizes))
        for rate, counts in self._settled.items():
            below = np.concatenate([np.zeros(STEPS), counts.cumsum()])  # hits up to each distance, from -STEPS on
            steps = np.minimum(np.asarray(sizes, dtype=np.float64) * STEPS * rate, below.size)
            whole = steps.astype(np.int64)
            within = below[np.minimum(whole[:, None] + np.arange(STEPS + 1), below.size - 1)]
            total += (within[:, :-1].sum(axis=1) + (steps - whole) * (within[:, -1] - within[:, 0])) / STEPS
        return total.tolist()

    def _add(self, hits: Hits, weight: float) -> None:
        counts = self._settled.get(self._rate, np.zeros(0))
        missing = max(hits) + 1 - len(counts)
        if missing > 0:
            counts = np.pad(counts, (0, missing))
        counts[list(hits)] += weight * np.fromiter(hits.values(), dtype=np.float64)
        self._settled[self._rate] = counts
