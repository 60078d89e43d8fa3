"""One vLLM engine as a child process, run by the interpreter of .venv-engine.

``vllm_child.py SETTINGS`` (JSON: arguments of LLM, and ``kv_transfer`` or null) says ``{"ready": true}``. Then it
answers each line ``{"do": name, ...}`` with one line, until standard input ends; ``Child`` names what can be asked.
"""

import json
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

PATIENCE_S = 10
IDLE_S = 0.001
"""vLLM's own loop sleeps so long after a step that computed nothing, to let transfers go on."""
Told = dict[str, Any]
"""What is asked, or answered, as JSON."""
NO_LABEL = frozenset({"model_name", "engine"})


class Child:
    def __init__(self, settings: Told) -> None:
        from vllm import LLM
        from vllm.config import KVEventsConfig, KVTransferConfig

        from e2e.vllm_accounting import Accounting

        transfer, events = settings.pop("kv_transfer"), settings.pop("kv_events", None)
        if transfer:
            settings["kv_transfer_config"] = KVTransferConfig(**transfer)
        if events:
            settings["kv_events_config"] = KVEventsConfig(**events)
        self._accounting = Accounting()
        self._llm = LLM(**settings)
        self._engine = self._llm.llm_engine
        self._core = getattr(self._engine.engine_core, "engine_core", None)
        """In this process, else None."""
        self._requests = 0
        self._adapters: Told = {}
        self._broken = 0

    def generate(self, requests: list[Told], max_tokens: int, begun: Callable[[], None] | None = None) -> Told:
        """Greedy. A request is ``prompt``, ``salt`` and ``adapter`` ("": none), and ``at``, its arrival in seconds.

        Each answer has tokens, their logprobs, how many prompt tokens were cached, and seconds from the arrival to the
        first token and to the last. ``begun`` is called once, when those that come at once wait for their first step.
        """
        sampling = _sampling(max_tokens)
        first = self._requests
        self._requests += len(requests)
        started = time.perf_counter()
        due = deque(sorted(range(len(requests)), key=lambda index: requests[index]["at"]))
        answers: list[Told] = [{} for _ in requests]
        while due or self._engine.has_unfinished_requests():
            while due and requests[due[0]]["at"] <= time.perf_counter() - started:
                index = due.popleft()
                adapter = self._adapter(requests[index]["adapter"])
                self._engine.add_request(str(first + index), _prompt(requests[index]), sampling, lora_request=adapter)
            if begun:
                begun()
                begun = None
            if not self._engine.has_unfinished_requests():
                time.sleep(IDLE_S)
                continue
            outputs = self._engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                index = int(output.request_id) - first
                _note(answers[index], output, now - requests[index]["at"])
            if not outputs:
                time.sleep(IDLE_S)
        seconds = time.perf_counter() - started
        self._rest()
        return {"answers": answers, "seconds": seconds, "counters": self._counters()}

    def counters(self) -> Told:
        return {"counters": self._counters()}

    def reset(self, *, connector: bool) -> Told:
        """Empty the engine's own prefix cache; with ``connector`` also staging."""
        return {"done": bool(self._llm.reset_prefix_cache(reset_connector=connector))}

    def call(self, method: str) -> Told:
        """Have the workers run one of their methods."""
        return {"done": self._llm.collective_rpc(method)}

    def over_reset(self, storing: list[int], requests: list[Told], max_tokens: int) -> Told:
        """As ``generate``, but all caches are emptied before the first step, when the store has answered.

        By then ``storing`` is computed and the worker is to copy it to staging: it does so when the loads of that step
        have ended. In-process engines only.
        """
        from tiertune_connector.vllm.connector import TierTuneConnector

        self._engine.add_request("storing", {"prompt_token_ids": storing}, _sampling(1))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        tier = self._core.scheduler.connector.tier

        def copy(connector: Any, metadata: Any) -> None:
            del TierTuneConnector.handle_preemptions
            _wait(lambda: all(job.over for job in tier._transfers._jobs.values()))
            connector.handle_preemptions(metadata)

        def reset() -> None:
            assert self._core.scheduler.connector.connector_scheduler._jobs, "nothing is left to be stored"
            _wait(lambda: all(known.ask is None or known.ask.reply.done() for known in tier._requests.values()))
            assert self.reset(connector=True)["done"]
            TierTuneConnector.handle_preemptions = copy

        return self.generate(requests, max_tokens, reset)

    def always_fetch(self, *, on: bool, patient: bool = False) -> Told:
        """As an engine without a gate: recomputing seems dear beyond all measure. In-process engines only.

        ``patient``: loads may take as long as they like, too.
        """
        from e2e.vllm_fetching import always_fetch

        always_fetch(on=on, patient=patient)
        return {}

    def break_socket(self, path: str, call: str, after: int) -> Told:
        """The connection to the store breaks before the client's copy number ``after`` from now on ends.

        ``call`` is ``read`` or ``write`` of StoreClient. The process lives and goes on copying. In-process engines
        only.
        """
        from tiertune_connector.client.store_client import StoreClient

        original, left = getattr(StoreClient, call), [after]

        def broken(client: Any, *arguments: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                self._broken += _shut_down(path)
                time.sleep(0.2)  # the store sees it before the copy goes on
                setattr(StoreClient, call, original)
            return original(client, *arguments)

        setattr(StoreClient, call, broken)
        return {}

    def broken(self) -> Told:
        """Connections that were broken."""
        return {"broken": self._broken}

    def stub(self) -> Told:
        """What the stub connector behind MultiConnector saw on both of its sides."""
        from e2e.vllm_stub import SEEN

        return dict(SEEN)

    def telemetry(self) -> Told:
        """Seconds of all steps so far, and of the adapter's accounting of them. In-process engines only."""
        return {"step_s": self._accounting.step_s, "overhead_s": self._accounting.overhead_s}

    def prefill(self, tokens: list[int]) -> Told:
        """What the gate believes that prompts of so many tokens take to compute, in seconds. In-process engines only.

        None: it does not know yet.
        """
        cost = self._core.scheduler.connector.tier.gate.prefill
        return {"seconds": [cost.seconds(0, end) for end in tokens], "samples": cost.samples, "line": cost.line}

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _adapter(self, folder: str) -> Any:
        from vllm.lora.request import LoRARequest

        if folder and folder not in self._adapters:
            self._adapters[folder] = LoRARequest(Path(folder).name, len(self._adapters) + 1, folder)
        return self._adapters.get(folder)

    def _rest(self) -> None:
        """Step on as long as vLLM's own loop would: stores may be under way."""
        until = time.perf_counter() + PATIENCE_S
        while self._core is not None and self._core.scheduler.has_requests() and time.perf_counter() < until:
            self._engine.step()
            time.sleep(IDLE_S)

    def _counters(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if hasattr(metric, "value"):
                labels = ",".join(f"{name}={value}" for name, value in metric.labels.items() if name not in NO_LABEL)
                name = f"{metric.name}{{{labels}}}" if labels else metric.name
                found[name] = found.get(name, 0.0) + metric.value
        return found


def _wait(true: Callable[[], bool]) -> None:
    until = time.perf_counter() + PATIENCE_S
    while not true() and time.perf_counter() < until:
        time.sleep(IDLE_S)


def _sampling(max_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=0)


def _prompt(request: Told) -> Told:
    prompt = {"prompt_token_ids": request["prompt"]}
    return prompt | {"cache_salt": request["salt"]} if request["salt"] else prompt


def _note(answer: Told, output: Any, seconds: float) -> None:
    completion = output.outputs[0]
    answer.setdefault("ttft_s", seconds)
    answer["seconds"] = seconds
    answer["cached"] = output.num_cached_tokens or 0
    answer["tokens"] = list(completion.token_ids)
    answer["logprobs"] = [
        place[token].logprob for token, place in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


def _shut_down(path: str) -> int:
    """Every connection of this process to a unix socket, as if the other side had gone; returns how many."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not entry.is_socket():
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.family == socket.AF_UNIX and connection.getpeername() == path:
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's log goes to standard output

    def say(answer: Told) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    child = Child(json.loads(sys.argv[1]))
    say({"ready": True})
    for line in sys.stdin:
        ask = json.loads(line)
        say(getattr(child, ask.pop("do"))(**ask))
    child.close()


if __name__ == "__main__":
    main()
