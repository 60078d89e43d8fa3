"""The header that travels with a chunk outside DRAM: whose it is, and whether it is whole."""

import hashlib
import struct
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from tiertune_connector.keys import FORMAT_VERSION

MAGIC = b"TTKV"
HEADER_BYTES = 256
_LAYOUT = struct.Struct("<4sHH16s16s16sBx64sQQQQ")
_BEGINNING = struct.Struct("<4s20x16s")
"""Magic and writer, of headers of every format version."""
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Origin:
    """Who wrote a chunk, for which tenant, and its checksum."""

    writer: str = ""
    """`writer_id` of the store."""
    tenant: bytes = b""
    """Digest of 16 bytes; empty for no tenant."""
    checksum: int | None = field(default=None, compare=False)
    """xxh3_64 of the payload, as its first writer summed it; None: not summed yet."""

    def sum_of(self, payload: memoryview) -> int:
        """The known checksum, else that of ``payload``, whose origin this is."""
        return checksum(payload) if self.checksum is None else self.checksum


NOBODY = Origin()


def writer_id(store: str) -> str:
    """At most 16 bytes that stand for a store: its name, or a digest of a longer one."""
    name = store.encode()
    return store if len(name) <= 16 else hashlib.blake2b(name, digest_size=8).hexdigest()


@dataclass(frozen=True)
class Header:
    namespace: str
    key: bytes
    """1 to 64 bytes, as in all messages."""
    origin: Origin
    length: int
    """Payload bytes."""
    checksum: int
    """xxh3_64 of the payload."""
    codec: int = 0
    """Number of the codec that the payload was coded with; 0: it is stored as it is."""
    stored: int = 0
    """Bytes of the coded payload; 0 if it is stored as it is."""
    stored_checksum: int = 0
    """xxh3_64 of the coded payload."""

    @classmethod
    def of(cls, namespace: str, key: bytes, payload: memoryview, origin: Origin) -> "Header":
        """The header of a chunk to be written, whose checksum is computed here unless its origin has it."""
        return cls(namespace, key, origin, len(payload), origin.sum_of(payload))

    @property
    def sum_of_stored(self) -> int:
        """xxh3_64 of the bytes that are stored: the coded payload, else the payload."""
        return self.stored_checksum if self.codec else self.checksum

    def encode(self) -> bytes:
        """256 bytes; the last eight before the padding are a checksum of the header itself."""
        packed = _LAYOUT.pack(
            MAGIC, FORMAT_VERSION, self.codec, bytes.fromhex(self.namespace), writer_id(self.origin.writer).encode(),
            self.origin.tenant, len(self.key), self.key, self.length, self.checksum, self.stored, self.stored_checksum,
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
    _, version, codec, namespace, writer, tenant, key_length, key, length, checksum, *coded = _LAYOUT.unpack(packed)
    if version != FORMAT_VERSION:
        return None
    origin = Origin(writer.rstrip(b"\0").decode(errors="replace"), b"" if not any(tenant) else tenant, checksum)
    return Header(namespace.hex(), key[:key_length], origin, length, checksum, codec, *coded)


def writer_of(header: bytes) -> str:
    """Who wrote a chunk, whatever its format version; empty: nobody that we know."""
    magic, writer = _BEGINNING.unpack_from(header) if len(header) >= _BEGINNING.size else (b"", b"")
    return writer.rstrip(b"\0").decode(errors="replace") if magic == MAGIC else ""


def checksum(payload: memoryview | bytes) -> int:
    """xxh3_64 of a payload; releases the GIL for long ones."""
    return xxhash.xxh3_64_intdigest(payload)
