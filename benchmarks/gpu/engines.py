"""Real vLLM engines on one GPU, with a Llama of 8 billion parameters: what a prompt takes, by who has it.

Two engines have a store each, and both stores use the same Redis on this host; a third engine has no connector. Every
prompt is new, and is sent in turns: while nobody has it; to the engine that computed it (on the GPU, in staging, in the
store's memory); and to the other engine (in Redis). From the stores it is asked for twice: once as the gate
decides, once fetched in any case.

Then many prompts arrive while others are at work: all are in the store's memory; an engine without a store gets them
too. All of it with compiled models and CUDA graphs, which is vLLM's default, and in eager mode.
"""

import json
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.engines import prompt
from e2e.servers import redis_server
from e2e.vllm_engines import Answer, Engine, Request, engine, through_store
from e2e.vllm_model import CONFIG, shapes
from e2e.vllm_stores import Host

MODEL: dict[str, Any] = CONFIG | {
    "torch_dtype": "bfloat16", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256,
    "max_position_embeddings": 131_072, "rope_theta": 500_000.0,
}  # fmt: skip
CHUNK = 256
CHUNK_BYTES = 32 << 20
LENGTHS = (1024, 2048, 4096, 16_384)
ROUNDS = 3
MODES: dict[str, dict[str, Any]] = {
    "compiled": {
        "enforce_eager": False,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]},
    },
    "eager": {},
}
MANY = (1024,) * 6 + (4096,) * 8 + (8192,) * 2 + (12_288,) * 2
"""Tokens of the prompts that arrive while others are at work."""
LOADS = (0.5, 1.3)
"""Seconds of computing all of them, per second in which they arrive."""
WARMING = (200, 1000, 4000, 500, 8000, 2000, 16_000, 300, 3000)
"""Tokens of the prompts that an engine is asked first: kernels are loaded, and the gate learns what a prefill takes."""
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16", "block_size": 16, "max_model_len": 20_480,
    "kv_cache_memory_bytes": 4 << 30, "gpu_memory_utilization": 0.3, "max_num_batched_tokens": 8192,
}  # fmt: skip
IN_MEMORY = Path("/dev/shm")
TILE = (1 << 22) + 3
"""Number of different random weights: more than any row has."""
PATIENT = {"chunk_tokens": CHUNK, "staging": "4GiB", "lookup_deadline": "2s", "load_deadline": "10s"}


class Fleet:
    def __init__(self, first: Engine, second: Engine, alone: Engine, hosts: tuple[Host, Host]) -> None:
        self.first, self.second, self.alone = first, second, alone
        self.hosts = hosts


@contextmanager
def fleet(folder: Path, model: Path, mode: Mapping[str, Any]) -> Iterator[Fleet]:
    """Start engines together, and warm them up."""
    folder.mkdir()
    settings = {**SETTINGS, **mode}
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(maxmemory="24gb", options=["--io-threads", "4"]))
        homes = tuple(
            stack.enter_context(Host(folder / name, name, remote=redis.url, dram="12GiB")) for name in ("a", "b")
        )
        engines = [
            stack.enter_context(
                engine(
                    model,
                    folder / f"{home.name}.log",
                    transfer=through_store(home.socket, home.name, **PATIENT),
                    **settings,
                )
            )
            for home in homes
        ]
        engines.append(stack.enter_context(engine(model, folder / "alone.log", **settings)))
        for each in engines:
            each.wait_ready()
        for place, each in enumerate(engines):
            for tokens in WARMING:
                each.generate([prompt(tokens, seed=(place, tokens))], max_tokens=2)
        yield Fleet(*engines, homes)  # type: ignore[arg-type]
        for each in engines:
            each.end()


def measure(folder: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tt-model-", dir=IN_MEMORY) as model:
        write_model(Path(model), MODEL)
        measured = {}
        for name, mode in MODES.items():
            with fleet(folder / name, Path(model), mode) as run:
                measured[name] = measure_fleet(run)
    return measured


def measure_fleet(run: Fleet) -> dict[str, Any]:
    places = {str(tokens): _places(run, tokens) for tokens in LENGTHS}
    many = {str(load): _many(run, load) for load in LOADS}
    metrics = run.hosts[0].http.get("/v1/counters")["metrics"]
    return {
        "places": places,
        "many": many,
        "foretold": run.first.ask("prefill", tokens=list(LENGTHS)),
        "telemetry": run.first.ask("telemetry"),
        "stage_gpu_seconds": metrics["stage_gpu_seconds_total"]["rows"],
        "stage_tokens": metrics["stage_tokens_total"]["rows"],
    }


def write_model(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a Llama's config.json and weights, 2 bytes each: a tile of random ones, repeated."""
    (folder / "config.json").write_text(json.dumps(config))
    header, offset = {}, 0
    for name, shape in shapes(config):
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header).encode()
    drawn = np.random.default_rng(0).normal(0, 0.02, TILE).astype("<f4").view("<u4") >> 16
    tile = np.tile(drawn.astype("<u2"), 16)
    ones = np.full(config["hidden_size"], 0x3F80, "<u2")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name, shape in shapes(config):
            left = int(np.prod(shape))
            while left:
                left -= file.write((ones if "norm" in name else tile)[:left].data) // 2


def _places(run: Fleet, tokens: int) -> dict[str, Any]:
    """Seconds to the first token, medians, by who has the prompt; what the gate did; how far answers differ."""
    seconds: dict[str, list[float]] = {}
    external: dict[str, list[float]] = {}
    gaps: list[float] = []
    same = 0

    def ask(name: str, each: Engine, asked: list[int]) -> Answer:
        batch = each.generate([asked], max_tokens=4)
        seconds.setdefault(name, []).append(batch.answers[0].ttft_s)
        external.setdefault(name, []).append(batch.external)
        return batch.answers[0]

    def store(name: str, asked: list[int]) -> Answer:
        """Ask the first engine, and wait until its store and Redis have this prompt and nothing else."""
        for home in run.hosts:
            home.flush()
        answer = ask(name, run.first, asked)
        run.hosts[0].wait_resident(tokens // CHUNK * CHUNK_BYTES)
        return answer

    for turn in range(ROUNDS):
        asked, other = (prompt(tokens, seed=(which, tokens, turn)) for which in (1, 2))
        ask("nobody, no connector", run.alone, asked)
        computed = store("nobody", asked)
        ask("gpu", run.first, asked)
        run.first.reset(staging=False)
        ask("staging", run.first, asked)
        run.first.reset(staging=True)
        loaded = ask("store, as the gate decides", run.first, asked)
        run.first.ask("always_fetch", on=True, patient=True)
        run.first.reset(staging=True)
        ask("store, fetched", run.first, asked)
        run.first.ask("always_fetch", on=False)
        gaps += [abs(a - b) for a, b in zip(computed.logprobs, loaded.logprobs, strict=True)]
        same += computed.tokens == loaded.tokens
        ask("redis, as the gate decides", run.second, asked)
        store("nobody", other)
        run.second.ask("always_fetch", on=True, patient=True)
        ask("redis, fetched", run.second, other)
        run.second.ask("always_fetch", on=False)
    medians = {name: median(each) for name, each in seconds.items()}
    return {
        "ttft_s": medians,
        "to_computed": {name: each / medians["nobody"] for name, each in medians.items()},
        "external_tokens": {name: float(np.mean(each)) for name, each in external.items()},
        "same_answers": same,
        "logprob_gap": max(gaps),
        "samples": ROUNDS,
    }


def arrivals(run: Fleet, load: float) -> list[Request]:
    """New prompts in an order and at times drawn at random, the same for each load; the first engine's store has all.

    ``load``: seconds of computing them, per second in which they arrive.
    """
    drawn = np.random.default_rng(5)
    tokens = drawn.permutation(MANY).tolist()
    computing = run.first.ask("prefill", tokens=tokens)["seconds"]
    times = np.sort(drawn.uniform(0, sum(computing) / load, len(tokens))).tolist()
    prompts = [prompt(each, seed=(3, place, each)) for place, each in enumerate(tokens)]
    for home in run.hosts:
        home.flush()
    for each in prompts:
        run.first.generate([each], max_tokens=1)
    run.hosts[0].wait_resident(sum(each // CHUNK for each in tokens) * CHUNK_BYTES)
    return [Request(each, at=at) for each, at in zip(prompts, times, strict=True)]


def ask_many(each: Engine, requests: list[Request], *, staging: bool) -> tuple[float, float]:
    """Mean seconds to the first token, and tokens that came through the connector; nothing is on the GPU before."""
    each.reset(staging=staging)
    batch = each.generate(requests, max_tokens=4)
    return float(np.mean([answer.ttft_s for answer in batch.answers])), batch.external


def _many(run: Fleet, load: float) -> dict[str, Any]:
    requests = arrivals(run, load)
    alone, shared = zip(
        *[
            (ask_many(run.alone, requests, staging=False), ask_many(run.first, requests, staging=True))
            for _ in range(ROUNDS)
        ],
        strict=True,
    )
    return {
        "tokens": sum(MANY),
        "no_connector_s": median(seconds for seconds, _ in alone),
        "shared_s": median(seconds for seconds, _ in shared),
        "ratio": median(own / other for (own, _), (other, _) in zip(shared, alone, strict=True)),
        "external_tokens": float(np.mean([external for _, external in shared])),
    }
