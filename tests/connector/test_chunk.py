"""The header of a chunk: all or nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiertune_connector.chunk import (
    HEADER_BYTES,
    Header,
    Origin,
    checksum,
    copy_checked,
    decode_header,
    writer_id,
)

HEADERS = st.builds(
    Header,
    namespace=st.binary(min_size=16, max_size=16).map(bytes.hex),
    key=st.binary(min_size=1, max_size=64),
    origin=st.builds(
        Origin,
        writer=st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=16),
        tenant=st.one_of(st.just(b""), st.binary(min_size=16, max_size=16).filter(any)),
    ),
    length=st.integers(0, 2**64 - 1),
    checksum=st.integers(0, 2**64 - 1),
)


@given(HEADERS)
def test_a_header_survives_encoding(header):
    """256 bytes tell everything; what follows them does not matter."""
    encoded = header.encode()
    assert len(encoded) == HEADER_BYTES
    assert decode_header(encoded + b"payload") == header


@given(HEADERS, st.integers(0, 8 * 144 - 1))
def test_any_flipped_bit_makes_it_nobodys(header, bit):
    """The header's own checksum covers all that it tells."""
    encoded = bytearray(header.encode())
    encoded[bit // 8] ^= 1 << bit % 8
    assert decode_header(encoded) is None


@given(HEADERS, st.integers(0, HEADER_BYTES - 1))
def test_a_header_cut_short_is_nobodys(header, length):
    """Fewer bytes than a header has are none."""
    assert decode_header(header.encode()[:length]) is None


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_other_bytes_are_nobodys(data):
    """Garbage and zeros are not headers."""
    assert decode_header(data) is None


@pytest.mark.parametrize("key", [b"", b"x" * 65])
def test_a_key_has_1_to_64_bytes(key):
    """Others are refused before they are written anywhere."""
    with pytest.raises(ValueError, match="1 to 64 bytes"):
        Header("0" * 32, key, Origin(), 0, 0).encode()


def test_long_names_of_stores_stay_apart():
    """A name that fits stands for itself; longer ones that begin alike become different digests, stable ones."""
    assert writer_id("host-a") == "host-a"
    long = [writer_id(f"gpu-a-eu-west-1-node-{number}") for number in range(100)]
    assert len(set(long)) == 100
    assert all(len(name.encode()) <= 16 and writer_id(name) == name for name in long)


@given(nbytes=st.integers(0, 3) | st.integers(200_000, 1_100_000), seed=st.integers(0, 9))
def test_a_copy_is_summed_as_it_is_made(nbytes, seed):
    """Also where it ends within a window: the bytes are the same, and the sum is that of a whole payload."""
    data = np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)
    out = np.zeros(nbytes, np.uint8)
    assert copy_checked(out, data) == checksum(data.tobytes())
    assert out.tobytes() == data.tobytes()


@pytest.mark.parametrize("nbytes", [0, 1, 262_144, 262_145, 524_289, 600_001])
def test_a_payload_of_another_length_is_refused(nbytes):
    """Else it would be cut, or repeated, and its sum would be right."""
    with pytest.raises(ValueError, match="does not go into"):
        copy_checked(np.zeros(600_000, np.uint8), np.zeros(nbytes, np.uint8))
