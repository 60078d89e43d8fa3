"""A directory as the remote tier: one file a chunk, shared by several stores over any file system.

Each store bounds, and removes, only what it wrote.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from tiertune_connector.chunk import HEADER_BYTES, NOBODY, Header, Origin, checksum, decode_header
from tiertune_connector.tiers.base import Outcome, Usage


class DirectoryTier:
    """Files ``<root>/<namespace>/<2 hex>/<key>``: a header, then the payload; written aside and renamed."""

    name = "remote"

    def __init__(self, root: Path, *, writer: str, capacity_bytes: int | None = None) -> None:
        """``capacity_bytes`` bounds what ``writer`` holds here, oldest use out first; None is no bound."""
        self._root = root
        self._writer = writer
        self._capacity = capacity_bytes
        self._lock = threading.Lock()
        self._own: OrderedDict[Path, int] | None = None  # found on first use: the directory may be away at start

    def present(self, namespace: str, keys: Sequence[bytes]) -> tuple[Outcome, int]:
        if not self._root.is_dir():
            return Outcome.ERROR, 0
        missing = (i for i, key in enumerate(keys) if not self._path(namespace, key).exists())
        return Outcome.OK, next(missing, len(keys))

    def read(self, namespace: str, key: bytes, out: memoryview) -> tuple[Outcome, Origin]:
        path = self._path(namespace, key)
        try:
            with path.open("rb", buffering=0) as file:
                header = decode_header(file.read(HEADER_BYTES) or b"")
                done = 0
                while done < len(out) and (count := file.readinto(out[done:])):
                    done += count
        except FileNotFoundError:
            return (Outcome.MISS if self._root.is_dir() else Outcome.ERROR), NOBODY
        except OSError:
            return Outcome.ERROR, NOBODY
        whole = header is not None and (header.namespace, header.key) == (namespace, key)
        if not whole or header is None or done != header.length or checksum(out) != header.checksum:
            path.unlink(missing_ok=True)
            return Outcome.CORRUPT, NOBODY
        self._touch(path)
        return Outcome.OK, header.origin

    def write(self, namespace: str, key: bytes, payload: memoryview, origin: Origin) -> Outcome:
        path = self._path(namespace, key)
        size = HEADER_BYTES + len(payload)
        try:
            if path.exists():
                return Outcome.OK
            if not self._make_room(size):
                return Outcome.FULL
            path.parent.mkdir(parents=True, exist_ok=True)
            header = Header(namespace, key, Origin(self._writer, origin.tenant), len(payload), checksum(payload))
            self._write_aside(path, header, payload)
        except OSError:
            return Outcome.ERROR
        with self._lock:
            self._owned()[path] = size
        return Outcome.OK

    def flush(self, namespace: str | None = None, tenant: bytes | None = None) -> int:
        count = 0
        for path in list(self._files(namespace)):
            if tenant is not None and (header := _header_of(path)) is not None and header.origin.tenant != tenant:
                continue
            try:
                path.unlink()
            except OSError:
                continue
            count += 1
            with self._lock:
                self._owned().pop(path, None)
        return count

    def usage(self) -> Usage:
        with self._lock:
            own = self._owned()
            return Usage(sum(own.values()), self._capacity, len(own))

    def close(self) -> None:
        """Files are opened for one operation only."""

    def _path(self, namespace: str, key: bytes) -> Path:
        name = key.hex()
        return self._root / namespace / name[-2:] / name

    def _files(self, namespace: str | None = None) -> Iterator[Path]:
        root = self._root / namespace if namespace else self._root
        return (path for path in root.rglob("*") if path.is_file() and not path.name.startswith("."))

    def _owned(self) -> OrderedDict[Path, int]:
        if self._own is None:
            if not self._root.is_dir():
                return OrderedDict()
            mine = [p for p in self._files() if (h := _header_of(p)) and h.origin.writer.encode() == self._me()]
            self._own = OrderedDict((path, path.stat().st_size) for path in sorted(mine, key=_used))
        return self._own

    def _me(self) -> bytes:
        return self._writer.encode()[:16]

    def _touch(self, path: Path) -> None:
        with self._lock:
            own = self._owned()
            if path in own:
                own.move_to_end(path)

    def _make_room(self, size: int) -> bool:
        if self._capacity is None:
            return True
        with self._lock:
            own = self._owned()
            while own and sum(own.values()) + size > self._capacity:
                victim, _ = own.popitem(last=False)
                victim.unlink(missing_ok=True)
            return sum(own.values()) + size <= self._capacity

    def _write_aside(self, path: Path, header: Header, payload: memoryview) -> None:
        aside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            with aside.open("wb", buffering=0) as file:
                file.write(header.encode())
                done = 0
                while done < len(payload):
                    done += file.write(payload[done:])
            aside.replace(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise


def _header_of(path: Path) -> Header | None:
    try:
        with path.open("rb", buffering=0) as file:
            return decode_header(file.read(HEADER_BYTES) or b"")
    except OSError:
        return None


def _used(path: Path) -> float:
    return path.stat().st_mtime
