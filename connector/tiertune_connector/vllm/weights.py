"""Which weights a model or an adapter has, identified by its files. Imports no vLLM."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

HEAD_TAIL_BYTES = 64 * 1024
MOST_HEADER_BYTES = 100_000_000
"""Of a safetensors file, by its format."""
SAMPLES = 64
SAMPLE_BYTES = 4096
CONFIG = "config.json"
MISTRALS = "params.json"
"""Mistral's own format, beside a `CONFIG` or in its place: vLLM also reads it."""


def digest(folder: Path) -> str:
    """32 hex characters over a model's configuration and its safetensors shards, as in `digest_of`.

    Empty if ``folder`` has no such shard: then nothing is known of the weights.
    """
    found = shards(folder)
    return digest_of(folder / CONFIG, found).hex() if found else ""


def shards(folder: Path) -> list[Path]:
    """The safetensors files in ``folder``, in order; nothing else that is named so."""
    return sorted(path for path in folder.glob("*.safetensors") if path.is_file())


def digest_of(config: Path, shards: Sequence[Path]) -> bytes:
    """16 bytes over a configuration and every shard's name, header, size, head and tail of 64 KiB, and samples between.

    The samples are there because training that leaves embeddings and attention alone may change neither head nor tail.
    OSError if a file cannot be read. A configuration may be missing; one in Mistral's format beside it is included.
    """
    total, others = hashlib.blake2b(digest_size=16), filter(Path.exists, [config.with_name(MISTRALS)])
    configs = [config.read_bytes() if config.exists() else b"", *map(Path.read_bytes, others)]
    for part in [*configs, *map(_shard, shards)]:
        total.update(hashlib.blake2b(part, digest_size=32).digest())
    return total.digest()


def _shard(path: Path) -> bytes:
    """Name, size, header (its length is in the first eight bytes), head, tail and samples of the payload."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = min(int.from_bytes(file.read(8), "little"), size, MOST_HEADER_BYTES)
        header_and_head = file.read(header_bytes + HEAD_TAIL_BYTES)
        samples = [_at(file, place * size // SAMPLES, SAMPLE_BYTES) for place in range(1, SAMPLES)]
        tail = _at(file, max(0, size - HEAD_TAIL_BYTES), HEAD_TAIL_BYTES)
        return b"\0".join([os.fsencode(path.name), str(size).encode(), header_and_head, *samples, tail])


def _at(file: BinaryIO, start: int, nbytes: int) -> bytes:
    file.seek(start)
    return file.read(nbytes)
