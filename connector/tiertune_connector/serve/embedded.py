"""A store started by the first engine that finds none, and shared by all engines of this user on the host.

It is a process of its own (not even a child: engines end their children), and ends by itself after a while without
engines. A file lock beside the socket keeps starting and ending apart.
"""

import json
import logging
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tiertune_connector import locks
from tiertune_connector.state import replace_file
from tiertune_connector.tiers.linux import most_memory

if TYPE_CHECKING:
    from tiertune_connector.documents import Json

logger = logging.getLogger(f"vllm.{__name__}")
IDLE_EXIT_S = 60.0
MOST_DRAM_BYTES = 4 * 2**30
MOST_DRAM_SHARE = 4
"""One part in so many of the host's memory."""
SEGMENT_BYTES = 64 * 2**20
START_S = 20.0
"""Longest wait for a store to start; engines go on trying to connect."""
MOST_LOG_BYTES = 1 << 20
"""A longer log begins anew with the next store."""
_POLL_S = 0.02
_LOG_TAIL_BYTES = 2000
_DETACHED = '"$@" </dev/null >>store.log 2>&1 &'
"""For sh, so that the store's parent is gone at once."""


class NotOursError(OSError):
    """A directory where somebody else could put things."""


def runtime_dir() -> Path:
    """Where this user's store runs: in $XDG_RUNTIME_DIR, else in the folder for temporary files."""
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(base) / "tiertune"
    return Path(tempfile.gettempdir()) / f"tiertune-{os.getuid()}"


def default_socket() -> Path:
    return runtime_dir() / "store.sock"


def owner(path: Path) -> int | None:
    """The only user who may listen on the socket ``path``: this one for its embedded store's; None: anybody."""
    return os.getuid() if path.parent == runtime_dir() else None


def default_dram_bytes() -> int:
    """4 GiB, but at most a quarter of what the host and our control groups let a store have."""
    return min(MOST_DRAM_BYTES, most_memory() // MOST_DRAM_SHARE)


def lock_path(path: Path) -> Path:
    """The lock file beside a store's socket for starting and ending; its time tells when one was last asked for."""
    return path.with_name(path.name + ".lock")


def last_asked(path: Path) -> int:
    """A number that changes whenever an engine asks for a store on the socket ``path``; 0 if no lock can be there."""
    lock = lock_path(path)
    with suppress(OSError):  # its folder is gone, or takes no file
        if not lock.exists():  # folders for temporary files get cleaned
            lock.touch()
        return lock.stat().st_mtime_ns
    return 0


@contextmanager
def turn(path: Path, patience_s: float) -> Iterator[bool]:
    """Take the lock of the socket ``path`` until the block ends; whether it was had within ``patience_s``.

    If no lock can be there, nobody else takes turns.
    """
    try:
        lock = lock_path(path).open("a")
    except OSError:
        yield True
        return
    with lock:
        yield locks.had(lock.fileno(), patience_s=patience_s)


def ensure(path: Path, *, dram_bytes: int) -> bool:
    """Start a store on the socket ``path`` if nobody answers there; returns whether somebody does at the end.

    Waits at most `START_S` for a store that starts. A failure is logged, with the store's own last words. The
    store's state and log go beside the socket. With ``dram_bytes`` 0, none is started.
    """
    if dram_bytes <= 0:
        return answers(path)
    try:
        _make_private(path.parent, ours=owner(path) is not None)
        with turn(path, START_S) as had:
            os.utime(lock_path(path))  # a store about to end for want of clients stays
            return answers(path) or (had and _start(path, dram_bytes))
    except (OSError, subprocess.SubprocessError) as error:  # the latter if the shell has no process to start it in
        logger.warning("TierTune: no store could be started at %s: %s", path, error)
        return False


def answers(path: Path) -> bool:
    """Whether somebody listens on the unix socket ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (BlockingIOError, TimeoutError):  # its backlog is full
            return True
        except OSError:
            return False
        return True


def _start(path: Path, dram_bytes: int) -> bool:
    state_dir = path.with_name(path.name + ".state")
    _make_private(state_dir, ours=True)
    config = _configure(path, dram_bytes, state_dir)
    log = state_dir / "store.log"
    log.touch()
    if log.stat().st_size > MOST_LOG_BYTES:
        log.replace(log.with_name("store.log.old"))
        log.touch()
    said_before = log.stat().st_size
    logger.info("TierTune: no store listens on %s; one is started, with its log in %s", path, log)
    command = [sys.executable, "-m", "tiertune_connector.serve", str(config)]
    shell = ["/bin/sh", "-c", _DETACHED, "sh"]
    subprocess.run([*shell, *command], cwd=state_dir, check=True, start_new_session=True)  # noqa: S603
    deadline = time.monotonic() + START_S
    while not answers(path):
        said = log.read_bytes()[said_before:][-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        if time.monotonic() > deadline or "cannot start" in said:
            logger.warning("TierTune: the store that was started does not answer: %s", said or "it said nothing")
            return False
        time.sleep(_POLL_S)
    return True


def _configure(path: Path, dram_bytes: int, state_dir: Path) -> Path:
    """Write the store's settings; a size other than last time's overrides what was tuned since."""
    document: Json = {
        "socket": str(path.absolute()),
        "state_dir": str(state_dir.absolute()),
        "http": {"port": 0},
        "dram": {"capacity": dram_bytes, "segment": min(SEGMENT_BYTES, dram_bytes)},
        "idle_exit": IDLE_EXIT_S,
    }
    config = state_dir.absolute() / "store.yaml"
    before = document["dram"]
    with suppress(OSError, ValueError, KeyError, TypeError):  # there is none, or it is spoilt
        before = json.loads(config.read_text())["dram"]
    if before != document["dram"]:
        (state_dir / "tuning.json").unlink(missing_ok=True)
    replace_file(config, json.dumps(document, indent=1).encode())  # JSON is YAML too
    return config


def _make_private(folder: Path, *, ours: bool) -> None:
    """Make ``folder`` if missing; NotOursError if it should be ours alone, and is not."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if ours and not (stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077):
        raise NotOursError(f"{folder} is not a directory of this user's alone: remove it, or name another socket")
