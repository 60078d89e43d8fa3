"""What a store keeps between runs: name, tiers, writes, namespaces, and its tuning with the keys of its changes."""

import hashlib
import json
import logging
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tiertune_connector import locks
from tiertune_connector.documents import FieldError, where
from tiertune_connector.tuning import Tuning, parse_tuning

log = logging.getLogger(__name__)
_REMEMBERED_CHANGES = 64
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
Kept = TypeVar("Kept")


class StateError(ValueError):
    """A state directory that cannot be used; the message says what to mend."""


class Served(msgspec.Struct, frozen=True):
    """What is kept of a namespace."""

    model: str
    epoch: int


class StateDir:
    """A store's state directory, locked for one process."""

    def __init__(self, directory: Path) -> None:
        """StateError if another store uses the directory, or it cannot be written."""
        try:
            self._lock = locks.own(directory)
        except BlockingIOError as error:
            told = f"{directory}: another store uses this state directory: end it, or name another"
            raise StateError(told) from error
        except OSError as error:
            raise StateError(where(error)) from error
        self._directory, self.tuning_path = directory, directory / "tuning.json"

    def name(self, configured: str) -> str:
        """The configured name, else an id that is made once and kept. StateError if what was kept is no name."""
        if configured:
            return configured
        path = self._directory / "name"
        if not path.exists():
            self.write("name", f"store-{uuid.uuid4().hex[:8]}")
        name = path.read_bytes().strip().decode(errors="replace")
        if not _NAME.fullmatch(name):  # it is a label of every metric
            raise StateError(f"{path}: {name[:64]!r} is no name of a store: remove it to have another made")
        return name

    def load(self) -> tuple[Tuning | None, dict[str, str]]:
        """The last tuning (None before the first), and by key each change's version and digest of its body.

        StateError if the file is not what a store wrote.
        """
        path = self.tuning_path
        try:
            document = json.loads(path.read_text())
            return _known(document["tuning"], path), msgspec.convert(document["changes"], dict[str, str])
        except FileNotFoundError:
            return None, {}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StateError(f"{path}: {error}: mend it, or remove it to start from the settings") from error

    def save(self, tuning: Tuning, changes: Mapping[str, str]) -> None:
        """Keep a tuning: after this returns it survives a crash."""
        self.write("tuning.json", json.dumps({"tuning": tuning.document(), "changes": dict(changes)}, indent=1))

    def tiers(self) -> list[str] | None:
        """The tiers beside DRAM that the store had in its last run; None if they were never saved, or are spoilt."""
        try:
            return (self._directory / "tiers").read_text().split()
        except (FileNotFoundError, UnicodeDecodeError):
            return None

    def save_tiers(self, tiers: Sequence[str]) -> None:
        self.note("tiers", " ".join(tiers) + "\n")

    def kept(self, name: str, kind: type[Kept]) -> Kept:
        """What was kept in a file; an empty one if it cannot be read, which must not keep a store from starting."""
        try:
            return msgspec.json.decode((self._directory / name).read_bytes(), type=kind)
        except (OSError, ValueError, RecursionError):
            return kind()

    def keep(self, name: str, what: object) -> None:
        """Have ``kept`` return ``what``, after a crash too; OSError names the file."""
        self.write(name, msgspec.json.encode(what).decode())

    def note(self, name: str, text: str) -> None:
        """As ``write``, unless the file has this text already: so a store that ran before starts on a full disk too."""
        with suppress(OSError, ValueError):
            if (self._directory / name).read_text() == text:
                return
        self.write(name, text)

    def write(self, name: str, text: str) -> None:
        """Replace a file whole or not at all; OSError names it."""
        path = self._directory / name
        try:
            directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)  # now: later none may be left
            try:
                before = path.read_bytes() if path.exists() else None
                replace_file(path, text.encode())
                try:
                    os.fsync(directory)  # the new name, too, survives a loss of power
                except OSError:
                    path.unlink() if before is None else replace_file(path, before)
                    raise
            finally:
                os.close(directory)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error

    def close(self) -> None:
        self._lock.close()


def replace_file(path: Path, data: bytes) -> None:
    """Have all of ``data`` in the file, or what it had before; OSError."""
    aside = path.with_suffix(".new")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _known(document: object, path: Path) -> Tuning:
    """A tuning without the fields of a later version: after an upgrade that was undone a store starts."""
    tuning = parse_tuning(document, extra="ignore")
    try:
        parse_tuning(document)
    except FieldError as error:
        log.warning("%s: this version leaves out what it does not know: %s", path, error)
    return tuning


def latest(changes: Mapping[str, str]) -> dict[str, str]:
    """The changes that are worth remembering: a change is repeated soon or never."""
    return dict(list(changes.items())[-_REMEMBERED_CHANGES:])


def body_digest(document: Any) -> str:  # noqa: ANN401 (JSON)
    """A digest that is the same for equal JSON documents, however they were written."""
    return hashlib.blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=16).hexdigest()
