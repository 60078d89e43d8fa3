"""KV cache groups as lookups need them. Imports no vLLM."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Layers that share their blocks; a model with one kind of attention has one group."""

    index: int
    """Of the group in the engine; it stands in every key of the group."""
    chunk_tokens: int
    window_chunks: int | None
    """Chunks that a hit needs before it, itself among them: None is all (full attention), 1 is itself alone (mamba)."""
