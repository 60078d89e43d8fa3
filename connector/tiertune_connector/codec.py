"""Lossless compression of payloads for a slow link. A chunk's header names its codec.

Coding pays where ``1 / (B * r) + 1 / c < 1 / B``: for a link of B bytes a second, a ratio r and a decoder of c bytes a
second. Nobody needs to work that out: a fetch is timed until its bytes are decoded, so the gate prices both.
"""

import random
import struct
import threading
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from tiertune_connector.chunk import Header, checksum
from tiertune_connector.counters import Counters
from tiertune_connector.tuning import CodecName
from tiertune_connector.units import Clock

_NUMBERS: dict[CodecName, int] = {"raw": 0, "lz4": 1}
"""A codec's number in headers."""
_NAMES = {number: name for name, number in _NUMBERS.items()}
_WIDTH = np.dtype(np.uint16)
"""As wide as most keys and values, whose bits of the same weight are put side by side before they are packed."""
_SIZES = struct.Struct("<4xI4xI")
"""Bytes before and after coding, at the beginning of Blosc's output."""
_LEVEL = 1
_LEAST_RATIO = 1.05
"""A payload that shrinks by less is stored as it is, and need not be decoded."""
_MEMORY = 0.1
"""Weight of a new chunk's ratio in the running mean."""


def readable(header: Header) -> bool:
    """Whether a chunk can be read here: it is not coded, or its codec is installed."""
    return header.codec in _NAMES and not missing(_NAMES[header.codec])


def missing(name: CodecName) -> str:
    """Why a codec cannot be used here; empty: it can."""
    if name == "raw" or _blosc() is not None:
        return ""
    return "it needs the package numcodecs: pip install 'tiertune[codec]'"


@dataclass(eq=False)
class Codec:
    """One tier's coding. Thread-safe. ``writes`` is the codec of chunks written from now on; others are read too.

    ``clock`` gives monotonic seconds.
    """

    clock: Clock
    counters: Counters

    def __post_init__(self) -> None:
        self.writes: CodecName = "raw"
        self._lock = threading.Lock()
        self._ratio = 0.0
        """Of recent chunks; 0 before the first."""

    def encode(self, header: Header, payload: memoryview) -> tuple[Header, memoryview]:
        """The header, which names the codec, and the bytes to store."""
        name = self.writes  # it may change meanwhile
        blosc = _blosc() if name != "raw" else None
        if blosc is None or not payload:
            return header, payload
        started, width = self.clock(), _WIDTH if len(payload) % _WIDTH.itemsize == 0 else np.dtype(np.uint8)
        coded = memoryview(blosc.compress(np.frombuffer(payload, width), name.encode(), _LEVEL, blosc.BITSHUFFLE))
        self._count("encode", started, len(payload), len(coded))
        with self._lock:
            self._ratio += (_MEMORY if self._ratio else 1.0) * (len(payload) / len(coded) - self._ratio)
        if len(coded) * _LEAST_RATIO > len(payload):
            return header, payload
        return replace(header, codec=_NUMBERS[name], stored=len(coded), stored_checksum=checksum(coded)), coded

    def decode(self, header: Header, stored: memoryview, out: memoryview) -> bool:
        """Fill ``out`` with the payload that `encode` coded as ``stored``, `readable` here; False if that fails.

        Callers have checked ``stored`` against its header's checksum: a decoder trusts its input more than it should.
        It also reads as many bytes as its input claims to have, which whoever writes to the server could have forged.
        """
        blosc, started = _blosc(), self.clock()
        if len(stored) < _SIZES.size or _SIZES.unpack_from(stored) != (len(out), len(stored)):
            return False
        try:
            blosc.decompress(stored, np.frombuffer(out, np.uint8))
        except (RuntimeError, ValueError):
            return False
        self._count("decode", started, len(out), len(stored))
        return checksum(out) == header.checksum

    def sample(self, nbytes: int) -> tuple[str, bytes]:
        """What a probe sends: a name for its kind, and bytes that compress about as well as chunks did lately."""
        name = self.writes
        if name == "raw":
            return name, bytes(nbytes)
        ratio = max(1.0, round(self._ratio, 1))
        filled = round(nbytes / ratio)
        return f"{name}-{ratio:.1f}", random.Random(nbytes).randbytes(filled).ljust(nbytes, b"\0")  # noqa: S311

    def moved(self, operation: str, payload: int, stored: int) -> None:
        """Count what the network was spared of a chunk that has come or gone."""
        if stored < payload:
            self.counters.add("tier_spared_bytes_total", ("remote", operation), payload - stored)

    def _count(self, operation: str, started: float, payload: int, stored: int) -> None:
        self.counters.observe("tier_operation_seconds", ("remote", operation, "ok"), self.clock() - started)
        self.counters.add("codec_bytes_total", (operation, "payload"), payload)
        self.counters.add("codec_bytes_total", (operation, "stored"), stored)


@cache
def _blosc() -> Any:  # noqa: ANN401 (a module without types)
    """The library; None where it is not installed."""
    try:
        return import_module("numcodecs.blosc")
    except ImportError:
        return None
