"""How the memory of blocks that were freed is kept for the next ones."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

from pion_server.wire.blocks import BLOCKS

# From glibc's malloc.h; its mallopt(3) says what they do.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MOST = 32 << 20  # malloc takes no higher threshold
# What may stay with the process for the next blocks, of malloc's and of larger ones each.
KEPT = 256 << 20


def reuse_freed_blocks() -> None:
    """Let bulks come into memory that was used before.

    A server at its memory limit frees a block for each one that it takes. By default glibc hands
    such memory back to the kernel at once, and gets zeroed pages for the next block: for 2 MB that
    takes longer than receiving it. Elsewhere than on Linux this does nothing.
    """
    BLOCKS.kept = KEPT
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, MOST)
        mallopt(M_TRIM_THRESHOLD, KEPT)
