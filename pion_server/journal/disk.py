"""Every file operation of the journal, one method each.

Nothing is decided here, and an OSError passes through; so a test that replaces the class can fail
any operation, or stop the world at it. Files are made 0600 and folders 0700: they hold what people
asked a model.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypeAlias, cast

Buffer: TypeAlias = bytes | memoryview

# What Linux and macOS take in one writev.
MAX_BUFFERS = 1024
# Bytes of one writev (macOS refuses 2 GB).
MAX_BYTES = 64 << 20
# Smaller buffers that lie side by side are joined first: a copy is cheaper than an entry of writev.
SMALL = 16 * 1024


# From Linux' falloc.h; man 2 fallocate.
FALLOC_FL_KEEP_SIZE = 1


def _find_fallocate() -> Callable[[int, int, int, int], int] | None:
    """The system call, which Python has no name for, where there is one."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            fallocate = ctypes.CDLL(None).fallocate
            fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
            return cast("Callable[[int, int, int, int], int]", fallocate)
    return None


_fallocate = _find_fallocate()


class Disk:
    """The real one."""

    def make_folder(self, path: Path) -> None:
        """A folder of our own, with those above it where they are missing; what is there stays as
        it is."""
        for missing in [each for each in reversed(path.parents) if not each.exists()]:
            missing.mkdir(mode=0o700, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)

    def names(self, folder: Path) -> list[str]:
        return os.listdir(folder)

    def create(self, path: Path) -> int:
        """A new file to append to. One that is there loses the name, not its bytes: they may have
        another name."""
        with suppress(FileNotFoundError):
            os.unlink(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        return os.open(path, flags, 0o600)

    def open(self, path: Path) -> int:
        """A file that is there, to read and to truncate."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def lock(self, path: Path) -> int:
        """Open a file and hold it for this process alone until the descriptor is closed; raises
        BlockingIOError where another holds it."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return fd

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def is_at(self, fd: int, path: Path) -> bool:
        """Whether the open file is still what `path` names."""
        try:
            return os.path.samestat(os.fstat(fd), path.stat())
        except FileNotFoundError:
            return False

    def free(self, folder: Path) -> int:
        """Bytes that may still be written to the file system."""
        info = os.statvfs(folder)
        return info.f_bavail * info.f_frsize

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(fd, [buffer], offset)

    def writev(self, fd: int, buffers: Sequence[Buffer]) -> int:
        """Append; returns how many bytes were taken, which may be less than all."""
        return os.writev(fd, buffers)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """What was written to the file outlives a power cut."""
        if sys.platform == "darwin":  # fsync there leaves the bytes in the drive's cache
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        else:
            os.fdatasync(fd)

    def release(self, fd: int, start: int, end: int) -> None:
        """Let the kernel start to write what it has of these bytes of the file, and take back the
        memory of those that it has written, or that were read: nobody needs them soon. A hint: it
        cannot fail, and changes nothing about what is safe.

        A log that only grows takes new pages all the time, and where a virtual machine has to ask
        for them they cost up to ten times the copy into them.
        """
        if sys.platform == "linux":
            with suppress(OSError):
                os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)

    def reserve(self, fd: int, start: int, end: int) -> None:
        """Have the file system find a place for these bytes behind the end of the file, which stays
        where it is, all at once: page by page that takes a third of the time of writing. A hint, as
        release() is."""
        if _fallocate is not None:
            _fallocate(fd, FALLOC_FL_KEEP_SIZE, start, end - start)

    def sync_folder(self, path: Path) -> None:
        """The names in the folder outlive a power cut."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def link(self, old: Path, new: Path) -> None:
        os.link(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)


def write_all(disk: Disk, fd: int, buffers: Sequence[Buffer]) -> int:
    """Append every byte of `buffers` with as few calls as it takes; returns how many bytes."""
    pending = deque(memoryview(buffer) for buffer in _joined(buffers))
    total = sum(buffer.nbytes for buffer in pending)
    while pending:
        taken = disk.writev(fd, _one_call(pending))
        while pending and taken >= pending[0].nbytes:
            taken -= pending.popleft().nbytes
        if taken:
            pending[0] = pending[0][taken:]
    return total


def _one_call(pending: Iterable[memoryview]) -> list[memoryview]:
    """As much of the front of `pending` as one writev may be given."""
    call: list[memoryview] = []
    room = MAX_BYTES
    for buffer in islice(pending, MAX_BUFFERS):
        call.append(buffer[:room])
        room -= call[-1].nbytes
        if not room:
            break
    return call


def _joined(buffers: Sequence[Buffer]) -> list[Buffer]:
    """The same bytes, with each run of small buffers copied into one."""
    joined: list[Buffer] = []
    run: list[Buffer] = []
    for buffer in buffers:
        if len(buffer) <= SMALL:
            run.append(buffer)
            continue
        if run:
            joined.append(b"".join(run))
            run = []
        joined.append(buffer)
    if run:
        joined.append(b"".join(run))
    return joined
