"""How well the gate predicts what a prefill takes on this GPU: steps of a Llama of 8 billion parameters.

The gate's model learns from some steps, as it does in an engine, and predicts others. A step computes some tokens of
one prompt after those already computed. All layers have the same random weights, which no cache of the GPU holds; cheap
parts are left out (rotation, sampling).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from tiertune_connector.cost import TOKENS_ONLY, ModelShape, PrefillCost
from tiertune_connector.profile.timers import cuda_timer

LAYERS, WIDTH, MLP_WIDTH, HEADS, KV_HEADS, HEAD = 32, 4096, 14336, 32, 8, 128
SHAPE = ModelShape(params=8.03e9, layers=LAYERS, width=WIDTH)
STEP_TOKENS = 8192
CONTEXT = 24_000
"""Tokens computed before a step, at most."""
LEARNED, ASKED = 60, 60
"""Steps that the model learns from, and those that it predicts."""
REPEATED = 3
"""How often each predicted step runs."""
PEAK_FLOPS = 989e12
"""Peak of an H100 or H200 in dense bfloat16; `replay` and `plan` assume half of it."""
Span = tuple[int, int]


class Llama:
    """One layer, run 32 times; ``step`` returns when it is launched."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._qkv, self._out = _drawn((HEADS + 2 * KV_HEADS) * HEAD, WIDTH), _drawn(WIDTH, WIDTH)
        self._up, self._down = _drawn(2 * MLP_WIDTH, WIDTH), _drawn(WIDTH, MLP_WIDTH)
        self._keys, self._values = (_drawn(1, KV_HEADS, CONTEXT + STEP_TOKENS, HEAD) for _ in range(2))
        self._embedded = _drawn(STEP_TOKENS, WIDTH)

    def step(self, span: Span) -> None:
        first, end = span
        count = end - first
        hidden = self._embedded[:count]
        with torch.inference_mode():
            for _ in range(LAYERS):
                query, key, value = linear(rms_norm(hidden, (WIDTH,)), self._qkv).split(
                    [HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], dim=-1
                )
                self._keys[0, :, first:end] = key.view(count, KV_HEADS, HEAD).transpose(0, 1)
                self._values[0, :, first:end] = value.view(count, KV_HEADS, HEAD).transpose(0, 1)
                seen = scaled_dot_product_attention(
                    query.view(1, count, HEADS, HEAD).transpose(1, 2),
                    self._keys[:, :, :end],
                    self._values[:, :, :end],
                    attn_mask=causal_lower_right(count, end),
                    enable_gqa=True,
                )
                hidden = hidden + linear(seen.transpose(1, 2).reshape(count, WIDTH), self._out)
                gate, up = linear(rms_norm(hidden, (WIDTH,)), self._up).chunk(2, dim=-1)
                hidden = hidden + linear(silu(gate) * up, self._down)


def measure(_: Path) -> dict[str, Any]:
    """Prediction errors as shares of a step's seconds, by what the model counts: FLOPs, or tokens."""
    model, random = Llama(), np.random.default_rng(0)
    learned = list(_spans(random, LEARNED))
    asked = list(_spans(random, ASKED))
    _seconds(model, [*learned, (0, STEP_TOKENS)])  # the first step of a size loads its kernels
    costs = {
        "flops": PrefillCost(SHAPE, step_tokens=STEP_TOKENS),
        "tokens": PrefillCost(TOKENS_ONLY, step_tokens=STEP_TOKENS),
    }
    for span, took_s in zip(learned, _seconds(model, learned), strict=True):
        for cost in costs.values():
            cost.observe_step([span], took_s)
    rounds = [_seconds(model, asked) for _ in range(REPEATED)]
    took = [median(each) for each in zip(*rounds, strict=True)]
    whole = median(_seconds(model, [(0, STEP_TOKENS)] * REPEATED))
    return {
        "steps_learned": LEARNED,
        "steps_asked": ASKED,
        "error": {name: _errors(cost, asked, took) for name, cost in costs.items()},
        "line": dict(zip(("overhead_s", "seconds_per_flop"), costs["flops"].line or (), strict=False)),
        "utilisation": {
            "of_the_line": 1 / (costs["flops"].line or (0, 1))[1] / PEAK_FLOPS,
            f"of_{STEP_TOKENS}_tokens": SHAPE.flops(0, STEP_TOKENS) / whole / PEAK_FLOPS,
        },
        "seconds": {f"{first}-{end}": s for (first, end), s in sorted(zip(asked, took, strict=True))},
    }


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02


def _spans(random: np.random.Generator, count: int) -> Iterator[Span]:
    """Spans of 64 to 8,192 tokens, half of them at the beginning of a prompt."""
    for _ in range(count):
        tokens = int(np.exp(random.uniform(np.log(64), np.log(STEP_TOKENS))))
        first = int(random.integers(0, CONTEXT)) if random.random() < 0.5 else 0
        yield first, first + tokens


def _seconds(model: Llama, spans: Sequence[Span]) -> list[float]:
    """Device seconds of each step, as an engine's worker measures them."""
    timer, found = cuda_timer(), []
    for span in spans:
        mark = timer.start(span)
        model.step(span)
        timer.stop(mark)
        torch.cuda.synchronize()
        ((_, seconds),) = timer.poll()
        found.append(seconds)
    return found


def _errors(cost: PrefillCost, asked: Sequence[Span], took: Sequence[float]) -> dict[str, float]:
    """Errors of the prediction, as shares of a step's seconds."""
    shares = sorted(abs((cost.seconds(*span) or 0.0) / s - 1) for span, s in zip(asked, took, strict=True))
    return {
        "mean": sum(shares) / len(shares),
        "median": median(shares),
        "p90": shares[int(0.9 * len(shares))],
        "worst": shares[-1],
    }
