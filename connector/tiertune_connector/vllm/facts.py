"""What the tier must know of its engine, and of a request. Imports no vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiertune_connector.cost import ModelShape
from tiertune_connector.keys import Namespace

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey


@dataclass(frozen=True)
class Group:
    """Layers that share their blocks; a model with one kind of attention has one group."""

    index: int
    """Of the group in the engine; it stands in every key of the group."""
    chunk_tokens: int
    window_chunks: int | None
    """Chunks that a hit needs before it, itself among them: None is all (full attention), 1 is itself alone (mamba)."""


@dataclass(frozen=True)
class Facts:
    """One engine, as its tier sees it."""

    namespace: Namespace
    shape: ModelShape
    groups: Sequence[Group]
    """The one whose chunks make the chain first; its chunk is the namespace's."""
    step_tokens: int
    """The most that a step computes."""
    decode_tokens: int = 1
    """That a decoding request has in a step."""

    @property
    def whole_groups(self) -> int:
        """Groups of which a fetch needs every chunk of the prompt; at least the chain's."""
        return max(1, sum(group.window_chunks is None for group in self.groups))


@dataclass(frozen=True)
class Prompt:
    """One request, as its tier sees it."""

    tokens: int
    keys: "list[list[OffloadKey]]"
    """vLLM's keys by group, aligned with the tier's groups."""
    suffix: bytes = b""
    """Digest of the adapter's contents, of which vLLM's keys have only the name."""
    tenant: bytes = b""
    reads: bool = True
    writes: bool = True
    headers: object = None
    """Trace context of the caller."""
