"""An LMCache server with a folder as its L2, and a client with prompts of four small chunks; the benchmark's way."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.store.lmcache_server import VENV, LMCache, lmcache
from e2e.servers import sampled

CHUNKS, CHUNK_TOKENS = 4, 256
SHAPE = "(2,100,16,2,32):float32:4"
"""A chunk is 512 KiB."""

needs_lmcache = pytest.mark.skipif(
    not (VENV / ".tiertune-setup").exists(), reason="no LMCache: make setup-lmcache has not made .venv-lmcache"
)


@dataclass(frozen=True)
class Server:
    server: LMCache
    l2: Path

    @property
    def metrics(self) -> str:
        return str(self.server.http.base_url.join("/metrics"))

    def store(self, prompts: Sequence[int]) -> list[bool]:
        """Whether the server took them."""
        return [self.server.ask("store", prompt)["hits"] == CHUNKS for prompt in prompts]

    def load(self, prompts: Sequence[int]) -> list[int]:
        """Tokens found, by prompt."""
        return [self.server.ask("retrieve", prompt)["hits"] * CHUNK_TOKENS for prompt in prompts]

    def metric(self, name: str) -> float:
        """Sum of the samples of this name; 0 where there is none."""
        return sampled(self.server.http.get("/metrics").text, name)


@contextmanager
def lmcache_server(folder: Path) -> Iterator[Server]:
    """An empty one, with 256 MB of DRAM."""
    l2 = folder / "l2"
    l2.mkdir()
    adapter = json.dumps({"type": "fs", "base_path": str(l2)})
    with lmcache(folder, CHUNKS, SHAPE, "--l2-adapter", adapter, gib=0.25) as server:
        yield Server(server, l2)
