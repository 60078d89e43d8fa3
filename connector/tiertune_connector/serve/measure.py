"""Measures a storage: writes, reads and removes a few chunks, through the tier that a store would use there.

For ``tiertune doctor --storage``. What is written has a namespace of its own, and is removed afterwards.
"""

import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from pydantic import ValidationError

from tiertune_connector.addresses import listed
from tiertune_connector.chunk import NOBODY
from tiertune_connector.codec import Codec
from tiertune_connector.counters import Counters
from tiertune_connector.documents import DocumentError
from tiertune_connector.serve.main import remote_tier
from tiertune_connector.settings import RemoteSettings
from tiertune_connector.tiers.base import Outcome, Tier
from tiertune_connector.units import Clock

TIMEOUT_S = 10.0
"""Longer than a store would wait, to measure what is slow."""
SMALL_BYTES = 4096
"""Size of chunks whose time is latency: they move nearly nothing."""
CHUNK_BYTES, CHUNKS = 8 << 20, 8
"""Size and number of those whose time is bandwidth."""
OPERATIONS = 1 + 4 * CHUNKS
"""How many a measurement does if none fails: it connects, then writes and reads each chunk of either size."""


@dataclass(frozen=True)
class StorageTimes:
    """Medians over the chunks, one operation at a time; 0 if ``problem`` says what failed."""

    storage: str
    problem: str = ""
    """Which operation failed, and how; empty: none."""
    latency_s: float = 0.0
    """To read a small chunk."""
    bytes_per_s: float = 0.0
    """Reading, beyond the latency."""
    write_bytes_per_s: float = 0.0


def storage(url: str, like: RemoteSettings | None) -> RemoteSettings:
    """The settings of a storage, with password and TLS files of ``like``. DocumentError if ``url`` is none."""
    login = like.model_dump(include={"password_file", "sentinel_password_file", "tls"}) if like else {}
    try:
        return RemoteSettings(url=url, timeout=TIMEOUT_S, **login)
    except ValidationError as error:
        problems = [problem["msg"].removeprefix("Value error, ") for problem in error.errors()]
        raise DocumentError([f"--storage: {problem}" for problem in problems]) from None


class _FailedError(Exception):
    """An operation did not do what it should."""


def measure(
    settings: RemoteSettings,
    *,
    clock: Clock = time.perf_counter,
    wrap: Callable[[Tier], Tier] = lambda tier: tier,
    step: Callable[[], object] = lambda: None,
) -> StorageTimes:
    """Measure a storage. DocumentError if a password or certificate cannot be read.

    What was written is removed, whatever fails before. ``wrap`` may put something around the tier; ``step`` is called
    after each of its ``OPERATIONS``.
    """
    name = ", ".join(listed(settings.url))
    counters, namespace = Counters(), uuid.uuid4().hex
    tier = wrap(remote_tier(settings, "doctor", counters, Codec(clock, counters)))
    folder = settings.path / namespace if settings.path is not None else None

    def took(what: str, key: bytes, data: bytearray) -> float:
        """Seconds of an operation; _FailedError if it did not do what it should."""
        started = clock()
        if what == "write":
            outcome = tier.write(namespace, key, memoryview(data), NOBODY)
        else:
            outcome, _ = tier.read(namespace, key, memoryview(data))
        seconds = clock() - started
        step()
        if not outcome.kept:
            why = tier.why if outcome is Outcome.ERROR else ""
            raise _FailedError(f"{what}: {outcome}" + (f": {why}" if why else ""))
        return seconds

    try:
        latency_s, read_s, write_s = _medians(took, folder)
    except _FailedError as failed:
        return StorageTimes(name, str(failed))
    finally:
        outcome, _ = tier.flush(namespace)
        tier.close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    left = "" if outcome is Outcome.OK else f"remove: {outcome}, chunks of namespace {namespace} may be left"
    return StorageTimes(name, left, latency_s, CHUNK_BYTES / max(read_s - latency_s, 1e-9), CHUNK_BYTES / write_s)


def _medians(took: Callable[[str, bytes, bytearray], float], folder: Path | None) -> tuple[float, float, float]:
    """Seconds to read a small chunk, to read and to write a large one; a directory keeps them in ``folder``."""
    large, small = bytearray(os.urandom(CHUNK_BYTES)), bytearray(os.urandom(SMALL_BYTES))
    took("write", b"first", small)  # connects
    written = [took("write", b"large%d" % number, large) for number in range(CHUNKS)]
    for number in range(CHUNKS):
        took("write", b"small%d" % number, small)
    if folder is not None:
        _forget(folder)
    both = [
        (took("read", b"small%d" % number, small), took("read", b"large%d" % number, large)) for number in range(CHUNKS)
    ]
    of_small, of_large = zip(*both, strict=True)
    return median(of_small), median(of_large), median(written)


def _forget(folder: Path) -> None:
    """Drop files from this host's page cache: else its memory would be measured, not the storage."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                with suppress(OSError):
                    os.fsync(descriptor)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
