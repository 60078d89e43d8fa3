"""Locks on files: the kernel ends them with the last process that has them, however that ends."""

import fcntl
import os
import time
from pathlib import Path
from typing import IO

_POLL_S = 0.01


def own(path: Path) -> IO[str]:
    """The file, made if it is missing, locked until it is closed.

    BlockingIOError if another process has it; OSError, with the path, if there can be no such lock.
    """
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(file.fileno()).st_nlink:  # who had it has removed it: the next one would lock a new file
            raise BlockingIOError
    except OSError as error:
        file.close()
        error.filename = str(path)
        raise
    return file


def had(descriptor: int, *, patience_s: float, shared: bool = False) -> bool:
    """Whether the open file, or folder, could be locked within ``patience_s``."""
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
