"""The header that travels with a chunk outside DRAM: whose it is, and whether it is whole."""

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from tiertune_connector.keys import FORMAT_VERSION, MAX_KEY_BYTES

MAGIC = b"TTKV"
HEADER_BYTES = 256
_LAYOUT = struct.Struct("<4sHH16s16s16sBx64sQQ")
CODEC_RAW = 0
Bytes = npt.NDArray[np.uint8]
_WINDOW_BYTES = 256 << 10
"""Copied before it is summed: it is still in the processor's own cache then, and memory is read once."""


@dataclass(frozen=True)
class Origin:
    """Who wrote a chunk, and for which tenant."""

    writer: str = ""
    """`writer_id` of the store."""
    tenant: bytes = b""
    """Digest of 16 bytes; empty for no tenant."""


NOBODY = Origin()


def writer_id(store: str) -> str:
    """At most 16 bytes that stand for a store: its name, or a digest of a longer one."""
    name = store.encode()
    return store if len(name) <= 16 else hashlib.blake2b(name, digest_size=8).hexdigest()


@dataclass(frozen=True)
class Header:
    namespace: str
    key: bytes
    origin: Origin
    length: int
    """Payload bytes."""
    checksum: int
    """xxh3_64 of the payload."""

    def encode(self) -> bytes:
        """256 bytes; the last eight before the padding are a checksum of the header itself."""
        if not 0 < len(self.key) <= MAX_KEY_BYTES:
            raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(self.key)}")
        packed = _LAYOUT.pack(
            MAGIC, FORMAT_VERSION, CODEC_RAW, bytes.fromhex(self.namespace), writer_id(self.origin.writer).encode(),
            self.origin.tenant, len(self.key), self.key, self.length, self.checksum,
        )  # fmt: skip
        return (packed + struct.pack("<Q", xxhash.xxh3_64_intdigest(packed))).ljust(HEADER_BYTES, b"\0")


def decode_header(data: bytes | memoryview) -> Header | None:
    """The header in the first 256 bytes; None if it is torn, foreign, or of another format."""
    data = bytes(data[:HEADER_BYTES])
    if len(data) < HEADER_BYTES or data[:4] != MAGIC:
        return None
    packed = data[: _LAYOUT.size]
    (checksum_of_header,) = struct.unpack_from("<Q", data, _LAYOUT.size)
    if xxhash.xxh3_64_intdigest(packed) != checksum_of_header:
        return None
    _, version, codec, namespace, writer, tenant, key_length, key, length, checksum = _LAYOUT.unpack(packed)
    if version != FORMAT_VERSION or codec != CODEC_RAW:
        return None
    origin = Origin(writer.rstrip(b"\0").decode(errors="replace"), b"" if not any(tenant) else tenant)
    return Header(namespace.hex(), key[:key_length], origin, length, checksum)


def checksum(payload: memoryview | bytes) -> int:
    """xxh3_64 of a payload; releases the GIL for long ones."""
    return xxhash.xxh3_64_intdigest(payload)


def copy_checked(out: Bytes, data: Bytes) -> int:
    """Copy ``data`` into ``out``, both uint8 of one shape (n,), and return the `checksum` of what was copied.

    ValueError if the shapes differ.
    """
    if out.shape != data.shape:
        raise ValueError(f"{data.shape} does not go into {out.shape}")
    digest = xxhash.xxh3_64()
    for start in range(0, len(out), _WINDOW_BYTES):
        window = out[start : start + _WINDOW_BYTES]
        np.copyto(window, data[start : start + _WINDOW_BYTES])
        digest.update(window)  # type: ignore[arg-type] # an array is a buffer
    return digest.intdigest()
