"""Is sharing worth it here? A closed form, before anything is installed. Pure; speeds are assumptions as in the replay.

A prompt that is asked R times in all hits R - 1 times in one cache: the share of hits is h = 1 - 1/R. N replicas with a
cache each, under random routing, compute it once on every replica that it reaches: N (1 - (1 - 1/N)^R) of them. Sharing
can win the difference; with R = 2 it is h (1 - 1/N).

Sharing is worth it if all of these hold:

1. there is something to win: more than one replica, and requests that do not come back to the replica they know;
2. fetching the prefix takes less time than recomputing it;
3. the links can carry the fetches (load under 1), and the remote tier can hold the hits of one prompt at least;
4. the GPU time that is saved is worth more than the rent of the remote tier, which does not shrink with the traffic,
   and the network.

That is an upper bound, and a replay knows: prompts that are asked more often than others are soon in every cache
(``benchmarks/fleet_hit_rate.py``), fetches wait for each other, and GPU time is bought by the replica.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from tiertune_agent.policy.document import HOURS_PER_MONTH, Price
from tiertune_agent.records import GIB
from tiertune_agent.replay.engine import break_even_bandwidth, break_even_tokens, prefill_s, token_s
from tiertune_agent.replay.scenario import Count, Gpu, Line, Model
from tiertune_connector.documents import Document
from tiertune_connector.units import Size, format_size

HOUR_S = 3600.0
HARDLY = 1e-3
"""Share of the prompts' tokens below which sharing has nothing to win."""

IN_MS = ("fetch", "recompute", "isolated_ttft", "shared_ttft")
"""Figures that texts tell in milliseconds."""
ROWS = {
    "prompt": "{prompt_tokens:.0f} tokens, {hit_tokens:.0f} of which were asked before",
    "fetch": "{fetch_ms_per_token:.4f} ms per token; {fetch_ms:.1f} ms for what hits",
    "recompute": (
        "{recompute_ms_per_token:.4f} ms per token (+{recompute_ms_per_token_per_10k:.4f} per 10k of h0 + h1); "
        "{recompute_ms:.1f} ms for what hits"
    ),
    "break-even": "prefixes of {break_even_tokens:,.0f} tokens; {break_even_gb_per_s:.2f} GB/s for what hits",
    "bandwidth needed": (
        "{needed_gb_per_s:.3g} GB/s to fetch every hit; {fetched_gb_per_s:.3g} GB/s if each replica keeps what it had"
    ),
    "links": "carry {links_gb_per_s:.3g} GB/s; load {load:.1%}",
    "hits": "{isolated_hit_share:.1%} isolated, {shared_hit_share:.1%} shared",
    "mean TTFT": "{isolated_ttft_ms:.1f} ms isolated, {shared_ttft_ms:.1f} ms shared; without a queue",
    "prefill load": "{isolated_load:.1%} of each replica isolated, {shared_load:.1%} shared",
    "GPU time saved": "{saved_gpu_s_per_hour:,.0f} s per hour",
    "money per hour": "{saved:.2f} of GPU time less {rent:.2f} rent, {network:.2f} network: net {net:+.2f}",
}
"""What is told of the figures of a plan, by name."""
WORTH = (
    "Sharing is worth it here: {shared_hit_share:.0%} hits instead of {isolated_hit_share:.0%} save GPU time worth "
    "{saved:.2f} an hour for {cost:.2f} of remote tier and network, and the mean time to the first token goes from "
    "{isolated_ttft_ms:.0f} to {shared_ttft_ms:.0f} ms."
)


class PlannedPrices(Document):
    """As a policy's, of what a plan weighs."""

    gpu_hour: Price = 2.5
    """Of all GPUs of one replica."""
    remote_gib_month: Price = 4.0
    network_gib: Price = 0.0


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
    """Bytes of KV of a mean prompt."""
    routing: Literal["random", "sticky"] = "random"
    """Sticky: a repeated prompt goes to the replica that has it."""
    model: Model
    gpu: Gpu
    """All GPUs of one replica."""
    link: Line
    """To the remote tier."""
    links: Count = 1
    """Links of that kind, one for each server of the remote tier; the fleet's fetches are spread evenly over them."""
    remote: Annotated[Size, Field(le=2**60)] = 512 * GIB
    """Bytes to rent for the remote tier: a machine's at least, however little traffic there is."""
    prices: PlannedPrices = PlannedPrices()

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
        return self.hit_tokens * self.model.kv_token_bytes


@dataclass(frozen=True)
class Plan:
    """Replicas with a cache each (isolated) against sharing; money is per hour, in the currency of the prices."""

    fleet: str
    prompt_tokens: float
    hit_tokens: float
    fetch_ms_per_token: float
    recompute_ms_per_token: float
    """At the head of a prompt."""
    recompute_ms_per_token_per_10k: float
    """Increase per 10,000 tokens of h0 + h1, for computing the span from h0 to h1."""
    break_even_tokens: float
    """From this length on, fetching a prefix is faster."""
    break_even_gb_per_s: float
    """Above this bandwidth, fetching this fleet's mean prefix is faster; latencies are left out."""
    fetch_s: float
    """Of one prefix that hits, on a free link."""
    recompute_s: float
    """The same, computed."""
    needed_gb_per_s: float
    """To fetch every hit."""
    fetched_gb_per_s: float
    """If each replica also keeps what it had."""
    links_gb_per_s: float
    """What all links carry together."""
    load: float
    """Of the links, by ``fetched_gb_per_s``."""
    isolated_hit_share: float
    shared_hit_share: float
    isolated_ttft_s: float
    """Mean of all requests, without queueing."""
    shared_ttft_s: float
    isolated_load: float
    """Prefill seconds per second, of one replica. Above 1 it cannot keep up."""
    shared_load: float
    saved_gpu_s_per_hour: float
    """Of the fleet, by sharing."""
    saved: float
    """What these seconds are worth."""
    rent: float
    network: float
    worth: bool = False
    verdict: str = ""

    @property
    def told(self) -> dict[str, Any]:
        """The figures that texts are made of: also some in milliseconds, and what sharing costs and brings."""
        in_ms = {f"{what}_ms": 1e3 * getattr(self, f"{what}_s") for what in IN_MS}
        return vars(self) | in_ms | {"cost": self.rent + self.network, "net": self.saved - self.rent - self.network}

    def rows(self) -> Iterator[tuple[str, str]]:
        """The figures behind the verdict: a name and a text of each."""
        for name, text in ROWS.items():
            yield name, text.format(**self.told)


def plan(fleet: PlannedFleet) -> Plan:
    """Weigh sharing among the fleet's replicas against a cache for each of them alone."""
    made = _figures(fleet)
    against = "; ".join(_against(fleet, made))
    verdict = f"Sharing is not worth it here: {against}." if against else WORTH.format(**made.told)
    return replace(made, worth=not against, verdict=verdict)


def _figures(fleet: PlannedFleet) -> Plan:
    """Without what they say."""
    isolated = isolated_hit_share(fleet.hit_share, fleet.replicas if fleet.routing == "random" else 1)
    fetched = 1 - isolated / fleet.hit_share if fleet.hit_share else 0.0  # of the hits: they are in no cache of its own
    linear, quadratic = token_s(fleet.model, fleet.gpu)
    fetch_token_s = fleet.model.kv_token_bytes / fleet.link.bytes_per_s
    fetch_s = fleet.link.latency_s + fleet.hit_bytes / fleet.link.bytes_per_s if fleet.hit_share else 0.0
    requests_per_s = fleet.replicas * fleet.requests_per_s
    needed, links = requests_per_s * fleet.hit_bytes, fleet.links * fleet.link.bytes_per_s
    cold_s = prefill_s(fleet.model, fleet.gpu, 0.0, fleet.tokens)
    warm_s = prefill_s(fleet.model, fleet.gpu, fleet.hit_tokens, fleet.tokens)
    isolated_s = fetched * cold_s + (1 - fetched) * warm_s
    saved_s, prices = requests_per_s * (isolated_s - warm_s), fleet.prices
    return Plan(
        fleet=fleet.name,
        prompt_tokens=fleet.tokens,
        hit_tokens=fleet.hit_tokens,
        fetch_ms_per_token=1e3 * fetch_token_s,
        recompute_ms_per_token=1e3 * linear,
        recompute_ms_per_token_per_10k=1e7 * quadratic,
        break_even_tokens=break_even_tokens(fleet.model, fleet.gpu, fetch_token_s, fleet.link.latency_s),
        break_even_gb_per_s=break_even_bandwidth(fleet.model, fleet.gpu, fleet.hit_tokens) / 1e9,
        fetch_s=fetch_s,
        recompute_s=cold_s - warm_s,
        needed_gb_per_s=needed / 1e9,
        fetched_gb_per_s=fetched * needed / 1e9,
        links_gb_per_s=links / 1e9,
        load=fetched * needed / links,
        isolated_hit_share=fleet.hit_share * (1 - fetched),
        shared_hit_share=fleet.hit_share,
        isolated_ttft_s=isolated_s,
        shared_ttft_s=warm_s + fetched * fetch_s,
        isolated_load=fleet.requests_per_s * isolated_s,
        shared_load=fleet.requests_per_s * warm_s,
        saved_gpu_s_per_hour=saved_s * HOUR_S,
        saved=saved_s * prices.gpu_hour,
        rent=fleet.remote / GIB * prices.remote_gib_month / HOURS_PER_MONTH,
        network=fetched * needed * HOUR_S / GIB * prices.network_gib,
    )


def isolated_hit_share(hit_share: float, caches: int) -> float:
    """Hit share of ``caches`` under random routing, where one cache has ``hit_share``; each keeps everything."""
    asked = 1 / (1 - hit_share)
    never: float = (1 - 1 / caches) ** asked  # of the R requests reach a given cache
    return min(hit_share, max(0.0, 1 - caches * (1 - never) / asked))  # despite rounding


def _against(fleet: PlannedFleet, made: Plan) -> Iterator[str]:
    """Why sharing is not worth it, the strongest reason first."""
    lost = made.shared_hit_share - made.isolated_hit_share
    if lost < HARDLY:
        told = "nothing to hit, nor has a shared one"
        if fleet.hit_share:
            hits = f"the hits, and these are {fleet.hit_share:.1%} of the prompts' tokens"
            told = f"all but {lost / fleet.hit_share:.1%} of {hits}"
        yield f"the replicas' own caches have {told}"
        return
    if fleet.remote < fleet.hit_bytes:
        held, prefix = format_size(fleet.remote), format_size(fleet.hit_bytes)
        yield f"{held} of remote tier do not hold the {prefix} of one prompt that hit"
    if made.fetch_s >= made.recompute_s:
        takes = f"fetching {fleet.hit_tokens:.0f} tokens takes {1e3 * made.fetch_s:.0f} ms"
        yield f"{takes}, recomputing them {1e3 * made.recompute_s:.0f} ms"
    if made.load >= 1:
        needed = f"the fetches need {made.fetched_gb_per_s:.3g} GB/s and the links carry {made.links_gb_per_s:.3g}"
        yield f"{needed}: it takes {ceil(made.load * fleet.links + HARDLY)} of them"
    if made.saved <= made.rent + made.network:
        saved = f"the GPU time that it saves is worth {made.saved:.2f} an hour"
        yield f"{saved}, {format_size(fleet.remote)} of remote tier and the network cost {made.rent + made.network:.2f}"
