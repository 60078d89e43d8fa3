"""The header of a chunk: all or nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiertune_connector import chunk
from tiertune_connector.chunk import (
    HEADER_BYTES,
    Header,
    Origin,
    decode_header,
    writer_id,
)
from tiertune_connector.keys import FORMAT_VERSION

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
    codec=st.integers(0, 2**16 - 1),
    stored=st.integers(0, 2**64 - 1),
    stored_checksum=st.integers(0, 2**64 - 1),
)


@given(HEADERS)
def test_a_header_survives_encoding(header):
    """256 bytes tell everything; what follows them does not matter."""
    encoded = header.encode()
    assert len(encoded) == HEADER_BYTES
    assert decode_header(encoded + b"payload") == header


def test_headers_of_format_2_stay_as_they_are():
    """A store reads what another version left: with anything else here, ``FORMAT_VERSION`` is raised.

    Where magic, version and writer are, they stay in every format.
    """
    header = Header("0123456789abcdef" * 2, b"key", Origin("host-a", b"t" * 16), 20_000, 2**64 - 2, 1, 10_000, 3)
    numbers = "204e000000000000 feffffffffffffff 1027000000000000 0300000000000000 0cf36082c6dc0749"
    told = b"TTKV".hex() + "0200 0100" + "0123456789abcdef" * 2 + b"host-a".hex() + "00" * 10 + "74" * 16
    encoded = bytes.fromhex(told + "0300" + b"key".hex() + "00" * 61 + numbers)
    assert FORMAT_VERSION == 2
    assert header.encode() == encoded.ljust(HEADER_BYTES, b"\0")


@given(HEADERS, st.integers(0, 8 * 160 - 1))
def test_any_flipped_bit_makes_it_nobodys(header, bit):
    """The header's own checksum covers all that it tells."""
    encoded = bytearray(header.encode())
    encoded[bit // 8] ^= 1 << bit % 8
    assert decode_header(encoded) is None


@given(HEADERS)
def test_a_header_of_another_format_is_nobodys(header):
    """It is whole, and what another version left: its fields need not mean what they mean here."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(chunk, "FORMAT_VERSION", FORMAT_VERSION + 1)
        encoded = header.encode()
        assert decode_header(encoded) == header
    assert decode_header(encoded) is None


@given(HEADERS, st.integers(0, HEADER_BYTES - 1))
def test_a_header_cut_short_is_nobodys(header, length):
    """Fewer bytes than a header has are none."""
    assert decode_header(header.encode()[:length]) is None


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_other_bytes_are_nobodys(data):
    """Garbage and zeros are not headers."""
    assert decode_header(data) is None


def test_long_names_of_stores_stay_apart():
    """A name that fits stands for itself; longer ones that begin alike become different digests, stable ones."""
    assert writer_id("host-a") == "host-a"
    long = [writer_id(f"gpu-a-eu-west-1-node-{number}") for number in range(100)]
    assert len(set(long)) == 100
    assert all(len(name.encode()) <= 16 and writer_id(name) == name for name in long)
