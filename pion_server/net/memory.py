"""How the C library is asked to keep the memory of blocks that were freed."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

# From glibc's malloc.h; its mallopt(3) says what they do.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# The largest threshold that malloc takes. Larger blocks are mapped one by one, with huge pages.
MAPPED_FROM = 32 << 20
# What may stay with the process for the next blocks.
KEPT = 256 << 20


def reuse_freed_blocks() -> None:
    """Let blocks of up to MAPPED_FROM bytes come from memory that was used before.

    A server at its memory limit frees a block for each one that it takes. By default glibc hands
    such memory back to the kernel at once, and gets zeroed pages for the next block: for 2 MB that
    takes longer than receiving it. Elsewhere than on glibc this does nothing.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, MAPPED_FROM)
        mallopt(M_TRIM_THRESHOLD, KEPT)
