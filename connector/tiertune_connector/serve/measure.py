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
    read_s: float = 0.0
    write_s: float = 0.0

    @property
    def read_bytes_per_s(self) -> float:
        """Beyond the latency."""
        return CHUNK_BYTES / max(self.read_s - self.latency_s, 1e-9) if self.read_s else 0.0

    @property
    def write_bytes_per_s(self) -> float:
        return CHUNK_BYTES / self.write_s if self.write_s else 0.0


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
    namespace, tier = uuid.uuid4().hex, wrap(remote_tier(settings, "doctor", Counters()))
    folder = settings.path / namespace if settings.path is not None else None
    try:
        times = _Trial(tier, namespace, clock, step).run(folder)
    except _FailedError as failed:
        return StorageTimes(name, str(failed))
    finally:
        outcome, _ = tier.flush(namespace)
        tier.close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    left = "" if outcome is Outcome.OK else f"remove: {outcome}, chunks of namespace {namespace} may be left"
    return StorageTimes(name, left, **times)


@dataclass(eq=False)
class _Trial:
    """Operations on one namespace's chunks: seconds of each, _FailedError if one is not OK."""

    tier: Tier
    namespace: str
    clock: Clock
    step: Callable[[], object]

    def run(self, folder: Path | None) -> dict[str, float]:
        """``folder`` is where a directory keeps the chunks."""
        large, small = bytearray(os.urandom(CHUNK_BYTES)), bytearray(os.urandom(SMALL_BYTES))
        of_large, of_small = ([b"%s%d" % (name, number) for number in range(CHUNKS)] for name in (b"large", b"small"))
        self._write(b"first", small)  # connects
        written = [self._write(key, large) for key in of_large]
        for key in of_small:
            self._write(key, small)
        if folder is not None:
            _forget(folder)
        both = [
            (self._read(one, small), self._read(other, large)) for one, other in zip(of_small, of_large, strict=True)
        ]
        return {
            "latency_s": median(latency_s for latency_s, _ in both),
            "read_s": median(read_s for _, read_s in both),
            "write_s": median(written),
        }

    def _write(self, key: bytes, payload: bytearray) -> float:
        return self._took("write", lambda: self.tier.write(self.namespace, key, memoryview(payload), NOBODY))

    def _read(self, key: bytes, out: bytearray) -> float:
        return self._took("read", lambda: self.tier.read(self.namespace, key, memoryview(out))[0])

    def _took(self, what: str, operation: Callable[[], Outcome]) -> float:
        started, outcome = self.clock(), operation()
        took = self.clock() - started
        self.step()
        if not outcome.kept:
            why = self.tier.why if outcome is Outcome.ERROR else ""
            raise _FailedError(f"{what}: {outcome}" + (f": {why}" if why else ""))
        return took


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
