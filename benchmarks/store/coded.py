"""What coding a chunk for the remote costs and saves, and below which link speed it pays; one thread, no link."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.store.rounds import interleaved
from benchmarks.store.slower import NotMeasuredError
from benchmarks.store.world import MIB
from tiertune_connector.chunk import Header, Origin
from tiertune_connector.codec import Codec, missing
from tiertune_connector.counters import Counters

NBYTES = 32 * MIB
CHANNELS = 1024


def measure(_: Path, rounds: int) -> dict[str, Any]:
    """Measured on generated numbers, which do not show how well a real model's cache can be coded."""
    if told := missing("lz4"):
        raise NotMeasuredError(told)
    with ThreadPoolExecutor(1) as thread:  # on the main thread the library would use its own threads
        return thread.submit(_measure, rounds).result()


def _measure(rounds: int) -> dict[str, Any]:
    payload, out = numbers(), memoryview(bytearray(NBYTES))
    codec = Codec(perf_counter, Counters())
    codec.writes = "lz4"
    header = Header.of("0" * 32, b"key", payload, Origin())
    coded, stored = codec.encode(header, payload)
    seconds = interleaved(
        {
            "encode": lambda _: codec.encode(header, payload),
            "decode": lambda _: codec.decode(coded, stored, out),
            "memcpy": lambda _: np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(payload, np.uint8)),
        },
        rounds,
    )
    speed = {f"{name}_gb_per_s": NBYTES / median(each) / 1e9 for name, each in seconds.items()}
    ratio = NBYTES / len(stored)
    return {
        "codec": {"lz4": {"ratio": ratio, **speed, "pays_below_gb_per_s": pays_below(ratio, speed["decode_gb_per_s"])}}
    }


def pays_below(ratio: float, decode: float) -> float:
    """Link speed below which a coded chunk arrives sooner: decoding takes less time than the link saves by it."""
    return decode * (ratio - 1) / ratio


def numbers() -> memoryview:
    """Normal numbers in bfloat16, each channel with its own scale (log-normal), like keys and values."""
    rng = np.random.default_rng(0)
    scale = np.exp(rng.standard_normal(CHANNELS)).astype(np.float32)
    made = rng.standard_normal((NBYTES // 2 // CHANNELS, CHANNELS), np.float32) * scale
    return memoryview((made.view(np.uint32) >> 16).astype(np.uint16).tobytes())
