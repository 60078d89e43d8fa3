"""Coded payloads: the same bytes come back, or none; what does not get smaller stays as it is."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.stores import counted
from tiertune_connector import codec as module
from tiertune_connector.chunk import Header, Origin, checksum, decode_header
from tiertune_connector.codec import Codec, missing, readable
from tiertune_connector.counters import Counters

NAMESPACE = "a" * 32
KEY = b"key"


def coding() -> Codec:
    codec = Codec(time.monotonic, Counters())
    codec.writes = "lz4"
    return codec


def header(payload: memoryview) -> Header:
    return Header.of(NAMESPACE, KEY, payload, Origin("host-a"))


def encoded(codec: Codec, payload: memoryview) -> tuple[Header, memoryview]:
    return codec.encode(header(payload), payload)


def decoded(codec: Codec, coded: Header, stored: memoryview, nbytes: int) -> bytes | None:
    out = memoryview(bytearray(nbytes))
    return bytes(out) if codec.decode(coded, stored, out) else None


def keys_and_values(nbytes: int, seed: int = 0) -> memoryview:
    """Normal numbers in bfloat16: as the cache of a model looks from afar."""
    numbers = np.random.default_rng(seed).standard_normal(nbytes // 2 + 1, np.float32)
    return memoryview((numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()[:nbytes])


@settings(deadline=None, max_examples=50)
@given(
    nbytes=st.sampled_from([1, 2, 3, 255, 4096, 65_537, 300_000]), kind=st.sampled_from(["zeros", "numbers", "noise"])
)
def test_what_was_coded_comes_back(nbytes, kind):
    """Bit for bit, whatever it is; noise is stored as it is, and costs nobody a decoding."""
    made = {"zeros": bytes, "numbers": keys_and_values, "noise": np.random.default_rng(1).bytes}
    payload, codec = memoryview(made[kind](nbytes)), coding()
    coded, stored = encoded(codec, payload)
    assert decode_header(coded.encode()) == coded
    if coded.codec == 0:
        assert stored == payload
        assert kind != "zeros" or nbytes < 256
        return
    assert kind != "noise"
    assert (coded.stored, coded.stored_checksum) == (len(stored), checksum(stored))
    assert len(stored) < nbytes
    assert decoded(codec, coded, stored, nbytes) == payload


def test_numbers_get_smaller():
    """By a tenth at least; else a codec would be for nothing."""
    payload = keys_and_values(1 << 20)
    _, stored = encoded(coding(), payload)
    assert len(stored) < 0.9 * len(payload)


@pytest.mark.parametrize("at", [0, 3, 4, 8, 12, 16, 40, 1000, -1])
def test_what_is_not_what_was_coded_is_not_taken(at):
    """Whatever the decoder makes of it: sizes, offsets or contents that were changed."""
    payload, codec = keys_and_values(1 << 16), coding()
    coded, stored = encoded(codec, payload)
    harmed = bytearray(stored)
    harmed[at] ^= 0x41
    assert decoded(codec, coded, memoryview(harmed), len(payload)) in (None, payload)


@pytest.mark.parametrize("left", [0, 15, 16, 40, -1])
def test_what_is_shorter_than_it_says_is_not_decoded(monkeypatch, left):
    """The decoder would read on behind it, and end the store; sums do not help against who made it on purpose."""
    payload, codec, given = keys_and_values(1 << 16), coding(), []
    coded, stored = encoded(codec, payload)
    monkeypatch.setattr(module, "_blosc", lambda: SimpleNamespace(decompress=lambda *them: given.append(them)))
    assert decoded(codec, coded, stored[:left], len(payload)) is None
    assert decoded(codec, coded, stored, len(payload) - 1) is None
    assert given == []


@pytest.mark.parametrize("now", ["raw", "lz4"])
def test_a_change_while_a_chunk_is_coded_holds_for_the_next(monkeypatch, now):
    """What was begun is ended as it was begun: a header tells what is there."""
    payload, codec, real = keys_and_values(1 << 16), coding(), module._blosc()

    class Switching:
        BITSHUFFLE, decompress = real.BITSHUFFLE, staticmethod(real.decompress)

        @staticmethod
        def compress(*args):
            codec.writes = now
            return real.compress(*args)

    monkeypatch.setattr(module, "_blosc", lambda: Switching)
    coded, stored = encoded(codec, payload)
    assert coded.codec == 1
    assert decoded(codec, coded, stored, len(payload)) == payload


def test_off_is_off():
    """Nothing is coded, or counted, unless it is asked for."""
    counters, payload = Counters(), memoryview(bytes(4096))
    codec = Codec(time.monotonic, counters)
    assert encoded(codec, payload) == (header(payload), payload)
    assert codec.sample(100) == ("raw", bytes(100))
    assert not counted(counters, "codec_bytes_total")


def test_what_it_did_is_counted():
    """Bytes before and after, and seconds, both ways."""
    counters, payload = Counters(), memoryview(bytes(1 << 16))
    codec = Codec(time.monotonic, counters)
    codec.writes = "lz4"
    coded, stored = encoded(codec, payload)
    decoded(codec, coded, stored, 1 << 16)
    assert counted(counters, "codec_bytes_total") == {
        (operation, form): nbytes
        for operation in ("encode", "decode")
        for form, nbytes in (("payload", 1 << 16), ("stored", len(stored)))
    }
    assert {labels[1] for labels in counted(counters, "tier_operation_seconds")} == {"encode", "decode"}


def test_a_probe_gets_as_small_as_chunks_do():
    """So that what it costs tells what they cost; its name tells for which ratio it was made."""
    codec = coding()
    kind, noise = codec.sample(1 << 16)
    assert kind == "lz4-1.0"
    assert encoded(codec, memoryview(noise))[0].codec == 0
    payload = keys_and_values(1 << 20)
    codec = coding()
    ratio = len(payload) / len(encoded(codec, payload)[1])
    assert ratio > 1.2
    kind, probe = codec.sample(1 << 16)
    assert kind == f"lz4-{ratio:.1f}"
    _, stored = encoded(codec, memoryview(probe))
    assert (1 << 16) / len(stored) == pytest.approx(ratio, rel=0.15)


def test_a_codec_that_is_not_installed_is_told(monkeypatch):
    """It cannot be asked for, and what another store coded is no chunk of ours to judge."""
    payload, codec = memoryview(bytes(4096)), coding()
    coded, _ = encoded(codec, payload)
    assert readable(coded)
    assert missing("lz4") == ""
    monkeypatch.setattr(module, "_blosc", lambda: None)
    assert "numcodecs" in missing("lz4")
    assert missing("raw") == ""
    assert not readable(coded)
    assert readable(header(payload))
    assert encoded(codec, payload)[0].codec == 0
