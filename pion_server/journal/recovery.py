"""From a data folder to the state that was acknowledged: the snapshot, then the log.

What cannot be read is one of four things:

- A torn tail: the last segment ends with something that is no whole record. It was never
  acknowledged, or never promised to outlive a power cut.
- Damage where nothing says that it was ever synced, of which a power cut can be the reason: the log
  is taken to end before it, as if all of it were a torn tail.
- Damage to a record of which is still known what it was about. That is lost (replay.py); a copy of
  the record goes to quarantine.
- A gap, records of which nothing is known: nothing before it can be trusted to be current, and all
  of that is lost. (In a snapshot, where every unit is written once, only those in the gap are.)

Nothing is changed here but the quarantine; settling the folder is the journal's business.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from pion_server.errors import PionError
from pion_server.journal import snapshot
from pion_server.journal.disk import Disk
from pion_server.journal.frames import FILE_BYTES, FileKind
from pion_server.journal.quarantine import Quarantine
from pion_server.journal.reading import Gap, LogFile, Span
from pion_server.journal.records import END, decode
from pion_server.journal.replay import Replay
from pion_server.journal.segment import segment_numbers, segment_path
from pion_server.store.mutations import Mutation
from pion_server.store.store import Store

_END_OF_LOG = 1 << 64  # the number of the segment that is not there


@dataclass(slots=True)
class Report:
    """What was found: records and bytes read, bytes of a torn tail, a sentence for each damage."""

    records: int = 0
    nbytes: int = 0
    torn_bytes: int = 0
    seconds: float = 0.0
    damage: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Recovered:
    """The state after record `last`. `sizes`: good bytes of each segment that has records after the
    snapshot, by number; `suspects`: files in which records are missing."""

    store: Store
    last: int
    snapshot_bytes: int
    sizes: dict[int, int]
    suspects: set[Path]
    report: Report


def recover(disk: Disk, folder: Path) -> Recovered:
    """Read a data folder, which may be empty. Raises PionError for files of a newer version, and
    OSError."""
    began = time.monotonic()
    recovery = _Recovery(disk, folder)
    recovery.read()
    recovery.report.seconds = time.monotonic() - began
    return Recovered(
        recovery.replay.store,
        recovery.last,
        recovery.snapshot_bytes,
        recovery.sizes,
        recovery.suspects,
        recovery.report,
    )


class _Recovery:
    def __init__(self, disk: Disk, folder: Path) -> None:
        self.replay = Replay()
        self.report = Report()
        self.last = 0
        self.snapshot_bytes = 0
        self.sizes: dict[int, int] = {}
        self.suspects: set[Path] = set()
        self._disk = disk
        self._folder = folder
        self._quarantine = Quarantine(disk, folder)
        self._snapshot: list[Path] = []  # its file, if there is one

    def read(self) -> None:
        names = self._disk.names(self._folder)
        numbers = segment_numbers(names)
        self._snapshot = [self._folder / name for name in names if name == snapshot.NAME]
        for path in self._snapshot:
            self._read_snapshot(path, numbers)
        # A segment that ends before the snapshot does says nothing new.
        pairs = pairwise([*numbers, _END_OF_LOG])
        self._read_log([number for number, end in pairs if end > self.last + 1])

    # -- the snapshot ------------------------------------------------------------------------

    def _read_snapshot(self, path: Path, numbers: Sequence[int]) -> None:
        with LogFile(self._disk, path, FileKind.SNAPSHOT) as file:
            complete = self._read_units(file)
            header, self.snapshot_bytes = file.header, file.size
        if header is not None:
            self.last = header.number
        elif numbers:
            self.last = numbers[0] - 1
        if not complete:
            self._suspect([path], "snapshot: a part cannot be read; what was in there is lost")
            self.replay.blind = True

    def _read_units(self, file: LogFile) -> bool:
        """Take in the records of a snapshot; returns whether they are all there. The records of a
        unit follow each other, so what a gap may have taken of the others is on either side."""
        previous: Mutation | None = None
        complete, after_gap = True, False
        for item in file.spans(1):
            if isinstance(item, Gap):
                complete, after_gap = False, True
                self._lose(previous)
            elif item.frame.kind == END:
                return complete
            else:
                previous, whole = self._decode(file, item)
                self._carry_out(file, item, previous, whole)
                if after_gap:
                    self._lose(previous)
                after_gap = False
        self._lose(previous)
        return False

    def _lose(self, mutation: Mutation | None) -> None:
        if mutation is not None:
            self.replay.lose(mutation)

    # -- the log -----------------------------------------------------------------------------

    def _read_log(self, numbers: Sequence[int]) -> None:
        with closing(self._items(numbers)) as items:
            for number, file, item in items:
                if isinstance(item, Gap):
                    goes_on = self._read_gap(file, item, number, numbers)
                else:
                    goes_on = self._read_record(file, item, number, numbers)
                if not goes_on:
                    return

    def _read_record(self, file: LogFile, span: Span, number: int, numbers: Sequence[int]) -> bool:
        """Take in a record of segment `number`; returns whether the log goes on behind it."""
        sequence = span.frame.sequence
        if sequence <= self.last:
            return True  # the snapshot has it
        mutation, whole = self._decode(file, span)
        assert file.header is not None
        if not whole and file.header.promises and not self._was_synced(sequence, numbers):
            self._end_before(sequence, number, numbers)
            return False
        self._carry_out(file, span, mutation, whole)
        self.last = sequence
        self.sizes[number] = span.end
        return True

    def _read_gap(self, file: LogFile, gap: Gap, number: int, numbers: Sequence[int]) -> bool:
        """Judge a gap in or before segment `number`; returns whether the log goes on behind it."""
        if gap.last is None and (file.header or file.size < FILE_BYTES):
            self.report.torn_bytes += gap.end - gap.start
            return False
        if gap.last is not None and gap.last <= self.last:
            return True  # the snapshot has it
        if gap.last is None or not self._was_synced(gap.first, numbers):
            self._end_before(gap.first, number, numbers)
            return False
        self._suspect(
            [*self._snapshot, *(segment_path(self._folder, n) for n in numbers if n <= number)],
            f"{file.path.name}: records {gap.first} to {gap.last} cannot be read, so all that "
            "was before them is lost: none of it is known to be current",
        )
        self.replay.forget()
        self.last = gap.last
        return True

    def _end_before(self, sequence: int, number: int, numbers: Sequence[int]) -> None:
        name = segment_path(self._folder, number).name
        self._suspect(
            [segment_path(self._folder, n) for n in numbers if n >= number],
            f"{name}: record {sequence} cannot be read, and was not yet synced as far as is known; "
            "the log is taken to end before it",
        )

    def _items(self, numbers: Sequence[int]) -> Generator[tuple[int, LogFile, Span | Gap]]:
        """The segments as one log: what is missing between two of them is a gap as well."""
        expected = self.last + 1
        for number, following in pairwise([*numbers, _END_OF_LOG]):
            path = segment_path(self._folder, number)
            with LogFile(self._disk, path, FileKind.LOG) as file:
                if number > expected:
                    yield number, file, Gap(0, 0, expected, number - 1)
                for item in file.spans(number):
                    if isinstance(item, Gap) and item.last is None and following < _END_OF_LOG:
                        item = replace(item, last=following - 1)
                    yield number, file, item
                    end = item.last if isinstance(item, Gap) else item.frame.sequence
                    expected = expected if end is None else end + 1

    def _was_synced(self, sequence: int, numbers: Sequence[int]) -> bool:
        """Whether a later record says that this one was on the disk."""
        with closing(self._items(numbers)) as items:
            spans = (item for _, _, item in items if isinstance(item, Span))
            return any(span.frame.synced >= sequence for span in spans)

    # -- records -----------------------------------------------------------------------------

    def _decode(self, file: LogFile, span: Span) -> tuple[Mutation, bool]:
        self.report.records += 1
        self.report.nbytes += span.end - span.start
        return decode(span.frame.kind, span.meta, file.payloads(span))

    def _carry_out(self, file: LogFile, span: Span, mutation: Mutation, whole: bool) -> None:
        """Apply a record's mutation; if that cannot be, what it is about is lost."""
        where = f"{file.path.name}: record {span.frame.sequence} ({type(mutation).__name__})"
        if span.repaired:
            self.report.damage.append(f"{where} was damaged where it is there twice; nothing lost")
        reason = "is damaged"
        if whole:
            try:
                self.replay.apply(mutation)
            except PionError as error:
                reason = f"does not fit what was read before ({error})"
            else:
                return
        self.replay.lose(mutation)
        kept = self._quarantine.copy(file, span.start, span.end)
        self.report.damage.append(f"{where} {reason}; what it is about is lost; kept as {kept}")

    def _suspect(self, paths: Sequence[Path], what: str) -> None:
        self.suspects.update(paths)
        self.report.damage.append(what)
