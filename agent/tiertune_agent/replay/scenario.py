"""The document of a replay scenario: fleet, model, tiers, link. Speeds are assumptions, not measurements."""

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from tiertune_connector.documents import Document
from tiertune_connector.tuning import Algorithm

Spec = TypeVar("Spec")
LEAST = 1e-9
"""Lower bound of numbers above 0: products and quotients of all numbers here stay finite."""
WIDEST_VALUE = 8
"""Bytes of the widest number in a KV cache; a token of all layers takes more."""
Positive = Annotated[float, Field(ge=LEAST, le=1e24)]
NotNegative = Annotated[float, Field(ge=0, le=1e9)]
Share = Annotated[float, Field(ge=LEAST, le=1)]
Count = Annotated[int, Field(gt=0, le=10**9)]
Step = Annotated[float, Field(ge=0.1, le=1e9)]
"""Seconds; a replay keeps a number for each step of a trace, which may last a year, and asks tuners in each period."""


class ModelSpec(Document):
    """What prefill time and KV size depend on in a model."""

    params: Positive
    """Active parameters per token."""
    layers: Count
    width: Count
    """Attention width: heads times head dimension."""
    kv_heads: Count | None = None
    head_dim: Count | None = None
    kv_bytes: Count | None = None
    """Bytes per token, all layers. Up to 8 beside kv_heads and head_dim: bytes per value; left out, 2 (bf16)."""

    @model_validator(mode="after")
    def _has_kv_size(self) -> Self:
        if self.kv_heads is None or self.head_dim is None:
            if self.kv_bytes is None:
                raise ValueError("give kv_bytes, or both kv_heads and head_dim")
            if self.kv_bytes <= WIDEST_VALUE:
                raise ValueError(f"kv_bytes {self.kv_bytes} is a value's: give a token's, or kv_heads and head_dim too")
        return self

    @property
    def kv_token_bytes(self) -> int:
        values = 2 * self.layers * (self.kv_heads or 0) * (self.head_dim or 0)
        size = self.kv_bytes or 2
        return values * size if values and size <= WIDEST_VALUE else size


class GpuSpec(Document):
    """The GPUs of one engine together."""

    flops: Positive
    """Peak FLOPs per second."""
    utilisation: Share = 0.5
    """Share of the peak that prefill reaches."""


MODELS: dict[str, ModelSpec] = {
    "llama-3-70b": ModelSpec(params=70.6e9, layers=80, width=8192, kv_heads=8, head_dim=128),
    "llama-3-8b": ModelSpec(params=8.03e9, layers=32, width=4096, kv_heads=8, head_dim=128),
    "qwen-32b": ModelSpec(params=32.8e9, layers=64, width=5120, kv_heads=8, head_dim=128),
    # MLA keeps one latent of 576 values per layer; the width is a rough 128 heads of 160.
    "deepseek-v3": ModelSpec(params=37e9, layers=61, width=128 * 160, kv_bytes=61 * 576 * 2),
}
H100_FLOPS = 989e12
GPUS: dict[str, GpuSpec] = {
    "h100": GpuSpec(flops=H100_FLOPS),
    "h100x2": GpuSpec(flops=2 * H100_FLOPS),
    "h100x4": GpuSpec(flops=4 * H100_FLOPS),
    "h100x8": GpuSpec(flops=8 * H100_FLOPS),
    "h200x8": GpuSpec(flops=8 * H100_FLOPS),
    "a10": GpuSpec(flops=125e12),
}


def _named(table: dict[str, Spec]) -> BeforeValidator:
    def look_up(value: Any) -> Any:  # noqa: ANN401 (whatever the YAML holds)
        if not isinstance(value, str):
            return value
        if value not in table:
            raise ValueError(f"unknown name {value!r}: use one of {', '.join(table)}, or a mapping")
        return table[value]

    return BeforeValidator(look_up)


Model = Annotated[ModelSpec, _named(MODELS)]
Gpu = Annotated[GpuSpec, _named(GPUS)]


class Sized(Document):
    """A tier's size, summed over the fleet."""

    share: NotNegative | None = None
    """Share of the trace's unique bytes."""
    gib: NotNegative | None = None
    eviction: Algorithm = "lru"

    @model_validator(mode="after")
    def _has_one_size(self) -> Self:
        if (self.share is None) == (self.gib is None):
            raise ValueError("give either share or gib")
        return self

    def chunks(self, unique: int, chunk_bytes: int) -> float:
        """Chunks of the whole fleet, not rounded."""
        return self.share * unique if self.share is not None else (self.gib or 0.0) * 2**30 / chunk_bytes


class TierSpec(Sized):
    """A local tier; speeds left out take no time."""

    gbps: Positive | None = None
    """Gigabits per second."""
    latency_s: NotNegative = 0.0


class RemoteSpec(Sized):
    """The one remote tier; its speed is the link's."""

    touch: Literal["all", "misses"] = "all"
    """Whether chunks found in a local tier are touched, and written, here too."""


class TierSpecs(Document):
    dram: TierSpec
    disk: TierSpec = TierSpec(share=0.0)
    remote: RemoteSpec = RemoteSpec(share=0.0)


class Fluctuation(Document):
    """Log-bandwidth as a first-order autoregressive process: median 1, stationary standard deviation ``sigma``."""

    kind: Literal["ar1"]
    sigma: Annotated[float, Field(ge=0, le=10)]
    phi: Annotated[float, Field(ge=0, lt=1)]
    """Correlation from one step to the next."""
    step_s: Step = 30.0


class Line(Document):
    """A link's nominal speed."""

    gbps: Positive
    """Gigabits per second of the line."""
    efficiency: Share = 0.9
    latency_s: NotNegative = 0.001
    """Per fetch."""

    @property
    def bytes_per_s(self) -> float:
        """Nominal bandwidth."""
        return self.gbps * 1e9 / 8 * self.efficiency


class LinkSpec(Line):
    """The link from every node to the remote tier."""

    per_chunk_s: NotNegative = 0.0002
    probe_s: Step = 30.0
    """The bandwidth is probed once in each span of this length."""
    fluctuation: Fluctuation | None = None


class ByHand(Document):
    """What somebody changes in every node's DRAM without the agent."""

    dram_factor: Annotated[float, Field(ge=LEAST, le=1e9)] = 1.0
    """Multiplies the capacity."""
    eviction: Algorithm | None = None


class Event(Document):
    """The link is slower, or down, for a while; or somebody changes the fleet."""

    at_s: NotNegative
    """Seconds from the first request."""
    for_s: Positive
    link_factor: Positive | None = None
    """Multiplies the bandwidth."""
    link: Literal["down"] | None = None
    by_hand: ByHand | None = None
    """Done when the event begins, and not undone when it ends."""

    @model_validator(mode="after")
    def _does_one_thing_to_the_link(self) -> Self:
        if self.link is not None and self.link_factor is not None:
            raise ValueError("a link that is down has no link_factor: leave one of them out")
        if self.link is None and self.link_factor is None and self.by_hand is None:
            raise ValueError("nothing happens: give link_factor, link: down, or by_hand")
        return self


class Scenario(Document):
    """One replay; shape as in the contracts."""

    name: str
    engines: Annotated[int, Field(gt=0, le=4096)]
    nodes: Annotated[int, Field(gt=0, le=4096)]
    queueing: bool = False
    """Requests wait in one prefill queue per engine, and for the shared link."""
    routing: Literal["random", "round_robin", "sticky", "least_loaded"] = "random"
    """``least_loaded``: the engine with the least prefill to do, even without ``queueing``."""
    model: Model
    gpu: Gpu
    gpu_cache_tokens: Annotated[int, Field(ge=0)] = 0
    tiers: TierSpecs
    link: LinkSpec
    time_factor: Positive = 1.0
    """Multiplies the times between arrivals: 0.5 doubles the load."""
    period_s: Step = 300.0
    events: list[Event] = Field(default_factory=list)
    seed: Annotated[int, Field(ge=0)] = 1

    @model_validator(mode="after")
    def _spreads_evenly(self) -> Self:
        if self.engines % self.nodes:
            raise ValueError(
                f"{self.engines} engines cannot be spread evenly over {self.nodes} nodes: make them a multiple"
            )
        return self

    def node(self, engine: int) -> int:
        """The node that the engine is on."""
        return engine // (self.engines // self.nodes)
