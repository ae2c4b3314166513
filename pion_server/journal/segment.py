"""The files wal.<first sequence> of the log, as they are written."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pion_server.journal.disk import Buffer, Disk, write_all
from pion_server.journal.frames import FileHeader, FileKind
from pion_server.journal.records import encode
from pion_server.store.mutations import Mutation

# A log that grows by so much at a time has room reserved for that and, ahead of the next time, for
# as much as it has. Nobody else can use what is reserved, so it is not much.
RESERVED_FROM = 1 << 20
AHEAD_BYTES = 64 << 20
# So much that was written is released at a time, which makes the disk begin with it, and once more
# when so much has come behind it: by then it is on the disk, or stays until the kernel cleans up.
# To try what is in between again and again would take as long as writing it.
RELEASED_FROM = 1 << 20
RELEASED_BEHIND = 64 << 20

_NAME = re.compile(r"wal\.(\d{20})")


def segment_path(folder: Path, first: int) -> Path:
    return folder / f"wal.{first:020d}"


def segment_numbers(names: Sequence[str]) -> list[int]:
    """The numbers of the segments among the names of a folder, in order."""
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


class Segment:
    """A new file, which is sure to be found again. `size` counts its good bytes: what a failed
    append left behind them is cut off before anything else is written."""

    def __init__(self, disk: Disk, folder: Path, first: int, promises: bool) -> None:
        self.first = first
        self.path = segment_path(folder, first)
        self.salt = secrets.randbits(64)
        self.size = 0
        self._disk = disk
        self._torn = False
        self._reserved = 0  # bytes of the file that have a place on the disk
        self._released = 0  # and those that it has begun with
        self._fd = disk.create(self.path)
        try:
            self.append([FileHeader(FileKind.LOG, first, self.salt, promises).pack()])
            disk.sync_folder(folder)
        except OSError:
            with suppress(OSError):
                disk.unlink(self.path)
            self.close()
            raise

    def append(self, buffers: Sequence[Buffer]) -> None:
        """All of it, or an OSError and none of it."""
        self._cut()
        self._reserve(sum(map(len, buffers)))
        self._torn = True
        try:
            written = write_all(self._disk, self._fd, buffers)
        except OSError:
            with suppress(OSError):
                self._cut()
            raise
        self._torn = False
        self.size += written

    def release(self) -> None:
        """Let go of the memory of what was appended, as soon as it is on the disk."""
        start, end = self._released, self.size
        if end - start >= RELEASED_FROM:
            self._disk.release(self._fd, start, end)
            if end > RELEASED_BEHIND:
                first = max(start - RELEASED_BEHIND, 0)
                self._disk.release(self._fd, first, end - RELEASED_BEHIND)
            self._released = end

    def is_there(self) -> bool:
        """Whether the file still has its name."""
        return self._disk.is_at(self._fd, self.path)

    def sync(self) -> None:
        self._disk.sync(self._fd)

    def close(self) -> None:
        if self._reserved > self.size:
            with suppress(OSError):  # then it is free once the file is removed
                self._disk.truncate(self._fd, self.size)
        self._disk.close(self._fd)

    def _reserve(self, nbytes: int) -> None:
        end = self.size + nbytes
        if nbytes >= RESERVED_FROM and end > self._reserved:
            self._reserved = end + min(self.size, AHEAD_BYTES)
            self._disk.reserve(self._fd, self.size, self._reserved)

    def _cut(self) -> None:
        if self._torn:
            self._disk.truncate(self._fd, self.size)
            self._torn, self._reserved = False, 0


class Segments:
    """The segment that is written, and those before it. One thread writes and finishes; sync() and
    forget() may be called on others meanwhile. Everything raises OSError."""

    def __init__(self, disk: Disk, folder: Path, promises: bool, sizes: dict[int, int]) -> None:
        """`promises`: as in the file header; `sizes`: bytes of the segments that are there already,
        by number."""
        self._disk = disk
        self._folder = folder
        self._promises = promises
        self._lock = threading.Lock()  # of what follows; never held during I/O
        self._sizes = sizes
        self._current: Segment | None = None  # made when there is something to write
        self._finished: list[Segment] = []  # open, until they are synced or forgotten
        self._syncing = threading.Lock()  # held while finished segments are synced or closed

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(self._sizes.values())

    def is_missing(self) -> bool:
        """Whether the file that is written was removed, or renamed."""
        return self._current is not None and not self._current.is_there()

    def write(self, batch: Sequence[tuple[int, Mutation]], synced: int) -> None:
        """Append the records of `batch`, numbered mutations: all, or none."""
        segment = self._current
        if segment is None:
            segment = Segment(self._disk, self._folder, batch[0][0], self._promises)
            with self._lock:
                self._current = segment
        records = (encode(number, synced, mutation, segment.salt) for number, mutation in batch)
        segment.append([buffer for record in records for buffer in record])
        with self._lock:
            self._sizes[segment.first] = segment.size

    def release(self) -> None:
        """Let go of the memory of what was written: not before it is acknowledged, since it takes a
        fourth of the time of writing."""
        if self._current is not None:
            self._current.release()

    def finish(self) -> None:
        """The next record goes to a new segment."""
        with self._lock:
            if self._current is not None:
                self._finished.append(self._current)
            self._current = None

    def sync(self) -> None:
        """Everything that was written before this call outlives a power cut."""
        with self._syncing:
            with self._lock:
                finished = list(self._finished)
                current = self._current
            for segment in [*finished, current] if current else finished:
                segment.sync()
            self._close(finished)

    def forget(self, sequence: int) -> None:
        """Segments up to `sequence` are not needed any more, and may have been removed."""
        with self._syncing:
            with self._lock:
                self._sizes = {first: n for first, n in self._sizes.items() if first > sequence}
                old = [segment for segment in self._finished if segment.first <= sequence]
            self._close(old)

    def close(self) -> None:
        """Close all files as they are."""
        self.finish()
        with self._syncing:
            self._close(list(self._finished))

    def _close(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            segment.close()
            with self._lock:
                self._finished.remove(segment)
