"""One layer's rows: sorted, non-overlapping extents that reference immutable chunks.

A write never touches old bytes: it makes a chunk (the writer's own buffer, not a copy), cuts the
extents under it, and goes in between. So views given out earlier keep reading what was there.
Two rules keep that cheap, and both cost amortised O(1) for a byte written:

- neighbouring extents that fit into SMALL bytes together become one, by copying; so appending
  token by token makes no more than 2 * nbytes / SMALL + 1 extents;
- once chunks hold an eighth more than the bytes that rows still use, the used part is copied out;
  so what is overwritten in part never makes much of a difference to the memory budget.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pion_server.errors import PionError

# Joining up to here costs a few microseconds, about what Python spends on handling an extent.
SMALL = 64 * 1024
# Bytes used for each byte held in vain: less of that means more copying.
USED_PER_UNUSED = 8


@dataclass(slots=True, eq=False)
class _Chunk:
    """One buffer as it came in, and how many of its bytes are still rows of the layer."""

    nbytes: int
    used: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """Rows [start, end): `data` is their part of `chunk`'s buffer."""

    start: int
    end: int
    data: memoryview
    chunk: _Chunk

    @classmethod
    def of(cls, start: int, end: int, data: memoryview) -> Extent:
        """Rows in a chunk of their own."""
        return cls(start, end, data, _Chunk(data.nbytes))


class Layer:
    """Rows of `row_bytes` bytes each, by token id; `index` only names the layer in errors."""

    __slots__ = ("_extents", "held", "index", "row_bytes", "rows", "stretches")

    def __init__(self, index: int, row_bytes: int) -> None:
        self.index = index
        self.row_bytes = row_bytes
        self.rows = 0
        self.stretches = 0  # runs of neighbouring rows, in however many extents
        self.held = 0  # bytes of all chunks referenced here, used or not
        self._extents: tuple[Extent, ...] = ()  # replaced as a whole, so runs() costs nothing

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that are there."""
        return self.rows * self.row_bytes

    @property
    def extents(self) -> int:
        """How many runs of bytes the rows lie in."""
        return len(self._extents)

    def runs(self) -> tuple[Extent, ...]:
        """All rows as they are now, by reference, in token order."""
        return self._extents

    def copy(self) -> Layer:
        """The same rows, for put(); this one stays as it is. It is only to be read from then on,
        since they share the chunks, and how many bytes of these are in use."""
        copied = Layer(self.index, self.row_bytes)
        copied.rows, copied.stretches, copied.held = self.rows, self.stretches, self.held
        copied._extents = self._extents
        return copied

    def put(self, start: int, data: memoryview) -> None:
        """Rows from token `start` on; `data` (whole rows, format "B") is kept, not copied."""
        end = start + data.nbytes // self.row_bytes
        low, high = self._range(start, end)
        under = self._extents[low:high]
        new = [Extent.of(start, end, data.toreadonly())]
        if under and under[0].start < start:
            new.insert(0, self._cut(under[0], under[0].start, start))
        if under and under[-1].end > end:
            new.append(self._cut(under[-1], end, under[-1].end))
        before, after = self._extents[max(0, low - 1) : low], self._extents[high : high + 1]
        window = self._joined([*before, *new, *after])
        self._replace(low - len(before), high + len(after), window)
        if self.held > self.nbytes + self.nbytes // USED_PER_UNUSED:
            self._replace(0, self.extents, [_owned(e) for e in self._extents])

    def covered(self, start: int, end: int) -> int:
        """How many of the rows [start, end) are there."""
        low, high = self._range(start, end)
        return sum(min(e.end, end) - max(e.start, start) for e in self._extents[low:high])

    def covers(self, start: int, end: int) -> bool:
        """Whether every row of [start, end) is there."""
        return self.covered(start, end) == end - start

    def pieces(self, start: int, end: int) -> tuple[memoryview, ...]:
        """The bytes of rows [start, end), in order, by reference. Raises PionError naming the
        first run of rows that is missing: there is no short data."""
        at, pieces = start, []
        low, high = self._range(start, end)
        for extent in self._extents[low:high]:
            if extent.start > at:
                break
            stop = min(extent.end, end)
            pieces.append(self._cut(extent, at, stop).data)
            at = stop
        if at < end:
            raise PionError(f"layer {self.index}: {self._gap(at, end)}")
        return tuple(pieces)

    def _gap(self, start: int, end: int) -> str:
        """Words for the missing rows from `start` up to the next one that is there."""
        at, _ = self._range(start, end)
        stop = min(end, self._extents[at].start) if at < self.extents else end
        if stop - start == 1:
            return f"row {start} is not stored"
        return f"rows {start} to {stop - 1} are not stored"

    def _range(self, start: int, end: int) -> tuple[int, int]:
        """Slice bounds of the extents that overlap [start, end)."""
        low = bisect_right(self._extents, start, key=lambda e: e.end)
        return low, bisect_left(self._extents, end, lo=low, key=lambda e: e.start)

    def _cut(self, extent: Extent, start: int, end: int) -> Extent:
        """The rows [start, end) of an extent that holds them all."""
        first, last = (row - extent.start for row in (start, end))
        data = extent.data[first * self.row_bytes : last * self.row_bytes]
        return Extent(start, end, data, extent.chunk)

    def _joined(self, extents: Sequence[Extent]) -> list[Extent]:
        """The same rows, with each run of neighbours that fits into SMALL bytes made one."""
        groups: list[list[Extent]] = []
        for extent in extents:
            if groups and groups[-1][-1].end == extent.start:
                rows = extent.end - groups[-1][0].start
                if rows * self.row_bytes <= SMALL:
                    groups[-1].append(extent)
                    continue
            groups.append([extent])
        return [_merged(group) for group in groups]

    def _replace(self, low: int, high: int, extents: list[Extent]) -> None:
        """Put `extents` in the place of those at [low:high], and keep the counts."""
        old = self._extents[low:high]
        self._extents = (*self._extents[:low], *extents, *self._extents[high:])
        self.stretches += _stretches(extents) - _stretches(old)
        for extent in extents:
            self.held += 0 if extent.chunk.used else extent.chunk.nbytes
            extent.chunk.used += extent.data.nbytes
            self.rows += extent.end - extent.start
        for extent in old:
            extent.chunk.used -= extent.data.nbytes
            self.held -= 0 if extent.chunk.used else extent.chunk.nbytes
            self.rows -= extent.end - extent.start


def _stretches(extents: Sequence[Extent]) -> int:
    """How many runs of neighbouring rows these are, in token order."""
    return bool(extents) + sum(a.end != b.start for a, b in pairwise(extents))


def _merged(group: list[Extent]) -> Extent:
    """Neighbours as one extent; one alone stays as it is."""
    if len(group) == 1:
        return group[0]
    data = b"".join(extent.data for extent in group)
    return Extent.of(group[0].start, group[-1].end, memoryview(data))


def _owned(extent: Extent) -> Extent:
    """The extent with its rows copied out of a chunk that holds other bytes as well."""
    if extent.chunk.used == extent.chunk.nbytes:
        return extent
    return Extent.of(extent.start, extent.end, memoryview(bytes(extent.data)))
