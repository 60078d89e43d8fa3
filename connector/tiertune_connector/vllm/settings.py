"""What an operator writes into `kv_connector_extra_config`, and what vLLM is told in turn. Imports no vLLM."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from tiertune_connector.documents import Document
from tiertune_connector.units import Duration, Size

PASSED_ON = frozenset({"eviction_policy", "cache_policy_module_path", "backpressure", "self_describing_kv_events"})
"""Keys of vLLM's own that are left as they are."""
DERIVED = frozenset(
    {"spec_name", "spec_module_path", "cpu_bytes_to_use", "block_size", "offload_prompt_only", "secondary_tiers"}
)
"""Keys of vLLM's own that follow from ours."""


class EngineSettings(Document):
    """Of one engine; all are start-only."""

    socket: str
    """The store's unix socket."""
    staging: Size
    """Bytes of vLLM's pinned host region, all ranks together: a transfer buffer, to hold the chunks in flight."""
    chunk_tokens: int | None = None
    """Tokens per chunk, a multiple of the engine's block; left out: one block."""
    stage: str = "all"
    """Label of this engine in metrics: prefill, decode, thinker, ..."""
    lookup_deadline: Duration = 0.1
    """The store's answer is waited for no longer; then the prompt is recomputed."""
    load_deadline: Duration = 1.0
    """A load of unknown cost may take this long; a predicted one `deadline_factor` times its prediction."""
    load_deadline_floor: Duration = 0.1
    """No load gets less: a busy host wakes threads late."""
    store_deadline: Duration = 5.0
    """A chunk that the store has not taken by then is not stored."""
    connect_timeout: Duration = 1.0
    """Wait at the start; later the client goes on trying in the background."""


def parse(extra: Mapping[str, Any]) -> EngineSettings:
    """The settings among ``extra``; ValueError with one line for every key that is wrong."""
    own = {key: value for key, value in extra.items() if key not in PASSED_ON | DERIVED}
    try:
        return EngineSettings.model_validate(own)
    except ValidationError as error:
        problems = (
            f"kv_connector_extra_config.{'.'.join(map(str, problem['loc']))}: "
            + ("unknown key" if problem["type"] == "extra_forbidden" else problem["msg"].removeprefix("Value error, "))
            for problem in error.errors()
        )
        raise ValueError("\n".join(problems)) from error


def for_vllm(extra: Mapping[str, Any], tier: Mapping[str, Any]) -> dict[str, Any]:
    """``extra`` with what vLLM's tiering needs; ``tier`` are the arguments of TierTuneTier. Idempotent."""
    settings = parse(extra)
    derived: dict[str, Any] = {
        "spec_name": "TierTuneSpec",
        "spec_module_path": "tiertune_connector.vllm.spec",
        "cpu_bytes_to_use": settings.staging,
        # What an engine answers is in the next turn's prompt.
        "offload_prompt_only": False,
        "secondary_tiers": [
            {"type": "TierTuneTier", "module_path": "tiertune_connector.vllm.tier", "settings": settings, **tier}
        ],
    }
    if settings.chunk_tokens is not None:
        derived["block_size"] = settings.chunk_tokens
    return {**extra, **derived}
