"""LMCache's own client as a child process, run by the interpreter of .venv-lmcache.

``lmcache_child.py RPC_URL HTTP_URL CHUNKS SHAPE`` says ``{"ready": true}``. Then it answers each line ``{"do": name,
"prompt": number}`` with one line, until standard input ends. Seconds are LMCache's own, of the operation alone. A
prompt has CHUNKS chunks of 256 tokens, which lie in an engine's blocks. SHAPE is that of all blocks: keys and values,
blocks, tokens per block, heads, width: dtype: layers, such as ``(2,300,16,8,128):bfloat16:32``.
"""

import json
import os
import re
import sys
from functools import partial
from typing import Any

import torch
from lmcache.cli.commands.bench.server_bench import helpers
from lmcache.cli.commands.bench.server_bench.client import RequestContext, ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig

CHUNK_TOKENS = 256
POLL_S = 0.005
"""Between polls of a lookup, if the first has no answer, as for one that asks L2. Each poll costs the server."""


class Child:
    def __init__(self, rpc_url: str, http_url: str, chunks: str, shape: str) -> None:
        _, blocks, block_tokens, *_ = re.findall(r"\d+", shape)
        self._client = ServerBenchClient(
            BenchConfig(
                rpc_url=rpc_url,
                http_url=http_url,
                mode="cpu",
                transfer_mode="engine_driven",
                tp_size=1,
                use_mla=False,
                num_tokens=CHUNK_TOKENS * int(chunks),
                kvcache_shape_spec=shape,
                num_blocks=int(blocks),
                block_size=int(block_tokens),
            ),
            lambda _message: None,
        )
        self._client.start()
        self._requests = 0

    def lookup(self, prompt: int) -> dict[str, Any]:
        request = self._request(prompt)
        found = self._found(request)
        self._client.end_session(request)
        return found

    def store(self, prompt: int) -> dict[str, Any]:
        """Look it up as an engine does, and hand its chunks over; lookups find them a little later."""
        request = self._request(prompt)
        self._client.lookup(request)
        stored = self._client.store(request, 0, request.num_full_tokens)
        self._client.end_session(request)
        return {"seconds": stored.latency_ms / 1e3, "hits": request.total_chunks if stored.succeeded else 0}

    def retrieve(self, prompt: int) -> dict[str, Any]:
        """Retrieve a prompt; the lookup before it is timed apart, as ``lookup_s``."""
        request = self._request(prompt)
        found = self._found(request)
        tokens = found["hits"] * CHUNK_TOKENS
        loaded = self._client.retrieve(request, 0, tokens) if tokens else None
        self._client.end_session(request)
        if loaded is None or not loaded.succeeded:
            return {"seconds": 0.0, "lookup_s": found["seconds"], "hits": 0}
        return {"seconds": loaded.latency_ms / 1e3, "lookup_s": found["seconds"], "hits": found["hits"]}

    def check(self, prompt: int) -> dict[str, Any]:
        """Retrieve a prompt that was stored, over zeros; hits count only if its blocks are then as they were before."""
        request = self._request(prompt)
        span = request, 0, request.num_full_tokens
        before = self._client.compute_checksums(*span)
        self._client.zero_destination(*span)
        zeros = self._client.compute_checksums(*span)
        told = self.retrieve(prompt)
        whole = before != zeros and before == self._client.compute_checksums(*span)
        return {**told, "hits": told["hits"] if whole else 0}

    def close(self) -> None:
        self._client.close()

    def _found(self, request: RequestContext) -> dict[str, Any]:
        found = self._client.lookup(request)
        return {"seconds": found.latency_ms / 1e3, "hits": found.hit_chunks}

    def _request(self, prompt: int) -> RequestContext:
        self._requests += 1
        request = self._client.create_request(prompt, f"request-{self._requests}", "bench")
        if request is None:
            raise ValueError("a prompt has at least one chunk")
        return request


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # LMCache's log goes to standard output

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    torch.set_num_threads(1)
    helpers._poll_prefetch_status = partial(  # noqa: SLF001 (it polls every 50 ms, which would be what is measured)
        helpers._poll_prefetch_status,  # noqa: SLF001
        max_polls=30_000,
        poll_interval=POLL_S,
    )
    child = Child(*sys.argv[1:])
    say({"ready": True})
    for line in sys.stdin:
        ask = json.loads(line)
        say(getattr(child, ask.pop("do"))(**ask))
    child.close()


if __name__ == "__main__":
    main()
