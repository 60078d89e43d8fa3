"""Two Linux calls that the standard library lacks, or makes while it holds the GIL."""

import ctypes

_PUNCH_HOLE = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def punch_hole(fd: int, offset: int, length: int) -> bool:
    """Give back a range of a file, which then reads as zeros; False where the file system cannot."""
    return bool(_libc.fallocate(fd, _PUNCH_HOLE, offset, length) == 0)


def populate(address: int, length: int) -> bool:
    """Fill the page tables of mapped memory, both page-aligned; False on a kernel that cannot."""
    return bool(_libc.madvise(address, length, _POPULATE_WRITE) == 0)
