"""Which weights a model has, told from its files. Imports no vLLM."""

import hashlib
from pathlib import Path

HEAD_TAIL_BYTES = 64 * 1024


def digest(folder: Path) -> str:
    """32 hex characters over config.json and, of every safetensors shard, header, size, and head and tail of 64 KiB.

    Empty where ``folder`` has no such shard: then nothing is known of the weights.
    """
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        return ""
    total = hashlib.blake2b(digest_size=16)
    config = folder / "config.json"
    for part in [config.read_bytes() if config.exists() else b"", *map(_shard, shards)]:
        total.update(hashlib.blake2b(part, digest_size=32).digest())
    return total.hexdigest()


def _shard(path: Path) -> bytes:
    """Name, size, header (its length stands in the first eight bytes), head and tail of the payload."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = min(int.from_bytes(file.read(8), "little"), size)
        header_and_head = file.read(header_bytes + HEAD_TAIL_BYTES)
        file.seek(max(0, size - HEAD_TAIL_BYTES))
        return b"\0".join([path.name.encode(), str(size).encode(), header_and_head, file.read()])
