"""Locks on files: the kernel releases them when their last holder ends, however it ends."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_POLL_S = 0.01


def own(folder: Path) -> IO[str]:
    """Take the folder's lock, held until the returned file is closed; both are made if they are missing.

    BlockingIOError if another process has it; OSError, with the path, if the folder or the lock cannot be made.
    """
    path = folder / "lock"
    with _making("no folder can be made there"):
        folder.mkdir(0o700, parents=True, exist_ok=True)  # else anybody could hold its lock
    with _making("no file can be written there"):
        file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(file.fileno()).st_nlink:  # its holder has removed it: the next process would lock a new file
            raise BlockingIOError
    except OSError as error:
        file.close()
        error.filename = str(path)
        raise
    return file


@contextmanager
def _making(failure: str) -> Iterator[None]:
    """Add ``failure`` to the system's reason, which alone reads as if something were only missing."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        error.strerror = f"{error.strerror}: {failure}"
        raise


def had(descriptor: int, *, patience_s: float, shared: bool = False) -> bool:
    """Lock an open file, or folder; returns whether that succeeded within ``patience_s``."""
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True
