"""Is sharing worth it here? A closed form, before anything is installed. Pure; speeds are assumptions as in the replay.

A prompt that is asked R times in all hits R - 1 times in one cache: the share of hits is h = 1 - 1/R. N replicas with a
cache each, under random routing, compute it once on every replica that it reaches: N (1 - (1 - 1/N)^R) of them. Sharing
can win the difference; with R = 2 it is h (1 - 1/N). That is an upper bound: prompts that are asked more often than
others are soon in every cache (``benchmarks/fleet_hit_rate.py``). ``popularity: skewed`` takes R as geometric instead,
of the same mean 1/(1 - h): whatever was asked is asked again with chance h, however often it was; then the mean of
(1 - 1/N)^R is (1 - h)(N - 1) / (N - h (N - 1)).

Sharing is worth it if all of these hold:

1. there is something to win: more than one replica, and requests that do not come back to the replica they know;
2. fetching the prefix, the wait for the link (M/D/1) included, takes less time than recomputing it;
3. the links can carry the fetches (load under 1), and the remote tier can hold the hits of one prompt at least;
4. it frees at least one whole replica, because GPU time is bought by the replica: less saves time, but no money;
5. those replicas cost more than the rent of the remote tier, which does not shrink with the traffic, and the network.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import ceil, floor
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tiertune_agent.fields import JsonDict, read
from tiertune_agent.policy.document import Prices, rates
from tiertune_agent.records import GIB
from tiertune_agent.replay.engine import break_even_bandwidth, break_even_tokens, prefill_s, token_s
from tiertune_agent.replay.scenario import Count, Gpu, LinkSpec, Model
from tiertune_connector.documents import Document
from tiertune_connector.units import Size, format_duration, format_size

HOUR_S = 3600.0
BUSY = 0.9
"""Prefill's share of the replicas' time above which none is given back: at 1 requests wait without end."""
HARDLY = 1e-3
"""Share of the prompts' tokens below which sharing has nothing to win."""


_ASSUMED = {
    "equal": "assumed equal, every prompt asked as often as any other: the most that sharing can win",
    "skewed": "assumed skewed: what was asked is asked again with the same chance, however often it was",
}


UNWEIGHED = ("link.probe_s", "link.fluctuation", "prices.dram_gib_month", "prices.disk_gib_month")
"""Keys of a scenario and a policy that a closed form of means does not use."""


class PlannedFleet(Document):
    """What ``tiertune plan --fleet`` reads."""

    name: str
    replicas: Count
    """Engines of one model."""
    requests_per_s: Annotated[float, Field(ge=1e-9, le=1e6)]
    """Of each replica."""
    hit_share: Annotated[float, Field(ge=0, lt=1)]
    """Share of the prompts' tokens that were asked before: what one cache that keeps everything would hit."""
    prompt_tokens: Count | None = None
    """Mean. Or give ``request_kv``."""
    request_kv: Annotated[Size | None, Field(gt=0, le=2**60)] = None
    """Bytes of KV of a mean prompt, before any codec."""
    popularity: Literal["equal", "skewed"] = "equal"
    """Equal: every prompt is asked equally often, the best case for sharing; skewed: some are asked far more often."""
    routing: Literal["random", "sticky"] = "random"
    """Sticky: a repeated prompt goes to the replica that has it."""
    model: Model
    gpu: Gpu
    """All GPUs of one replica."""
    link: LinkSpec
    """To the remote tier."""
    links: Count = 1
    """Links of that kind, one for each server of the remote tier; the fleet's fetches are spread evenly over them."""
    codec_ratio: Annotated[float, Field(ge=1, le=1e6)] = 1.0
    """Bytes of KV for one byte that is stored and sent."""
    chunk_tokens: Count = 512
    remote: Annotated[Size, Field(le=2**60)] = 512 * GIB
    """Bytes to rent for the remote tier: a machine's at least, however little traffic there is."""
    prices: Prices = Prices()

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        if (self.prompt_tokens is None) == (self.request_kv is None):
            raise ValueError("give either prompt_tokens or request_kv")
        return self

    @property
    def tokens(self) -> float:
        """Of a mean prompt."""
        return self.prompt_tokens or (self.request_kv or 0) / self.model.kv_token_bytes

    @property
    def hit_tokens(self) -> float:
        return self.hit_share * self.tokens

    @property
    def hit_bytes(self) -> float:
        """Of the tokens that hit, on the link and in the remote tier."""
        return self.hit_tokens * self.token_bytes

    @property
    def new_bytes(self) -> float:
        """KV that a mean request computes anew."""
        return (self.tokens - self.hit_tokens) * self.token_bytes

    @property
    def token_bytes(self) -> float:
        """On the link and in the remote tier."""
        return self.model.kv_token_bytes / self.codec_ratio

    @property
    def all_requests_per_s(self) -> float:
        return self.replicas * self.requests_per_s


@dataclass(frozen=True)
class BreakEven:
    """Fetching a token against computing it."""

    fetch_ms_per_token: float
    recompute_ms_per_token: float
    """At the head of a prompt."""
    recompute_ms_per_token_per_10k: float
    """Increase per 10,000 tokens of h0 + h1, for computing the span from h0 to h1."""
    tokens: float
    """From this length on, fetching a prefix is faster; the time per chunk is left out."""
    gb_per_s: float
    """Above this bandwidth, fetching this fleet's mean prefix is faster; latencies are left out."""


@dataclass(frozen=True)
class Network:
    """``needed_gb_per_s`` and ``load``: if every hit is fetched; others: if each replica also keeps what it had."""

    needed_gb_per_s: float
    fetched_gb_per_s: float
    links_gb_per_s: float
    """What all links carry together."""
    load: float
    fetched_load: float
    fetch_s: float
    """Of one prefix that hits, on a free link."""
    wait_s: float | None
    """Mean, for the link at ``fetched_load``; None: it grows without end."""


@dataclass(frozen=True)
class Compute:
    """Prefill if each replica has its own cache (isolated), and if they share."""

    isolated_hit_share: float
    shared_hit_share: float
    recompute_s: float
    """Of one prefix that hits."""
    isolated_ttft_s: float
    """Mean of all requests, without queueing."""
    shared_ttft_s: float | None
    """None: the fetches wait without end."""
    isolated_load: float
    """Prefill seconds per second, of one replica. Above 1 it cannot keep up."""
    shared_load: float
    saved_gpu_s_per_hour: float
    """Of the fleet, by sharing."""
    freed_replicas: float
    """Replicas that these seconds are worth; the rest is then no busier than all were, nor than ``BUSY``."""


@dataclass(frozen=True)
class Money:
    """Per hour, in the currency of the prices."""

    gpu_time: float
    """If every GPU second that is saved finds other work."""
    freed: float
    """Of the whole replicas that are freed."""
    rent: float
    network: float
    net: float


@dataclass(frozen=True)
class Plan:
    fleet: str
    popularity: str
    """What was assumed of how often each prompt is asked."""
    prompt_tokens: float
    hit_tokens: float
    break_even: BreakEven
    network: Network
    compute: Compute
    money: Money
    remote_keeps_s: float
    """How long the remote tier holds what this traffic computes anew."""
    unweighed: tuple[str, ...]
    """Keys of the fleet that were given and are not weighed."""
    worth: bool
    verdict: str

    def document(self) -> JsonDict:
        """As ``--json`` writes it."""
        return asdict(self)

    def rows(self) -> Iterator[tuple[str, str]]:
        """The figures behind the verdict: a name and a text of each."""
        even, network, compute, money = self.break_even, self.network, self.compute, self.money
        yield "prompt", f"{self.prompt_tokens:.0f} tokens, {self.hit_tokens:.0f} of which were asked before"
        yield "fetch", f"{even.fetch_ms_per_token:.4f} ms per token; {1e3 * network.fetch_s:.1f} ms for what hits"
        dearer = f"+{even.recompute_ms_per_token_per_10k:.4f} per 10k of h0 + h1"
        took = f"{1e3 * compute.recompute_s:.1f} ms for what hits"
        yield "recompute", f"{even.recompute_ms_per_token:.4f} ms per token ({dearer}); {took}"
        yield "break-even", f"prefixes of {even.tokens:,.0f} tokens; {even.gb_per_s:.2f} GB/s for what hits"
        rest = f"{network.fetched_gb_per_s:.3g} GB/s if each replica keeps what it had"
        yield "bandwidth needed", f"{network.needed_gb_per_s:.3g} GB/s to fetch every hit; {rest}"
        waits = f"a fetch waits {_ms(network.wait_s)}"
        loads = f"load {network.load:.1%}, or {network.fetched_load:.1%}"
        yield "links", f"carry {network.links_gb_per_s:.3g} GB/s; {loads}; {waits}"
        yield "hits", f"{compute.isolated_hit_share:.1%} isolated, {compute.shared_hit_share:.1%} shared"
        yield "popularity", _ASSUMED[self.popularity]
        times = f"{_ms(compute.isolated_ttft_s)} isolated, {_ms(compute.shared_ttft_s)} shared"
        yield "mean TTFT", f"{times}; without a queue for the GPU"
        yield "prefill load", f"{compute.isolated_load:.1%} of each replica isolated, {compute.shared_load:.1%} shared"
        worth = f"worth {money.gpu_time:.2f}; {compute.freed_replicas:.2f} of a replica"
        yield "GPU time saved", f"{compute.saved_gpu_s_per_hour:,.0f} s per hour, {worth}"
        cost = f"{money.rent:.2f} rent, {money.network:.2f} network: net {money.net:+.2f}"
        yield "money per hour", f"{money.freed:.2f} for whole replicas less, {cost}"
        yield "remote tier", f"keeps what is computed for {format_duration(self.remote_keeps_s)}"
        if self.unweighed:
            yield "not weighed", ", ".join(self.unweighed)


def plan(fleet: PlannedFleet) -> Plan:
    """Weigh sharing among the fleet's replicas against a cache for each of them alone."""
    caches = fleet.replicas if fleet.routing == "random" else 1
    isolated = isolated_hit_share(fleet.hit_share, caches, skewed=fleet.popularity == "skewed")
    remote = 1 - isolated / fleet.hit_share if fleet.hit_share else 0.0
    network = _network(fleet, remote)
    compute = _compute(fleet, remote, network)
    money = _money(fleet, network, compute)
    against, given = list(_against(fleet, network, compute, money)), fleet.model_dump(exclude_unset=True)
    return Plan(
        fleet=fleet.name,
        popularity=fleet.popularity,
        prompt_tokens=fleet.tokens,
        hit_tokens=fleet.hit_tokens,
        break_even=_break_even(fleet),
        network=network,
        compute=compute,
        money=money,
        remote_keeps_s=fleet.remote / (fleet.all_requests_per_s * fleet.new_bytes),
        unweighed=tuple(key for key in UNWEIGHED if read(given, key) is not None),
        worth=not against,
        verdict=_verdict(fleet, compute, money, against),
    )


def isolated_hit_share(hit_share: float, caches: int, *, skewed: bool = False) -> float:
    """Hit share of ``caches`` under random routing, where one cache has ``hit_share``; each keeps everything."""
    asked, others = 1 / (1 - hit_share), 1 - 1 / caches
    # Chance that a cache gets none of the R requests; for geometric R by its generating function.
    never: float = (1 - hit_share) * others / (1 - hit_share * others) if skewed else others**asked
    return min(hit_share, max(0.0, 1 - caches * (1 - never) / asked))  # despite rounding


def _break_even(fleet: PlannedFleet) -> BreakEven:
    linear, quadratic = token_s(fleet.model, fleet.gpu)
    fetch = fleet.token_bytes / fleet.link.bytes_per_s
    return BreakEven(
        fetch_ms_per_token=1e3 * fetch,
        recompute_ms_per_token=1e3 * linear,
        recompute_ms_per_token_per_10k=1e7 * quadratic,
        tokens=break_even_tokens(fleet.model, fleet.gpu, fetch, fleet.link.latency_s),
        gb_per_s=break_even_bandwidth(fleet.model, fleet.gpu, fleet.hit_tokens) / fleet.codec_ratio / 1e9,
    )


def _network(fleet: PlannedFleet, remote: float) -> Network:
    """``remote``: the share of the hits that are not in the replica's own cache."""
    prefix_bytes = fleet.hit_bytes
    needed, links = fleet.all_requests_per_s * prefix_bytes, fleet.links * fleet.link.bytes_per_s
    chunks, link = ceil(fleet.hit_tokens / fleet.chunk_tokens), fleet.link
    sending_s, load = prefix_bytes / fleet.link.bytes_per_s, remote * needed / links
    return Network(
        needed_gb_per_s=needed / 1e9,
        fetched_gb_per_s=remote * needed / 1e9,
        links_gb_per_s=links / 1e9,
        load=needed / links,
        fetched_load=load,
        fetch_s=link.latency_s + chunks * link.per_chunk_s + sending_s if chunks else 0.0,
        wait_s=sending_s * load / (2 * (1 - load)) if load < 1 else None,
    )


def _compute(fleet: PlannedFleet, remote: float, network: Network) -> Compute:
    cold_s = prefill_s(fleet.model, fleet.gpu, 0.0, fleet.tokens)
    warm_s = prefill_s(fleet.model, fleet.gpu, fleet.hit_tokens, fleet.tokens)
    isolated_s = remote * cold_s + (1 - remote) * warm_s
    saved = fleet.all_requests_per_s * (isolated_s - warm_s)
    return Compute(
        isolated_hit_share=fleet.hit_share * (1 - remote),
        shared_hit_share=fleet.hit_share,
        recompute_s=cold_s - warm_s,
        isolated_ttft_s=isolated_s,
        shared_ttft_s=None if network.wait_s is None else warm_s + remote * (network.fetch_s + network.wait_s),
        isolated_load=fleet.requests_per_s * isolated_s,
        shared_load=fleet.requests_per_s * warm_s,
        saved_gpu_s_per_hour=saved * HOUR_S,
        freed_replicas=max(
            0.0, min(saved, fleet.replicas * (1 - max(warm_s / isolated_s, fleet.requests_per_s * warm_s / BUSY)))
        ),
    )


def _money(fleet: PlannedFleet, network: Network, compute: Compute) -> Money:
    price = rates(fleet.prices)
    freed = floor(compute.freed_replicas) * price.gpu_hour
    rent = fleet.remote / GIB * price.gib_hour["remote"]
    carried = network.fetched_gb_per_s * 1e9 * HOUR_S / GIB * price.network_gib
    return Money(
        gpu_time=compute.saved_gpu_s_per_hour / HOUR_S * price.gpu_hour,
        freed=freed,
        rent=rent,
        network=carried,
        net=freed - rent - carried,
    )


def _against(fleet: PlannedFleet, network: Network, compute: Compute, money: Money) -> Iterator[str]:
    """Why sharing is not worth it, the strongest reason first."""
    lost = compute.shared_hit_share - compute.isolated_hit_share
    if lost < HARDLY:
        yield "the replicas' own caches have " + (
            f"all but {lost:.1%} of the hits" if fleet.hit_share else "nothing to hit, nor has a shared one"
        )
        return
    if fleet.remote < fleet.hit_bytes:
        held, prefix = format_size(fleet.remote), format_size(fleet.hit_bytes)
        yield f"{held} of remote tier do not hold the {prefix} of one prompt that hit"
    waited_s = network.fetch_s + (network.wait_s or 0.0)
    if waited_s >= compute.recompute_s:
        yield (
            f"fetching {fleet.hit_tokens:.0f} tokens takes {1e3 * waited_s:.0f} ms, "
            f"recomputing them {1e3 * compute.recompute_s:.0f} ms"
        )
    if network.wait_s is None:
        need = ceil(network.fetched_gb_per_s / (network.links_gb_per_s / fleet.links) + HARDLY)
        yield (
            f"the fetches need {network.fetched_gb_per_s:.3g} GB/s and the links carry {network.links_gb_per_s:.3g}: "
            f"it takes {need} of them, or a codec"
        )
    if compute.shared_load > BUSY * (1 - 1 / fleet.replicas):
        yield f"prefill needs {compute.shared_load:.0%} of all replicas' time with sharing too: none can be given back"
    elif compute.freed_replicas < 1:
        yield (
            f"isolated caches already hit {compute.isolated_hit_share:.0%} of {compute.shared_hit_share:.0%}, and the "
            f"rest is worth {compute.freed_replicas:.2f} of a replica: none can be given back"
        )
    elif money.net <= 0:
        yield (
            f"{floor(compute.freed_replicas)} replicas less save {money.freed:.2f} an hour, "
            f"{format_size(fleet.remote)} of remote tier and the network cost {money.rent + money.network:.2f}"
        )


def _verdict(fleet: PlannedFleet, compute: Compute, money: Money, against: list[str]) -> str:
    load = compute.isolated_load if against else compute.shared_load
    late = f" These replicas cannot keep up: prefill alone needs {load:.1f} times their time." if load > 1 else ""
    if against:
        return f"Sharing is not worth it here: {'; '.join(against)}.{late}"
    assert compute.shared_ttft_s is not None  # it is among the reasons against
    return (
        f"Sharing is worth it here: {compute.shared_hit_share:.0%} hits instead of {compute.isolated_hit_share:.0%} "
        f"free {floor(compute.freed_replicas)} of {fleet.replicas} replicas, {money.net:.2f} an hour after rent, and "
        f"the mean time to the first token goes from {1e3 * compute.isolated_ttft_s:.0f} to "
        f"{1e3 * compute.shared_ttft_s:.0f} ms.{late}"
    )


def _ms(seconds: float | None) -> str:
    return "without end" if seconds is None else f"{1e3 * seconds:.1f} ms"
