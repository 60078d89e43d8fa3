"""A client of an LMCache server as a child process, run by the interpreter of .venv-lmcache: LMCache's own client.

``lmcache_child.py RPC_URL HTTP_URL`` says ``{"ready": true}``. Then it answers each line ``{"do": name, ...}`` with one
line, until standard input ends. Prompts are numbers; each has four chunks of 256 tokens.
"""

import json
import os
import sys
from typing import Any

import torch
from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig

CHUNK_TOKENS, CHUNKS = 256, 4
SHAPE = "(2,100,16,2,32):float32:4"
"""K and V, blocks, tokens per block, heads, width: dtype: layers. A chunk is 512 KiB."""


class Child:
    def __init__(self, rpc_url: str, http_url: str) -> None:
        self._client = ServerBenchClient(
            BenchConfig(
                rpc_url=rpc_url,
                http_url=http_url,
                mode="cpu",
                transfer_mode="engine_driven",
                tp_size=1,
                use_mla=False,
                num_tokens=CHUNK_TOKENS * CHUNKS,
                kvcache_shape_spec=SHAPE,
                num_blocks=100,
                block_size=16,
            ),
            lambda _message: None,
        )
        self._client.start()
        self._requests = 0

    def store(self, prompts: list[int]) -> dict[str, Any]:
        """Look each up as an engine does, and hand its chunks over; whether the server took them."""
        taken = []
        for prompt in prompts:
            request = self._request(prompt, "store")
            self._client.lookup(request)
            taken.append(bool(self._client.store(request, 0, request.num_full_tokens).succeeded))
            self._client.end_session(request)
        return {"taken": taken}

    def load(self, prompts: list[int]) -> dict[str, Any]:
        """Look each up, and retrieve what is there; tokens found."""
        found = []
        for prompt in prompts:
            request = self._request(prompt, "retrieve")
            tokens = self._client.lookup(request).hit_chunks * CHUNK_TOKENS
            if tokens and not self._client.retrieve(request, 0, tokens).succeeded:
                tokens = 0
            found.append(tokens)
            self._client.end_session(request)
        return {"tokens": found}

    def close(self) -> None:
        self._client.close()

    def _request(self, prompt: int, kind: str) -> Any:
        self._requests += 1
        return self._client.create_request(prompt, f"request-{self._requests}", kind)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # LMCache's log goes to standard output

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    torch.set_num_threads(1)
    child = Child(*sys.argv[1:3])
    say({"ready": True})
    for line in sys.stdin:
        ask = json.loads(line)
        say(getattr(child, ask.pop("do"))(**ask))
    child.close()


if __name__ == "__main__":
    main()
