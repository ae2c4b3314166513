"""A disk in memory that fails, stops or loses power where a test says so.

Every operation is counted. A file has what was written and what was synced, a folder has the names
it shows and those it would still have after a power cut; `after()` is the disk that the next
process finds.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from pion_server.journal.disk import Buffer, Disk

PAGE = 64  # small, so that small files have many
FREE = 1 << 40


@dataclass(eq=False)
class Inode:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""

    def copy(self) -> Inode:
        return Inode(bytearray(self.data), self.synced)


@dataclass
class Fault:
    """What happens at one operation: an errno to fail with, or None to stop the world."""

    at: int
    errno: int | None = None


def operation(method: Callable[..., Any]) -> Callable[..., Any]:
    """Count the call; fail or stop at it. A write that fails has written half of its bytes."""

    @wraps(method)
    def counted(self: MemoryDisk, *args: Any) -> Any:
        if self.gate is not None:
            self.gate(method.__name__)
        with self.lock_of_all:
            if self.stopped:
                raise SystemExit
            self.trace.append(method.__name__)
            if self.fault is None or len(self.trace) != self.fault.at:
                return method(self, *args)
            if method.__name__ == "writev":
                half = memoryview(b"".join(args[1]))
                method(self, args[0], [half[: len(half) // 2]])
            if self.fault.errno is not None:
                raise OSError(self.fault.errno, os.strerror(self.fault.errno))
            self.stopped = True
            raise SystemExit

    return counted


class MemoryDisk(Disk):
    def __init__(self) -> None:
        self.files: dict[Path, Inode] = {}
        self.synced_names: dict[Path, Inode] = {}
        self.trace: list[str] = []
        self.fault: Fault | None = None
        self.stopped = False
        self.gate: Callable[[str], None] | None = None  # called first; may raise OSError
        self.largest_write: int | None = None  # bytes one writev takes
        self.room: int | None = None  # bytes all files together may have
        self.lock_of_all = threading.RLock()
        self.open_files: dict[int, Inode] = {}
        self.next_fd = 100
        self.locks: set[int] = set()

    # -- for tests ---------------------------------------------------------------------------

    def after(self, power_cut: random.Random | None = None) -> MemoryDisk:
        """What is there once the process is dead. A power cut may undo changes of names that were
        not synced; of unsynced bytes it keeps some pages, in no order, and zeros for others."""
        with self.lock_of_all:
            names = self.files
            if power_cut is not None and power_cut.random() < 0.5:
                names = self.synced_names
            now: dict[Inode, Inode] = {}
            for inode in [*names.values(), *self.synced_names.values()]:
                if inode not in now:
                    now[inode] = inode.copy() if power_cut is None else _cut(inode, power_cut)
            found = MemoryDisk()
            found.files = {path: now[inode] for path, inode in names.items()}
            kept = names if power_cut is not None else self.synced_names
            found.synced_names = {path: now[inode] for path, inode in kept.items()}
            return found

    def content(self, name: str) -> bytearray:
        """The bytes of the one file that is called so, to look at and to damage."""
        (inode,) = [inode for path, inode in self.files.items() if path.name == name]
        return inode.data

    def listing(self) -> list[str]:
        return sorted(path.name for path in self.files)

    def segments(self) -> list[str]:
        return [name for name in self.listing() if name.startswith("wal.")]

    # -- Disk --------------------------------------------------------------------------------

    @operation
    def make_folder(self, path: Path) -> None:
        pass

    @operation
    def names(self, folder: Path) -> list[str]:
        return [path.name for path in self.files if path.parent == folder]

    @operation
    def create(self, path: Path) -> int:
        inode = self.files[path] = Inode()
        return self._open(inode)

    @operation
    def open(self, path: Path) -> int:
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
        return self._open(self.files[path])

    @operation
    def lock(self, path: Path) -> int:
        inode = self.files.setdefault(path, Inode())
        if any(self.open_files.get(fd) is inode for fd in self.locks):
            raise BlockingIOError
        fd = self._open(inode)
        self.locks.add(fd)
        return fd

    @operation
    def close(self, fd: int) -> None:
        del self.open_files[fd]

    @operation
    def size(self, fd: int) -> int:
        return len(self.open_files[fd].data)

    @operation
    def is_at(self, fd: int, path: Path) -> bool:
        return self.files.get(path) is self.open_files[fd]

    @operation
    def free(self, folder: Path) -> int:
        return FREE if self.room is None else self.room - self._used()

    @operation
    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        data = self.open_files[fd].data[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    @operation
    def writev(self, fd: int, buffers: Sequence[Buffer]) -> int:
        data = b"".join(buffers)
        taken = len(data) if self.largest_write is None else min(len(data), self.largest_write)
        if self.room is not None:
            taken = min(taken, self.room - self._used())
            if taken == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.open_files[fd].data += data[:taken]
        return taken

    @operation
    def truncate(self, fd: int, size: int) -> None:
        del self.open_files[fd].data[size:]

    @operation
    def sync(self, fd: int) -> None:
        self.open_files[fd].synced = bytes(self.open_files[fd].data)

    def release(self, fd: int, start: int, end: int) -> None:
        pass

    def reserve(self, fd: int, start: int, end: int) -> None:
        pass

    @operation
    def sync_folder(self, path: Path) -> None:
        elsewhere = {p: inode for p, inode in self.synced_names.items() if p.parent != path}
        here = {p: inode for p, inode in self.files.items() if p.parent == path}
        self.synced_names = elsewhere | here

    @operation
    def rename(self, old: Path, new: Path) -> None:
        self.files[new] = self.files.pop(old)

    @operation
    def link(self, old: Path, new: Path) -> None:
        if new in self.files:
            raise FileExistsError(errno.EEXIST, "File exists", str(new))
        self.files[new] = self.files[old]

    @operation
    def unlink(self, path: Path) -> None:
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "No such file", str(path))
        del self.files[path]

    def _open(self, inode: Inode) -> int:
        self.next_fd += 1
        self.open_files[self.next_fd] = inode
        return self.next_fd

    def _used(self) -> int:
        return sum(len(inode.data) for inode in set(self.files.values()))


def _cut(inode: Inode, random: random.Random) -> Inode:
    """The synced bytes, and then some of the pages that were written since."""
    data = bytearray(inode.data)
    kept = len(inode.synced)
    size = random.randint(kept, max(kept, len(data)))
    for start in range(kept, size, PAGE):
        if random.random() < 0.5:
            end = min(start + PAGE, size)
            data[start:end] = bytes(end - start)
    return Inode(data[:size], bytes(data[:size]))


class Gate:
    """Holds up one operation of a disk until it is opened, or fails it."""

    def __init__(self, disk: MemoryDisk, operation: str, code: int | None = None) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self._operation, self._errno = operation, code
        disk.gate = self

    def __call__(self, operation: str) -> None:
        if operation == self._operation and not self.opened.is_set():
            self.reached.set()
            if self._errno is not None:
                raise OSError(self._errno, "as the test says")
            assert self.opened.wait(20)
