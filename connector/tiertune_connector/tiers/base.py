"""The interface of a tier: a medium that holds whole chunks, by namespace and key.

Results are values. A tier never raises for what a medium can do to it: gone, full, slow, torn.
"""

import errno
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from tiertune_connector.chunk import Origin

PROBE_NAMESPACE = "0" * 32
"""For small chunks, written and read to see how a tier does."""
FLUSHED = "flush"
"""Reason for what left on command, or damaged: nothing had to make room."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
Came = Callable[[int], None]
"""Called with the number of a payload's leading bytes in place while the rest still comes, not verified yet."""


class Outcome(StrEnum):
    """What became of one operation."""

    OK = "ok"
    THERE = "there"
    """Of a write: the chunk is here already, maybe by another store, and nothing moved."""
    MISS = "miss"
    CORRUPT = "corrupt"
    """The bytes are not what was written; the chunk is removed."""
    FULL = "full"
    """No room, and nothing may leave."""
    TIMEOUT = "timeout"
    ERROR = "error"

    @property
    def kept(self) -> bool:
        """Whether the tier has the chunk after a write."""
        return self in (Outcome.OK, Outcome.THERE)


Counted = tuple[Outcome, int]
"""What became of an operation, and how many chunks it found or dropped."""
Read = tuple[Outcome, Origin]
"""What became of a read, and who wrote the chunk."""


def unheard(_: int) -> None:
    """Ignore what has come."""


@dataclass(frozen=True)
class Usage:
    """What a tier holds now; None where the medium does not tell."""

    resident_bytes: int | None
    capacity_bytes: int | None
    chunks: int | None


UNKNOWN = Usage(None, None, None)


@dataclass(frozen=True)
class Evicted:
    """A chunk that left, to be counted."""

    namespace: str
    algorithm: str
    reason: str
    used_at: float | None
    """Monotonic seconds of the last use; None where the tier does not keep it."""
    origin: Origin
    used: bool = True
    """Whether anything used it after it came."""
    key: bytes = b""
    behind: Collection[str] = ()
    """Slower tiers that were offered it; like ``key``, only for what left DRAM."""


OnEvicted = Callable[[Sequence[Evicted]], None]
"""Hears of chunks that left."""


class Tier(Protocol):
    """Thread-safe. Namespaces are digests of 32 hex characters, keys 1 to 64 opaque bytes, payloads whole chunks."""

    name: str
    """``disk`` or ``remote``."""

    @property
    def why(self) -> str:
        """What the latest failed operation met, in the medium's words; empty: nothing told."""

    def present(self, namespace: str, keys: Sequence[bytes]) -> Counted:
        """Length of the longest leading run of keys that are here."""

    def read(self, namespace: str, key: bytes, out: memoryview, came: Came = unheard) -> Read:
        """Fill ``out`` (a payload's length), verify it, return its origin; if not OK, the contents are undefined.

        A checksum in the origin is that of ``out``. ``came`` hears of pieces, in order, as they are read.
        """

    def write(self, namespace: str, key: bytes, payload: memoryview, origin: Origin) -> Outcome:
        """Keep a copy, visible only when whole. A key that is here already stays as it is.

        A checksum in the origin is the payload's, and is kept with it.
        """

    def flush(self, namespace: str | None = None, tenant: bytes | None = None) -> Counted:
        """Drop all chunks, or those of a namespace, a tenant, or both: how many; if not OK, some may be left."""

    def usage(self) -> Usage:
        """Bytes and chunks of this store in the tier.

        If the server does not tell its users apart: the bytes of all of them, and no chunks.
        """

    def close(self) -> None:
        """Give back what the tier holds in this process; chunks of a lasting medium stay."""


class OnFiles:
    """What tiers of files have in common: their answer to an operation that the system refused."""

    why = ""

    def _failed(self, error: OSError, *, wanted_room: bool = False) -> Outcome:
        self.why = str(error)
        return Outcome.FULL if wanted_room and error.errno in _FULL else Outcome.ERROR
