"""What an operator writes into `kv_connector_extra_config`, and what vLLM is told in turn. Imports no vLLM."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator

from tiertune_connector.documents import Document, unknown_key, validated
from tiertune_connector.protocol.messages import LABEL_CHARS
from tiertune_connector.serve import embedded
from tiertune_connector.settings import MAX_SOCKET_PATH_BYTES
from tiertune_connector.units import Duration, Size
from tiertune_connector.vllm.sizes import SizePlan

PASSED_ON = frozenset({"eviction_policy", "cache_policy_module_path", "backpressure", "self_describing_kv_events"})
"""Keys of vLLM's own that are left as they are."""
DERIVED = frozenset(
    {"spec_name", "spec_module_path", "cpu_bytes_to_use", "blocks_per_chunk", "offload_prompt_only", "secondary_tiers"}
)
"""Keys of vLLM's own that follow from ours; an operator who writes one is told."""
SPEC = "TierTuneSpec"
Config = dict[str, Any]
"""As `kv_connector_extra_config`."""


class EngineSettings(Document):
    """Of one engine; all are start-only."""

    socket: str = Field(default_factory=lambda: str(embedded.default_socket()))
    """The store's unix socket; by default that of this user's embedded store."""
    stage: str = Field(default="all", max_length=LABEL_CHARS)
    """Label of this engine in metrics: prefill, decode, thinker, ..."""
    staging: Size | None = Field(default=None, gt=0)
    """Bytes of vLLM's pinned host region, all ranks together: a transfer buffer for the chunks in flight.

    By default its size follows the formula in connector/README.md.
    """
    chunk_tokens: int | None = Field(default=None, gt=0)
    """Tokens per chunk, a multiple of the engine's block; by default 256, in whole blocks."""
    epoch: int = Field(default=0, ge=0, lt=2**63)
    """The weights' epoch: raise it with new weights, on all engines that are to share.

    No engine finds another epoch's chunks; `tiertune flush --epoch N` drops what engines of an old epoch left.
    """
    isolation: Literal["shared", "require_salt"] = "shared"
    """`require_salt`: a request without `cache_salt` neither reads nor writes."""
    store_dram: Size = 0
    """DRAM of the embedded store that the engine starts if no store listens; 0: never start one.

    Default without `socket`: 4 GiB, at most a quarter of what host and control groups let a store have. Default with
    `socket`: 0, because a store of your own is expected there, and may merely start late.
    """
    lookup_deadline: Duration = 0.1
    """How long the engine waits for the store's answer; then the prompt is recomputed."""
    load_deadline: Duration = 1.0
    """A load of unknown cost may take this long; others `deadline_factor` times what a slow one would."""
    load_deadline_floor: Duration = 0.1
    """No load gets less time than this, because a busy host wakes threads late."""
    store_deadline: Duration = 5.0
    """A chunk that the store has not taken by then is not stored."""
    connect_timeout: Duration = 1.0
    """How long to wait at the start; after that the client keeps trying in the background."""
    otlp_endpoint: str = Field(default="", pattern=r"^(https?://.+)?$")
    """Where to send spans (OTLP over HTTP), such as http://127.0.0.1:4318/v1/traces; empty: no spans."""
    allow_untested: bool = False
    """Also run with a vLLM that TierTune was never tested with; one that lacks what is needed is still refused."""

    @model_validator(mode="before")
    @classmethod
    def _starts_a_store(cls, written: Config) -> Config:
        if "socket" in written:
            return written
        return {"store_dram": embedded.default_dram_bytes(), **written}

    @field_validator("otlp_endpoint")
    @classmethod
    def _has_a_host(cls, url: str) -> str:
        with suppress(ValueError):  # of what urlsplit cannot read, and of a wrong port
            parts = urlsplit(url)
            if not url or (parts.hostname and parts.port != 0):
                return url
        raise ValueError("write it as http://host:4318/v1/traces")

    @field_validator("socket")
    @classmethod
    def _fits(cls, path: str) -> str:
        if not path or "\0" in path or len(path.encode()) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"the path of a unix socket has 1 to {MAX_SOCKET_PATH_BYTES} bytes, none of them 0")
        return path


def parse(extra: Mapping[str, Any]) -> EngineSettings:
    """The settings among ``extra``; ValueError with one line for every key that is wrong."""
    ignored = PASSED_ON | DERIVED if extra.get("spec_name") == SPEC else PASSED_ON
    try:
        return validated(EngineSettings, {key: value for key, value in extra.items() if key not in ignored})
    except ValidationError as error:
        problems = (f"kv_connector_extra_config.{_describe(problem)}" for problem in error.errors())
        raise ValueError("\n".join(problems)) from error
    except TypeError as error:
        raise ValueError(f"kv_connector_extra_config: {error}") from error


def for_vllm(extra: Mapping[str, Any], plan: SizePlan | None) -> Config:
    """``extra`` with what vLLM's tiering needs. Idempotent.

    Without ``plan`` vLLM is not told the sizes: enough for metrics, too little for an engine.
    """
    settings = parse(extra)
    derived: Config = {
        "spec_name": SPEC,
        "spec_module_path": "tiertune_connector.vllm.spec",
        # What an engine answers is in the next turn's prompt.
        "offload_prompt_only": False,
        "secondary_tiers": [
            {"type": "TierTuneTier", "module_path": "tiertune_connector.vllm.tier", "settings": settings},
        ],
    }
    if plan is not None:
        derived["cpu_bytes_to_use"] = settings.staging or plan.staging_bytes
        derived["blocks_per_chunk"] = plan.blocks_per_chunk
    return {**extra, **derived}


def _describe(problem: Any) -> str:  # noqa: ANN401 (pydantic's ErrorDetails)
    key = ".".join(map(str, problem["loc"]))
    if problem["type"] != "extra_forbidden":
        return f"{key}: {problem['msg'].removeprefix('Value error, ')}"
    own = key in DERIVED | {"block_size"}
    unknown = "unknown key: TierTune sets it by itself" if own else unknown_key(EngineSettings, problem["loc"])
    return f"{key}: {unknown}"
