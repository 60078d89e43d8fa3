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
from math import ceil
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tiertune_agent.fields import Json, JsonDict
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

TAKES_LONGER = "fetching {hit_tokens:.0f} tokens takes {fetch_ms:.0f} ms, recomputing them {recompute_ms:.0f} ms"
TOO_MUCH = (
    "the fetches need {fetched_gb_per_s:.3g} GB/s and the links carry {links_gb_per_s:.3g}: it takes {enough} of them"
)
TOO_DEAR = (
    "the GPU time that it saves is worth {saved:.2f} an hour, {remote} of remote tier and the network cost {cost:.2f}"
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


def plan(fleet: PlannedFleet) -> JsonDict:
    """Weigh sharing among the fleet's replicas against a cache for each of them alone (isolated).

    All figures, ``worth`` and ``verdict``; money is per hour, in the currency of the prices.
    """
    made = _figures(fleet)
    told = _told(made)
    against = "; ".join(_against(fleet, told))
    verdict = f"Sharing is not worth it here: {against}." if against else WORTH.format(**told)
    return {**made, "worth": not against, "verdict": verdict}


def rows(made: Json) -> Iterator[tuple[str, str]]:
    """The figures behind the verdict of a plan: a name and a text of each."""
    told = _told(made)
    return ((name, text.format(**told)) for name, text in ROWS.items())


def _told(made: Json) -> JsonDict:
    """The figures that texts are made of: also some in milliseconds, and what sharing costs and brings."""
    cost, in_ms = made["rent"] + made["network"], {f"{what}_ms": 1e3 * made[f"{what}_s"] for what in IN_MS}
    return {**made, **in_ms, "cost": cost, "net": made["saved"] - cost}


def _figures(fleet: PlannedFleet) -> JsonDict:
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
    return {
        "fleet": fleet.name,
        "prompt_tokens": fleet.tokens,
        "hit_tokens": fleet.hit_tokens,
        "fetch_ms_per_token": 1e3 * fetch_token_s,
        "recompute_ms_per_token": 1e3 * linear,  # at the head of a prompt
        "recompute_ms_per_token_per_10k": 1e7 * quadratic,  # more, per 10,000 tokens of h0 + h1: of the span h0 to h1
        # From this length, and above this bandwidth for the mean prefix (latencies left out), fetching is faster.
        "break_even_tokens": break_even_tokens(fleet.model, fleet.gpu, fetch_token_s, fleet.link.latency_s),
        "break_even_gb_per_s": break_even_bandwidth(fleet.model, fleet.gpu, fleet.hit_tokens) / 1e9,
        "fetch_s": fetch_s,  # of one prefix that hits, on a free link
        "recompute_s": cold_s - warm_s,  # of the same
        "needed_gb_per_s": needed / 1e9,  # to fetch every hit
        "fetched_gb_per_s": fetched * needed / 1e9,  # if each replica also keeps what it had
        "links_gb_per_s": links / 1e9,  # what all carry together
        "load": fetched * needed / links,  # of the links, by what is fetched
        "isolated_hit_share": fleet.hit_share * (1 - fetched),
        "shared_hit_share": fleet.hit_share,
        "isolated_ttft_s": isolated_s,  # mean of all requests, without queueing
        "shared_ttft_s": warm_s + fetched * fetch_s,
        "isolated_load": fleet.requests_per_s * isolated_s,  # prefill seconds per second of a replica: 1 is its limit
        "shared_load": fleet.requests_per_s * warm_s,
        "saved_gpu_s_per_hour": saved_s * HOUR_S,  # of the fleet, by sharing
        "saved": saved_s * prices.gpu_hour,  # what these seconds are worth
        "rent": fleet.remote / GIB * prices.remote_gib_month / HOURS_PER_MONTH,
        "network": fetched * needed * HOUR_S / GIB * prices.network_gib,
    }


def isolated_hit_share(hit_share: float, caches: int) -> float:
    """Hit share of ``caches`` under random routing, where one cache has ``hit_share``; each keeps everything."""
    asked = 1 / (1 - hit_share)
    never: float = (1 - 1 / caches) ** asked  # of the R requests reach a given cache
    return min(hit_share, max(0.0, 1 - caches * (1 - never) / asked))  # despite rounding


def _against(fleet: PlannedFleet, figures: Json) -> Iterator[str]:
    """Why sharing is not worth it, the strongest reason first."""
    lost = figures["shared_hit_share"] - figures["isolated_hit_share"]
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
    if figures["fetch_s"] >= figures["recompute_s"]:
        yield TAKES_LONGER.format(**figures)
    if figures["load"] >= 1:
        yield TOO_MUCH.format(**figures, enough=ceil(figures["load"] * fleet.links + HARDLY))
    if figures["saved"] <= figures["cost"]:
        yield TOO_DEAR.format(**figures, remote=format_size(fleet.remote))
