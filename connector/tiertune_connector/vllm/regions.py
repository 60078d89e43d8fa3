"""Files of staging: those that a crash left are removed, and ranks leave word in theirs. Imports no vLLM.

Every rank holds a lock on its region's file as long as it lives. The kernel releases the lock with the last process
that has it, however that process ends, and in whatever container. So a file that can be locked is nobody's. Only files
whose name says that an engine with TierTune made them are looked at: vLLM's own offloading takes no such lock.
"""

import fcntl
import hashlib
import logging
import os
import re
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tiertune_connector import locks
from tiertune_connector.vllm.probes import UnsupportedError

logger = logging.getLogger(f"vllm.{__name__}")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (where vLLM has its regions)
MARK = "tiertune-"
PATTERN = f"vllm_offload_{MARK}*.mmap"
NOTE_BYTES, NOTES_AT = 16, 64
"""Of a rank's word; behind the first byte of a page, with which vLLM may fault it in for all ranks at a time."""
MAKING_S = 5.0
"""How long to wait for another engine's sweep, which takes far less, before going on all the same."""


def engine_id(own: str, row_bytes: int) -> str:
    """The id in the name of the region's file: it says that TierTune made it, and keeps ranks with other rows out."""
    return f"{MARK}{own}-{row_bytes}"


def held(own: str) -> list[Path]:
    """This user's regions of an engine that its ranks hold: more than one if their rows differ in size."""
    name = re.compile(rf"vllm_offload_{MARK}{re.escape(own)}-\d+\.mmap")
    ours = (path for path in SHARED_MEMORY.glob(PATTERN) if name.fullmatch(path.name) and _is_ours(path))
    return [path for path in ours if not _is_free(path)]


def hold(descriptor: int, rank: int) -> None:
    """Hold the region whose file is open as ``descriptor``, as a rank of its engine, until that is closed.

    PermissionError if another user made the file before this engine could, and so could read all that goes through it.
    UnsupportedError if another engine with the same id holds it as that rank: both would write into the same rows.
    """
    path = Path(f"/proc/self/fd/{descriptor}").readlink()
    if os.fstat(descriptor).st_uid != os.getuid():
        raise PermissionError(f"TierTune: {path}, for staging, is another user's: remove it, or use another engine_id")
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:  # a lock of the open file: a process would lose its own whenever it closes the file elsewhere
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0))
    except BlockingIOError:
        raise UnsupportedError(
            f"TierTune: {path}, for staging, is that of another engine on this host which starts with the same"
            " engine_id: give each its own, or leave it out"
        ) from None
    except OSError:  # a kernel without such locks, as of a sandbox
        pass


def note(descriptor: int, rank: int, told: str) -> None:
    """Leave word to the engine's scheduler in the new region that is open as ``descriptor``: its rows are free yet."""
    word = hashlib.blake2b(told.encode(), digest_size=NOTE_BYTES).digest()
    os.pwrite(descriptor, word, NOTES_AT + rank * NOTE_BYTES)


def notes(own: str, ranks: int) -> list[str]:
    """A digest of the word that each rank of an engine left, "" for none; nothing at all if they have no region."""
    for path in held(own):
        with suppress(OSError), path.open("rb") as file:
            file.seek(NOTES_AT)
            return [word.hex() if any(word := file.read(NOTE_BYTES)) else "" for _ in range(ranks)]
        return [""] * ranks
    return []


def sweep() -> list[Path]:
    """Remove this user's regions that nobody holds, and return them; none while another engine makes its own."""
    with _locked(SHARED_MEMORY) as had:
        stale = [path for path in SHARED_MEMORY.glob(PATTERN) if had and _is_ours(path) and _is_free(path)]
        for path in stale:
            logger.info("TierTune: removing %s, which a dead engine left", path)
            for part in (path, *SHARED_MEMORY.glob(f"{path.name}.*")):  # 0.33 may cut a region into several files
                with suppress(OSError):  # gone meanwhile, or somebody else's
                    part.unlink()
    return stale


@contextmanager
def making() -> Iterator[None]:
    """Keep sweeps away while a region is made: its file exists before anybody holds it."""
    with _locked(SHARED_MEMORY, patience_s=MAKING_S, shared=True):
        yield


def _is_ours(path: Path) -> bool:
    with suppress(OSError):  # gone meanwhile
        return path.lstat().st_uid == os.getuid()
    return False


def _is_free(path: Path) -> bool:
    """Whether nobody holds it; where that cannot be told somebody does."""
    with _locked(path) as had:
        return had


@contextmanager
def _locked(path: Path, *, patience_s: float = 0.0, shared: bool = False) -> Iterator[bool]:
    """Lock a file, or a folder itself, which leaves nothing behind; yields whether the lock was had in time.

    If nothing can be opened or locked it was not had: an engine starts all the same.
    """
    had = False
    with ExitStack() as undo:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            undo.callback(os.close, descriptor)
            had = locks.had(descriptor, patience_s=patience_s, shared=shared)
        yield had
