"""A directory as the remote tier: one file per chunk, shared by several stores over any file system.

Each store bounds, and evicts, only what it wrote. The directory must exist: a missing one is a file system that is
away, not a place to be made on the local disk.
"""

import errno
import os
import re
import stat
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import xxhash

from tiertune_connector.chunk import HEADER_BYTES, NOBODY, Header, Origin, decode_header, writer_id, writer_of
from tiertune_connector.tiers.base import Came, Counted, Evicted, OnEvicted, OnFiles, Outcome, Read, Usage, unheard
from tiertune_connector.tiers.looking import Lookers

_WINDOW_BYTES = 1 << 20
"""Read, and summed while it is still in the processor's own cache."""
_SPACE, _FOLDED = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{2}")
"""Names of a namespace's folder, and of those within."""
_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Errors of a path that leads to nothing."""
_ABANDONED_S = 3600.0
"""Longer than any chunk takes to be written, and than clocks of hosts differ."""
_FOLDER, _FILE = 0o770, 0o660
"""Modes, further cut by the umask: stores of one user or group share; prompts are nobody else's."""


class DirectoryTier(OnFiles):
    """Files ``<root>/<namespace>/<2 hex>/<key>``: a header, then the payload; written aside and renamed."""

    name = "remote"

    def __init__(self, root: Path, *, writer: str, capacity_bytes: int | None = None) -> None:
        """``capacity_bytes`` bounds what ``writer`` holds here, least recently used out first; None: no bound."""
        self._root = root
        self._writer = writer_id(writer)
        self._run = uuid.uuid4().hex
        self._capacity = capacity_bytes
        self._lookers = Lookers()
        self._lock = threading.Lock()
        self._finding = threading.Lock()
        self._found = False  # the own files are looked for on first use: the directory may be away at start
        self._unread = list[Path]()  # of these nobody knows yet whose they are
        self._own: OrderedDict[Path, int] = OrderedDict()
        self._own_bytes = 0  # includes what is being written
        self._unsynced = set[Path]()  # folders that a flush removed something from
        self.on_evicted: OnEvicted = lambda _: None

    def present(self, namespace: str, keys: Sequence[bytes]) -> Counted:
        try:
            self._check()
            return Outcome.OK, self._lookers.leading(lambda key: _mode(self._path(namespace, key)), keys)
        except OSError as error:
            return self._failed(error), 0

    def read(self, namespace: str, key: bytes, out: memoryview, came: Came = unheard) -> Read:
        path = self._path(namespace, key)
        try:
            header, digest = _fill(path, out, came)
        except FileNotFoundError:
            return self._missed(path), NOBODY
        except OSError as error:
            return self._failed(error), NOBODY
        asked = namespace, key, len(out), digest
        if header is None or (header.namespace, header.key, header.length, header.checksum) != asked:
            with suppress(OSError):  # another user's, where we may not write
                if not self._remove(path):  # a concurrent reader found it damaged, and says so
                    return Outcome.MISS, NOBODY
            return Outcome.CORRUPT, NOBODY
        with self._lock:
            if header.origin.writer != self._writer:  # ours was flushed, and another store wrote it again
                self._disown(path)
            elif path in self._own:
                self._own.move_to_end(path)
        return Outcome.OK, header.origin

    def write(self, namespace: str, key: bytes, payload: memoryview, origin: Origin) -> Outcome:
        path = self._path(namespace, key)
        size = HEADER_BYTES + len(payload)
        try:
            self._check()
            if _mode(path):
                return Outcome.THERE
            if not self._take_room(size):
                return Outcome.FULL
            self._write_aside(path, Header.of(namespace, key, payload, replace(origin, writer=self._writer)), payload)
        except OSError as error:
            return self._failed(error, wanted_room=True)
        with self._lock:
            self._disown(path)  # another thread wrote the same key meanwhile
            self._own[path] = size
        return Outcome.OK

    def flush(self, namespace: str | None = None, tenant: bytes | None = None) -> Counted:
        outcome, count = Outcome.OK, 0
        try:
            self._check()
            self._find_own()  # else what is found meanwhile would still count when gone
            found = set(self._files(namespace))
            for path in found:
                if (
                    tenant is None
                    or (header := decode_header(_beginning(path))) is None
                    or header.origin.tenant == tenant
                ):
                    self._unsynced.update((path.parent, path.parent.parent, self._root))
                    try:
                        count += self._remove(path)
                    except OSError as error:  # the others leave all the same
                        outcome = self._failed(error)
                        self._check()
            with self._lock:
                unseen = [path for path in self._own if path not in found and namespace in (None, path.parts[-3])]
            self._forget_gone(unseen)
            if tenant is None:
                self._remove_abandoned(namespace)
            for folder in list(self._unsynced):
                _sync(folder)
                self._unsynced.discard(folder)
        except OSError as error:
            return self._failed(error), count
        return outcome, count

    def usage(self) -> Usage:
        with suppress(OSError):
            self._find_own()
        with self._lock:
            return self.known or Usage(None, self._capacity, None)

    @property
    def known(self) -> Usage | None:
        """``usage`` without looking at the directory, which may be slow or away; None before the first look."""
        return Usage(self._own_bytes, self._capacity, len(self._own)) if self._found else None

    def close(self) -> None:
        """Files are opened for one operation only."""
        self._lookers.shutdown(wait=False, cancel_futures=True)

    def _check(self) -> None:
        """OSError if the root is missing, or is no directory."""
        if not stat.S_ISDIR(_mode(self._root)):
            raise FileNotFoundError(errno.ENOENT, "there is no such directory", str(self._root))

    def _path(self, namespace: str, key: bytes) -> Path:
        name = key.hex()
        return self._root / namespace / name[-2:] / name

    def _files(self, namespace: str | None = None, *, half: bool = False, own: bool = False) -> Iterator[Path]:
        """Chunks of one or all namespaces, whole or ``half`` written; all else in the directory is not a store's.

        ``own``: this store's are looked for, so not in folders that it may not read. OSError, but not if a folder has
        just gone.
        """
        passed = (FileNotFoundError, NotADirectoryError, *([PermissionError] if own else []))
        for space in [self._root / namespace] if namespace else _listed(self._root, passed):
            for folder in _listed(space, passed) if _SPACE.fullmatch(space.name) else ():
                for path in _listed(folder, passed) if _FOLDED.fullmatch(folder.name) else ():
                    if path.name.count(".") == (3 if half else 0) and stat.S_ISREG(_mode(path)):
                        yield path

    def _remove_abandoned(self, namespace: str | None) -> None:
        """Remove what stores left half written that never started again."""
        before = time.time() - _ABANDONED_S
        for path in self._files(namespace, half=True):
            with suppress(FileNotFoundError):  # whole by now, or removed by another store
                if path.stat().st_mtime < before:
                    self._remove(path)

    def _find_own(self) -> None:
        """Take up what this store wrote in earlier runs, and remove what it did not finish.

        That may take long, but holds up no reader. Of what could not be read then, each later call looks at one file.
        """
        with self._finding:
            if self._found:
                again, self._unread = self._unread[:1], self._unread[1:]
                self._unread += self._take_up(again)
            if self._found or not stat.S_ISDIR(_mode(self._root)):
                return
            for path in self._files(half=True, own=True):
                if f".{self._writer.encode().hex()}." in path.name and self._run not in path.name:
                    self._remove(path)
            self._unread = self._take_up(self._files(own=True))
            self._found = True

    def _take_up(self, paths: Iterable[Path]) -> list[Path]:
        """Count the files that this store wrote, least recently used first; returns those that cannot be read now."""
        found, unread = list[tuple[float, int, Path]](), list[Path]()
        for path in paths:
            try:
                if writer_of(_header(path)) == self._writer:
                    told = path.stat()
                    found.append((told.st_mtime, told.st_size, path))
            except (FileNotFoundError, PermissionError):  # another store removed it meanwhile, or keeps it to itself
                continue
            except OSError:
                unread.append(path)
        with self._lock:
            for _, size, path in sorted(found):
                self._disown(path)  # written again meanwhile
                self._own[path] = size
                self._own_bytes += size
        return unread

    def _remove(self, path: Path) -> bool:
        """Remove a file, and its folders with their last one; False if it is gone already.

        OSError: an own file still counts, and is now last to leave.
        """
        removed = True
        with self._lock:
            size = self._own.pop(path, 0)
        try:
            path.unlink()
        except FileNotFoundError:
            removed = False
        except OSError:
            with self._lock:
                if size:
                    self._own[path] = size
            raise
        with self._lock:
            self._own_bytes -= size
        self._remove_empty(path)
        return removed

    def _remove_empty(self, path: Path) -> None:
        """Remove the folders that a file was the last in."""
        with suppress(OSError):  # mostly others are in there
            for folder in path.relative_to(self._root).parents[:-1]:  # never the root
                (self._root / folder).rmdir()

    def _missed(self, path: Path) -> Outcome:
        """The outcome when a file is not there."""
        try:
            self._check()
            self._forget_gone([path])
        except OSError as error:
            return self._failed(error)
        return Outcome.MISS

    def _forget_gone(self, paths: Iterable[Path]) -> None:
        """Stop counting own files that another store removed; OSError."""
        for path in paths:
            with self._lock:
                if path in self._own and not _mode(path):
                    self._disown(path)

    def _disown(self, path: Path) -> None:
        """Count a file no longer; call with the lock held."""
        self._own_bytes -= self._own.pop(path, 0)

    def _take_room(self, size: int) -> bool:
        """Remove own files until one of ``size`` bytes fits; False if it does not. OSError."""
        if self._capacity is not None and size > self._capacity:
            return False  # even if all of them left
        self._find_own()
        if self._capacity is None:  # whoever keeps the directory small tells nobody: two are looked for, in turns
            with self._lock:
                looked_for = list(islice(self._own, 2))
                for path in looked_for:
                    self._own.move_to_end(path)
            self._forget_gone(looked_for)
        while True:
            with self._lock:
                if self._capacity is None or self._own_bytes + size <= self._capacity:
                    self._own_bytes += size
                    return True
                victim = next(iter(self._own), None)
            if victim is None:
                return False
            if writer_of(_beginning(victim)) not in (self._writer, ""):
                with self._lock:  # as in ``read``: it is that store's to remove
                    self._disown(victim)
            elif self._remove(victim):
                self.on_evicted([Evicted(victim.parent.parent.name, "lru", "room", None, NOBODY)])

    def _write_aside(self, path: Path, header: Header, payload: memoryview) -> None:
        """Write a file whole; OSError, and the room taken for it is given back."""
        aside = path.with_name(f".{path.name}.{self._writer.encode().hex()}.{self._run}-{threading.get_ident()}")
        try:
            with os.fdopen(_created(aside), "wb", buffering=0) as file:
                file.write(header.encode())
                done = 0
                while done < len(payload):
                    done += file.write(payload[done:])
            aside.replace(path)
        except OSError:
            with suppress(OSError):  # the first error tells more
                aside.unlink(missing_ok=True)
            self._remove_empty(aside)
            with self._lock:
                self._own_bytes -= HEADER_BYTES + header.length
            raise


def _created(path: Path, tries: int = 3) -> int:
    """A file's descriptor, in folders that are made if missing. OSError."""
    try:
        for folder in (path.parent.parent, path.parent):  # each with its mode, and never the root
            folder.mkdir(_FOLDER, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _FILE)
    except (FileNotFoundError, FileExistsError):  # whoever emptied a folder meanwhile has removed it
        if tries == 1:
            raise
        return _created(path, tries - 1)


def _mode(path: Path) -> int:
    """What there is, as `stat` has it, or 0. OSError if nobody can tell: `Path.exists` may say no."""
    try:
        return path.stat().st_mode
    except OSError as error:
        if error.errno not in _NOTHING:
            raise
        return 0


def _sync(folder: Path) -> None:
    """Have what left a folder stay away over a loss of power, too, where its file system can do that. OSError."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # gone itself; or a root that nobody may list
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _listed(folder: Path, passed: tuple[type[OSError], ...]) -> list[Path]:
    """What is in a folder; nothing where one of the errors ``passed`` over keeps it from being read. OSError."""
    try:
        with os.scandir(folder) as entries:
            return [Path(entry) for entry in entries]
    except passed:
        return []


def _fill(path: Path, out: memoryview, came: Came) -> tuple[Header | None, int | None]:
    """Read a file: header, and the `checksum` of ``out``; None if the file ends before. FileNotFoundError, OSError."""
    digest, done = xxhash.xxh3_64(), 0
    with path.open("rb", buffering=0) as file:
        header = decode_header(file.read(HEADER_BYTES) or b"")
        while done < len(out) and (count := file.readinto(out[done : done + _WINDOW_BYTES])):
            digest.update(out[done : done + count])
            done += count
            came(done)
    return header, digest.intdigest() if done == len(out) else None


def _header(path: Path) -> bytes:
    """The beginning of a file, where the header is. OSError."""
    with path.open("rb", buffering=0) as file:
        return file.read(HEADER_BYTES) or b""


def _beginning(path: Path) -> bytes:
    """The same; empty if it cannot be read."""
    try:
        return _header(path)
    except OSError:
        return b""
