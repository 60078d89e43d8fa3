"""One vLLM engine as a child process, run by the interpreter of .venv-engine.

``vllm_child.py SETTINGS`` (JSON: arguments of LLM, and ``kv_transfer`` or null) says
``{"ready": true}``. Then it answers
each line ``{"prompts": [[token ids]], "max_tokens": n, "reset": bool}`` with
``{"tokens": [[ids]], "counters": {name: value}, "seconds": s}``, until standard input ends.
"""

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's log goes to standard output
    settings = json.loads(sys.argv[1])

    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = settings.pop("kv_transfer")
    if transfer:
        settings["kv_transfer_config"] = KVTransferConfig(**transfer)
    llm = LLM(**settings)

    def answer(**fields: object) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    answer(ready=True)
    for line in sys.stdin:
        ask = json.loads(line)
        if ask.get("reset"):
            llm.reset_prefix_cache(reset_connector=True)
        prompts = [{"prompt_token_ids": tokens} for tokens in ask["prompts"]]
        sampling = SamplingParams(temperature=0, max_tokens=ask["max_tokens"], ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        answer(tokens=[list(out.outputs[0].token_ids) for out in outputs], counters=counters, seconds=seconds)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
