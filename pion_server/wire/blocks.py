"""Memory for large bulks, which can be used again: a block that nobody refers to any more waits for
the next bulk.

Fresh pages have to be zeroed by the kernel, and under a hypervisor often be found by it first: that
takes as long as receiving, or several times as long. A server at its memory limit frees a block for
each one that it takes. What is smaller than MAPPED_FROM comes from malloc, which can be told to
keep what was freed; but not what is large, nor in a heap with holes of any size.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import weakref

import numpy as np

# A mapping can be resized in place, without copying, on Linux alone.
AVAILABLE = sys.platform == "linux"
# From here up a mapping of its own, two huge pages at least, is worth its system calls.
MAPPED_FROM = 4 << 20


class Blocks:
    """The blocks of a process: those that wait have `kept` bytes at most, by default none.

    Blocks come back from whatever thread, and in the middle of any call here (garbage collection):
    so there is no lock, and the list is looked at in copies and changed in single steps.
    """

    def __init__(self) -> None:
        self.kept = 0
        self._waiting: list[mmap.mmap] = []

    def take(self, nbytes: int, reserve: int) -> mmap.mmap:
        """A block for a bulk of `nbytes`: just as long where it waited here. A new one has at most
        `reserve` bytes, to be resized as the bulk arrives."""
        for block in sorted(self._waiting, key=len):
            # Not there: it has just been dropped. In use: its last view is going in this moment.
            with contextlib.suppress(ValueError, BufferError):
                if len(block) >= nbytes:
                    self._waiting.remove(block)
                    block.resize(nbytes)
                    return block
        block = mmap.mmap(-1, min(nbytes, reserve), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
        return block

    def lend(self, block: mmap.mmap) -> memoryview:
        """All of a block. Once no view of it is left it waits here again."""
        lent = np.frombuffer(block, np.uint8)
        weakref.finalize(lent, self._give_back, block).atexit = False
        return lent.data

    def _give_back(self, block: mmap.mmap) -> None:
        self._waiting.append(block)
        while sum(map(len, tuple(self._waiting))) > self.kept:
            with contextlib.suppress(IndexError):
                self._waiting.pop(0)  # sizes that are asked for no more go first


BLOCKS = Blocks()
