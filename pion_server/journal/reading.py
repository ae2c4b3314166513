"""A log or snapshot file, read front to back, whatever has happened to it.

The file is told as a sequence of Span (a record that is there) and Gap (bytes in which no record
can be made out). Payloads are only read when they are asked for, into buffers of their own.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from pion_server.journal.disk import SMALL, Disk
from pion_server.journal.frames import (
    FILE_BYTES,
    FRAME_BYTES,
    HEAD_MAGIC,
    TAIL_MAGIC,
    FileKind,
    Frame,
    read_file_header,
    read_frame,
)
from pion_server.journal.records import payload_lengths

# Read at once where records are small, or where the next one has to be searched for.
WINDOW = 1 << 20
# What was read is given back to the kernel in steps: beside it the state needs as much again.
RELEASE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """A record at bytes [start, end). `repaired`: a part of it was damaged, and its copy was
    not."""

    start: int
    end: int
    frame: Frame
    meta: bytes
    repaired: bool


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes [start, end) which should hold the records `first` to `last`. `last` is None where the
    file ends with the gap, so that nothing says how many there were."""

    start: int
    end: int
    first: int
    last: int | None


class LogFile:
    """One file, open to be read. `header` is None where none of this kind can be made out; then
    the whole file is a gap. Raises PionError for a file of a newer version."""

    def __init__(self, disk: Disk, path: Path, kind: FileKind) -> None:
        self.path = path
        raw = _Raw(disk, path)
        self.size = raw.size
        self._file = io.BufferedReader(raw, WINDOW)
        header = read_file_header(self.bytes_at(0, FILE_BYTES))
        self.header = header if header and header.kind is kind else None

    def __enter__(self) -> LogFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def spans(self, first: int) -> Iterator[Span | Gap]:
        """The records in order, the first of which should have the number `first`."""
        at, expected = FILE_BYTES, first
        if self.header is None:
            yield Gap(0, self.size, first, None)
            return
        while at < self.size:
            span = self._record_at(at, expected)
            if span is None:
                following = self._search(at, expected)
                yield from self._between(at, following, expected)
                if following is None:
                    return
                at, expected = following
            else:
                yield span
                at, expected = span.end, expected + 1

    def payloads(self, span: Span) -> list[memoryview]:
        """The payloads of a record as they lie in the file, checked by nobody; the large ones in
        buffers of their own."""
        self._file.seek(span.start + FRAME_BYTES + span.frame.meta)
        return [self._payload(length) for length in payload_lengths(span.meta)]

    def bytes_at(self, start: int, count: int) -> bytes:
        """Up to `count` bytes; fewer at the end of the file."""
        self._file.seek(start)
        return self._file.read(count)

    def _payload(self, length: int) -> memoryview:
        if length <= SMALL:
            return memoryview(self._file.read(length))
        buffer = np.empty(length, np.uint8).data
        filled = 0
        while filled < length and (count := self._file.readinto(buffer[filled:])):
            filled += count
        return buffer

    def _record_at(self, start: int, expected: int) -> Span | None:
        """The record that starts here, by its first frame; None where that is no use."""
        frame = self._frame(start, HEAD_MAGIC)
        if frame is None or frame.sequence != expected:
            return None
        return self._span(start, frame)

    def _record_before(self, end: int, lowest: int) -> Span | None:
        """The record that ends here and starts at `lowest` or later, by its last frame."""
        frame = self._frame(end - FRAME_BYTES, TAIL_MAGIC) if end - FRAME_BYTES >= lowest else None
        if frame is None or end - frame.record_bytes < lowest:
            return None
        span = self._span(end - frame.record_bytes, frame)
        return span and Span(span.start, span.end, span.frame, span.meta, repaired=True)

    def _span(self, start: int, frame: Frame) -> Span | None:
        """The record with its meta, from whichever copy is whole; None where it is cut short."""
        end = start + frame.record_bytes
        if end > self.size:
            return None
        for copy in (start + FRAME_BYTES, end - FRAME_BYTES - frame.meta):
            meta = self.bytes_at(copy, frame.meta)
            if xxh3_64_intdigest(meta) == frame.meta_sum:
                return Span(start, end, frame, meta, repaired=copy != start + FRAME_BYTES)
        return None

    def _between(
        self, start: int, following: tuple[int, int] | None, expected: int
    ) -> Iterator[Span | Gap]:
        """What can be made out up to the next good frame, or to the end of the file: records by
        their last frames, back to front, and before them a gap."""
        at, after = (self.size, None) if following is None else following
        found: list[Span] = []
        while span := self._record_before(at, start):
            found.insert(0, span)
            at, after = span.start, span.frame.sequence
        if at > start:
            yield Gap(start, at, expected, None if after is None else after - 1)
        yield from found

    def _search(self, start: int, expected: int) -> tuple[int, int] | None:
        """Where the next good frame of a later record is, and its sequence number."""
        at = start + 1
        while len(window := self.bytes_at(at, WINDOW)) >= FRAME_BYTES:
            hit = window.find(HEAD_MAGIC)
            while hit >= 0:
                frame = self._parse(window[hit : hit + FRAME_BYTES], HEAD_MAGIC)
                if frame is not None and frame.sequence > expected:
                    return at + hit, frame.sequence
                hit = window.find(HEAD_MAGIC, hit + 1)
            at += len(window) - FRAME_BYTES + 1  # a frame that is cut off here is whole there
        return None

    def _frame(self, start: int, magic: bytes) -> Frame | None:
        return self._parse(self.bytes_at(start, FRAME_BYTES), magic)

    def _parse(self, data: bytes, magic: bytes) -> Frame | None:
        assert self.header is not None
        return read_frame(data, magic, self.header.salt)


class _Raw(io.RawIOBase):
    """What io.BufferedReader needs of a file."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._fd = disk.open(path)
        self.size = disk.size(self._fd)
        self._at = self._unreleased = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = self._disk.read(self._fd, memoryview(buffer), self._at)
        self._at += count
        self._unreleased += count
        if self._unreleased >= RELEASE_BYTES:
            self._disk.release(self._fd, max(0, self._at - self._unreleased), self._at)
            self._unreleased = 0
        return count

    def close(self) -> None:
        if not self.closed:
            self._disk.close(self._fd)
        super().close()
