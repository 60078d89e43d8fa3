"""What the tier must know about its engine and a request. Imports no vLLM."""

from collections.abc import Callable, Sequence
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
    """The group's number in the engine, part of all its keys."""
    chunk_tokens: int
    window_chunks: int | None
    """Last chunks that a hit needs, its own included: None is all (full attention), 1 only its own (mamba)."""


@dataclass(frozen=True)
class Facts:
    """One engine, as its tier sees it."""

    namespace: Namespace
    shape: ModelShape
    groups: Sequence[Group]
    """First the one whose chunks make the chain; its chunk is the namespace's."""
    step_tokens: int
    """Most tokens that a step computes."""
    decode_tokens: int = 1
    """Tokens of a decoding request in a step."""
    ahead: int = 0
    """Steps that are scheduled before the output of one is read: with asynchronous scheduling, or stages."""

    @property
    def whole_groups(self) -> int:
        """Number of groups whose every chunk of the prompt a fetch needs; at least 1, the chain's."""
        return max(1, sum(group.window_chunks is None for group in self.groups))

    def needs(self, chunks: int) -> int:
        """The store's chunks, of all groups, that a fetch of so many of the chain takes: of a window only the last."""
        tokens = chunks * self.namespace.chunk_tokens
        counts = [(-(-tokens // group.chunk_tokens), group.window_chunks) for group in self.groups]
        return sum(count if window is None else min(count, window) for count, window in counts)


@dataclass(frozen=True)
class Prompt:
    """One request, as its tier sees it."""

    tokens: int
    keys: "list[list[OffloadKey]]"
    """vLLM's keys by group, aligned with the tier's groups."""
    suffix: bytes = b""
    """Digest of the adapter's contents; vLLM's keys have only its name."""
    stands: Callable[[], bool] = lambda: True
    """Whether these are also the contents with which the engine has computed the request so far."""
    tenant: bytes = b""
    reads: bool = True
    writes: bool = True
    headers: object = None
    """Trace context of the caller."""


UNKNOWN = Prompt(tokens=0, keys=[], reads=False, writes=False)
"""Of a request of which nothing has been told yet."""
