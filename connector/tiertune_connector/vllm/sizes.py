"""How large a chunk and staging are. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from tiertune_connector.vllm.probes import UnsupportedError

USUAL_CHUNK_TOKENS = 256
"""If an operator sets none."""
PAGE_BYTES = 4096


@dataclass(frozen=True)
class SizePlan:
    """Sizes that vLLM is given."""

    blocks_per_chunk: int
    chunk_tokens: tuple[int, ...]
    """Tokens of a chunk, for every group."""
    row_bytes: int
    """Bytes of a chunk in staging, in whole pages."""
    staging_bytes: int
    """By the formula, in whole chunks."""
    prompt_bytes: int
    """Bytes of staging that the longest prompt takes."""


def plan(
    block_tokens: Sequence[int], block_bytes: int, *, batched_tokens: int, prompt_tokens: int, chunk_tokens: int | None
) -> SizePlan:
    """How large an engine's chunks and staging are to be.

    ``block_tokens`` are those of a block, for every group; ``block_bytes`` the bytes of a block of any group, all ranks
    together. A step has at most ``batched_tokens``, a request at most ``prompt_tokens``. ``chunk_tokens`` holds for the
    group with the largest block; UnsupportedError if it is no multiple of that block.

    The formula for staging: bytes of KV per token x (2 x tokens of a step + 2 x tokens of the longest prompt), so that
    two steps' stores and two long prompts' loads fit at a time. With several groups a token's bytes are their sum.
    """
    block = max(block_tokens)
    blocks_per_chunk, rest = divmod(chunk_tokens or max(block, USUAL_CHUNK_TOKENS // block * block), block)
    if rest or not blocks_per_chunk:
        near = " or ".join(str(block * count) for count in (blocks_per_chunk, blocks_per_chunk + 1) if count)
        raise UnsupportedError(
            f"kv_connector_extra_config.chunk_tokens: {chunk_tokens} is no multiple of the engine's block of"
            f" {block} tokens: {near}"
        )
    row_bytes = -(-block_bytes * blocks_per_chunk // PAGE_BYTES) * PAGE_BYTES
    tokens = tuple(blocks_per_chunk * block for block in block_tokens)
    in_flight = 2 * batched_tokens + 2 * prompt_tokens
    return SizePlan(
        blocks_per_chunk=blocks_per_chunk,
        chunk_tokens=tokens,
        row_bytes=row_bytes,
        staging_bytes=row_bytes * _chunks(tokens, in_flight),
        prompt_bytes=row_bytes * _chunks(tokens, prompt_tokens),
    )


def _chunks(chunk_tokens: Sequence[int], tokens: int) -> int:
    return sum(-(-tokens // of_group) for of_group in chunk_tokens)
