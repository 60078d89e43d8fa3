"""Which tier holds a chunk."""

from collections.abc import Callable, Sequence

from tiertune_connector.eviction import Keys
from tiertune_connector.protocol.messages import Side
from tiertune_connector.slower.reach import Reach

_CUTS_TRIED = 4
"""Each may be a round trip to the remote; if so many fail, the windows are gone and the prompt is recomputed."""


class Residency(Reach):
    """Asks the index of every local tier, and the remote itself."""

    @property
    def readable(self) -> bool:
        """Whether requests may ask the remote: there is one, well enough, with fetch on."""
        lane = self.lanes.get("remote")
        return lane is not None and not lane.breaker.open and self.tuning().tiers.remote.fetch == "on"

    def asked(self, found: Sequence[str], *, remote: bool) -> list[str]:
        """Tiers that a lookup asks, fastest first: those well by now, and those where it ``found`` something.

        No disk without a capacity: it is off, as a remote that is not fetched from.
        """
        asks = {"disk": self.tuning().tiers.disk.capacity_bytes > 0, "remote": remote}
        well = (name for name, lane in self.lanes.items() if name in found or (asks[name] and not lane.breaker.open))
        return ["dram", *well]

    def local(self, digest: str, keys: Keys) -> list[str]:
        """Per key ``dram``, ``disk`` or empty. Call with the store's lock held."""
        dram = self.dram.pools.get(digest)
        disk = self.disk.pools.get(digest) if self.disk and not self.lanes["disk"].breaker.open else None
        in_dram = dram.pool.visible if dram is not None else ()
        on_disk = disk.pool.visible if disk is not None else ()
        first = dram.pool.prefix(keys) if dram is not None else 0  # mostly all: no interpreter step for each
        rest = ["dram" if key in in_dram else "disk" if key in on_disk else "" for key in keys[first:]]
        return ["dram"] * first + rest

    def leading(self, digest: str, keys: Keys, left_s: Callable[[], float]) -> list[str]:
        """The tiers of the longest leading run of keys held anywhere; waits ``left_s`` for the remote, 0: not asked."""
        with self.dram.lock:
            local = self.local(digest, keys)
        if all(local):
            return local
        absent = [place for place, tier in enumerate(local) if not tier]
        within_s = left_s()
        there = self.lanes["remote"].present(digest, [keys[place] for place in absent], within_s) if within_s else 0
        end = absent[there] if there < len(absent) else len(local)
        return [tier or "remote" for tier in local[:end]]

    def allowed(
        self, digest: str, chunks: int, chunk_tokens: int, sides: Sequence[Side], left_s: Callable[[], float]
    ) -> int:
        """The longest of the last few cuts up to ``chunks`` whose other groups' chunks are held too; or 0."""
        for cut in range(chunks, max(0, chunks - _CUTS_TRIED), -1):
            needed = [key for side in sides for key in side.needed(cut * chunk_tokens)]
            if len(self.leading(digest, needed, left_s)) == len(needed):
                return cut
        return 0
