"""What the tier must know of a request when it comes. Needs vLLM for its types alone."""

# mypy: allow-subclassing-any, no-warn-return-any
# Where mypy runs, vLLM is not installed.

from dataclasses import dataclass

from vllm.v1.kv_offload.base import OffloadKey


@dataclass(frozen=True)
class Prompt:
    """One request, as its tier sees it."""

    tokens: int
    keys: list[list[OffloadKey]]
    """vLLM's keys by group, aligned with the tier's groups."""
    suffix: bytes = b""
    """Digest of the adapter's contents, of which vLLM's keys have only the name."""
    tenant: bytes = b""
    reads: bool = True
    writes: bool = True
    headers: object = None
    """Trace context of the caller."""
