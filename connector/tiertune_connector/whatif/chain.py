"""What a fleet would have paid with tiers of other sizes: chains of tiers in miniature, fed by the stores' samples.

Each candidate ``Shape`` is played by pools of the production's own class, scaled down by the sampling rate: DRAM and
disk of every host, one remote tier for all. A sampled chunk stands for ``1 / rate`` chunks at its depth of the prompt,
so sums over sampled chunks of what each saves are unbiased (Horvitz and Thompson 1952), although a request shows only a
few of its chunks. Only the gate's choice needs the whole request: it is made from where its samples begin to miss.
"""

from collections.abc import Callable, Hashable, Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from math import inf
from typing import NamedTuple

from tiertune_connector.eviction import Key
from tiertune_connector.whatif.sampler import Pick
from tiertune_connector.whatif.simulated import SimulatedPool

Held = KeysView[Key]
"""What a tier holds."""
PREFIX_ROUTING = "@prefix"
"""Suffix of a shape's name: as if each request went to the host that last had the most of its prompt."""
MOST_OWNED = 16_384
"""Most keys whose last host is remembered, for prefix routing."""


class Shape(NamedTuple):
    """Sizes of the tiers, in bytes."""

    dram: int
    """Per host."""
    disk: int
    """Per host."""
    remote: int
    """Of the fleet."""

    def __str__(self) -> str:
        return f"{self.dram}/{self.disk}/{self.remote}"

    @classmethod
    @lru_cache(maxsize=4096)
    def parse(cls, text: str) -> "Shape":
        """The shape that ``str`` wrote; ValueError if it is none."""
        dram, disk, remote = (int(part) for part in text.split("/"))
        return cls(dram, disk, remote)


class SampledRequest(NamedTuple):
    """One request, as known from samples."""

    host: Hashable
    chunks: int
    """Of its whole chain."""
    samples: Sequence[Pick]
    """From the head of the prompt."""


@dataclass
class Costs:
    """What requests pay at the time."""

    prefill_s: Callable[[int], float]
    """Seconds of recomputing so many leading chunks, beyond what every prefill takes."""
    fetch_s: Mapping[str, tuple[float, float]]
    """Seconds before the first byte of a fetch from a tier, and per chunk; by tier."""
    margin: float
    """How many times cheaper than recomputing a remote fetch must be."""
    floor: float = 0.0
    """Fewer chunks are not fetched from the remote."""


@dataclass
class Bill:
    """Sums over requests."""

    requests: int = 0
    chunks: float = 0.0
    """Of all prompts, estimated."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of prefill and fetches of all requests, by ``str(Shape)`` (with ``PREFIX_ROUTING``)."""


class ChainGhosts:
    """One miniature fleet per shape."""

    def __init__(
        self,
        shapes: Iterable[Shape],
        *,
        rate: float,
        chunk_bytes: int,
        remote_chunk_bytes: int | None = None,
        landing: float | None = None,
        prefix_routed: Iterable[Shape] = (),
    ) -> None:
        """``rate`` is that of the samples. All pools are LRU, whatever the hosts' are (ADR 0057).

        ``remote_chunk_bytes``: a chunk's bytes in the remote tier, if others. ``landing``: share of a host's DRAM that
        what a request fetches from slower tiers may fill, as a store's loads come by way of DRAM; None: it needs no
        room there. The shapes ``prefix_routed`` are played a second time, under prefix routing.
        """
        self._each = 1 / rate
        scales = rate / chunk_bytes, rate / (remote_chunk_bytes or chunk_bytes)

        def fleet(shape: Shape, *, prefix_routed: bool = False) -> _Fleet:
            room = inf if landing is None else landing * shape.dram / chunk_bytes
            return _Fleet(shape, *scales, room=room, prefix_routed=prefix_routed)

        self._fleets = {str(shape): fleet(shape) for shape in shapes}
        self._fleets |= {f"{shape}{PREFIX_ROUTING}": fleet(shape, prefix_routed=True) for shape in prefix_routed}
        self._bill = Bill()

    def request(self, seen: SampledRequest, costs: Costs, *, billed: bool = True) -> None:
        """Play one request in every miniature fleet; without a bill, only to fill them."""
        bill = self._bill if billed else Bill()
        bill.requests += 1
        if not seen.samples:
            return
        request = _Request(seen, costs, self._each)
        bill.chunks += request.weights[-1]
        same: dict[str, _Found] = {}  # where all samples are hot, by the tier that hot ones are in
        for name, fleet in self._fleets.items():
            found = same.get(fleet.hot_in)
            if found is None:
                found = fleet.play(request)
                if not request.cold:
                    same[fleet.hot_in] = found
            saved_s = _saved_s(request, found, costs, fleet.room)
            bill.seconds[name] = bill.seconds.get(name, 0.0) + request.prices[-1] - saved_s

    def forget(self, hosts: Iterable[Hashable]) -> None:
        """Forget hosts that are gone, with what they held."""
        for host in hosts:
            for fleet in self._fleets.values():
                fleet.forget(host)

    def take(self) -> Bill:
        """The bill since the last one."""
        bill, self._bill = self._bill, Bill()
        return bill


class _Request:
    """One request, with the sums over its first samples that every fleet needs."""

    def __init__(self, seen: SampledRequest, costs: Costs, each: float) -> None:
        self.host, self.chunks = seen.host, seen.chunks
        self.positions = [sample.position for sample in seen.samples]
        self.cold = [sample.key for sample in seen.samples if not sample.hot]
        self.samples = [(sample.key, sample.hot, 1.0 if sample.hot else each) for sample in seen.samples]
        """Each one's key, whether that is hot, and the chunks that it stands for."""
        self.weights = [0.0, *accumulate(weight for _, _, weight in self.samples)]
        """Chunks that the first samples stand for."""
        prefill_s = costs.prefill_s
        prices = [
            weight * (prefill_s(position + 1) - prefill_s(position))
            for (_, _, weight), position in zip(self.samples, self.positions, strict=True)
        ]
        self.prices = [0.0, *accumulate(prices)]
        """Seconds that recomputing them takes."""

    def border(self, samples: int) -> float:
        """Chunks of a prefix of which just the first ``samples`` are held: it ends midway between two samples."""
        after = self.positions[samples] if samples < len(self.positions) else self.chunks
        before = self.positions[samples - 1] + 1 if samples else 0
        return (before + after) / 2


class _Found(NamedTuple):
    """What of a request a fleet has: ``local`` leading samples on the host, ``total`` with those from the remote.

    ``near`` of the local ones come before the first on the disk; all, if none is on the disk.
    """

    near: int
    local: int
    total: int
    chunks: Mapping[str, float]
    """Those in each tier, among all of them."""


class _Fleet:
    """The pools of one shape, in miniature."""

    def __init__(self, shape: Shape, scale: float, remote_scale: float, *, room: float, prefix_routed: bool) -> None:
        """``scale`` is miniature chunks per byte of a host's tiers, ``remote_scale`` of the remote one.

        ``room``: chunks from slower tiers that a request may bring into DRAM.

        ``prefix_routed``: requests go where most of their prompt was last, new ones where they really went.
        """
        self._owners: dict[Hashable, Hashable] | None = {} if prefix_routed else None
        self._dram, self._disk = round(shape.dram * scale), round(shape.disk * scale)
        self._hosts: dict[Hashable, tuple[SimulatedPool, SimulatedPool]] = {}
        self._remote = SimulatedPool(round(shape.remote * remote_scale))
        self.room = room
        self.hot_in = next((tier for tier, size in shape._asdict().items() if size), "")

    def play(self, request: _Request) -> _Found:
        """Look the request up, then write it through."""
        host = request.host if self._owners is None else self._owner(request, self._owners)
        if host not in self._hosts:
            self._hosts[host] = SimulatedPool(self._dram), SimulatedPool(self._disk)
        pools = *self._hosts[host], self._remote
        found = _find(request, *(pool.visible for pool in pools), hot_in=self.hot_in)
        for pool in pools:
            pool.write_through(request.cold)
        return found

    def forget(self, host: Hashable) -> None:
        """Forget a host that is gone."""
        self._hosts.pop(host, None)
        if self._owners:
            self._owners = {key: owner for key, owner in self._owners.items() if owner != host}

    def _owner(self, request: _Request, owners: dict[Hashable, Hashable]) -> Hashable:
        host = next((owners[key] for key in reversed(request.cold) if key in owners), request.host)
        for key in request.cold:
            owners.pop(key, None)
            owners[key] = host
        while len(owners) > MOST_OWNED:
            del owners[next(iter(owners))]
        return host


def _find(request: _Request, dram: Held, disk: Held, remote: Held, *, hot_in: str) -> _Found:
    """A request's leading samples that are held; a hot one is in the nearest tier that has any room."""
    chunks = dict.fromkeys(Shape._fields, 0.0)
    tiers = []
    for key, is_hot, weight in request.samples:
        if is_hot:
            tier = hot_in
        else:
            tier = "dram" if key in dram else "disk" if key in disk else "remote" if key in remote else ""
        if not tier:
            break
        chunks[tier] += weight
        tiers.append(tier)
    local = tiers.index("remote") if "remote" in tiers else len(tiers)
    near = min(local, tiers.index("disk")) if "disk" in tiers else local
    return _Found(near, local, len(tiers), chunks)


def _saved_s(request: _Request, found: _Found, costs: Costs, room: float) -> float:
    """Seconds that what was found takes off the request, if there is ``room`` for what slower tiers bring, in chunks.

    As it is compared with estimates of a few sampled chunks, small rooms are told too small: by 1, 4 and 11 % of what
    is saved where DRAM has 16, 8 and 4 of them.
    """
    whole_s, beyond = _used(request, found, costs)
    if beyond <= room:
        return whole_s
    near_s = _near_s(request, found, costs)
    return near_s + room / beyond * (whole_s - near_s)


def _near_s(request: _Request, found: _Found, costs: Costs) -> float:
    """Seconds that what is in DRAM before anything else takes off the request."""
    return request.prices[found.near] - request.weights[found.near] * costs.fetch_s["dram"][1]


def _used(request: _Request, found: _Found, costs: Costs) -> tuple[float, float]:
    """Seconds that it takes off as the gate would use what was found, and chunks that slower tiers bring for it."""
    dram, disk, remote = found.chunks.values()
    kept, beyond = found.local, disk
    fetch_s = 0.0
    if found.total > found.local and _worth(request, found.local, found.total, "remote", costs):
        kept, beyond = found.total, disk + remote
        latency_s, chunk_s = costs.fetch_s["remote"]
        span = max(1.0, request.border(found.total) - request.border(found.local))  # chunks after the local prefix
        fetch_s = remote * (chunk_s + latency_s / span)
    elif found.near < found.local and not _worth(request, found.near, found.local, "disk", costs):
        return _near_s(request, found, costs), 0.0
    nearby_s = dram * costs.fetch_s["dram"][1] + disk * costs.fetch_s["disk"][1]
    if nearby_s:
        share = 1.0 if kept == found.total else request.weights[kept] / (dram + disk)
        fetch_s += min(share, 1.0) * nearby_s
    return request.prices[kept] - fetch_s, beyond


def _worth(request: _Request, first: int, end: int, tier: str, costs: Costs) -> bool:
    """Whether fetching samples ``first`` to ``end`` from a slower tier is cheaper than recomputing them."""
    start, stop = request.border(first), request.border(end)
    latency_s, chunk_s = costs.fetch_s[tier]
    saved_s = costs.prefill_s(round(stop)) - costs.prefill_s(round(start))
    margin, floor = (costs.margin, costs.floor) if tier == "remote" else (1.0, 0.0)
    return stop - start >= floor and saved_s > margin * (latency_s + chunk_s * (stop - start))
