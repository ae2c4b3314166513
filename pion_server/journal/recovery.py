"""From a data folder to the state that was acknowledged: the snapshot, then the log.

What cannot be read is one of three things:

- A torn tail: the last segment ends with something that is no whole record. It was never
  acknowledged, or never promised to outlive a power cut.
- A damaged record of which is still known what it was about. That is lost (replay.py); a copy of
  the record goes to quarantine.
- A gap: records of which nothing is known. If they were on the disk once, as later frames say, then
  nothing before them can be trusted to be current, and all of it is lost. If they never were, the
  power was cut while they were written, and the log ends before them.

Nothing is changed here but the quarantine; settling the folder is the journal's business.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
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
from pion_server.store.mutations import Mutation, SetKey
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
        """A record that is missing here only takes its own unit with it: every unit is written
        once, and as a whole."""
        previous: Mutation | None = None
        complete = True
        ended = False
        with LogFile(self._disk, path, FileKind.SNAPSHOT) as file:
            for item in file.spans(1):
                if isinstance(item, Gap):
                    complete = False
                    self._lose_rest_of(previous)
                elif item.frame.kind == END:
                    ended = True
                else:
                    previous = self._read_record(file, item)
            header, self.snapshot_bytes = file.header, file.size
        if not ended:
            complete = False
            self._lose_rest_of(previous)
        if header is not None:
            self.last = header.number
        elif numbers:
            self.last = numbers[0] - 1
        if not complete:
            self._suspect([path], "snapshot: a part cannot be read; what was in there is lost")
            self.replay.blind = True

    def _lose_rest_of(self, mutation: Mutation | None) -> None:
        """The unit of the last record before a gap may have gone on in it."""
        if mutation is not None and not isinstance(mutation, SetKey):
            self.replay.lose(mutation)

    # -- the log -----------------------------------------------------------------------------

    def _read_log(self, numbers: Sequence[int]) -> None:
        for number, file, item in self._items(numbers):
            if isinstance(item, Span):
                if item.frame.sequence > self.last:
                    self._read_record(file, item)
                    self.last = item.frame.sequence
                    self.sizes[number] = item.end
            elif item.last is None and (file.header or file.size < FILE_BYTES):
                self.report.torn_bytes += item.end - item.start
            elif item.last is not None and item.last <= self.last:
                continue  # the snapshot has it
            elif not self._goes_on_after(item, number, numbers):
                return

    def _goes_on_after(self, gap: Gap, number: int, numbers: Sequence[int]) -> bool:
        """Judge a gap in or before segment `number`: whether the log is read on behind it."""
        name = segment_path(self._folder, number).name
        if gap.last is None or not self._were_synced(gap, numbers):
            self._suspect(
                [segment_path(self._folder, n) for n in numbers if n >= number],
                f"{name}: record {gap.first} cannot be read, and it never was on the disk as far "
                "as is known; the log is taken to end before it",
            )
            return False
        self._suspect(
            [*self._snapshot, *(segment_path(self._folder, n) for n in numbers if n <= number)],
            f"{name}: records {gap.first} to {gap.last} cannot be read, so everything before them "
            "is lost: none of it is known to be current",
        )
        self.replay.forget()
        self.last = gap.last
        return True

    def _items(self, numbers: Sequence[int]) -> Iterator[tuple[int, LogFile, Span | Gap]]:
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

    def _were_synced(self, gap: Gap, numbers: Sequence[int]) -> bool:
        """Whether a later record says that those of the gap were on the disk."""
        spans = (item for _, _, item in self._items(numbers) if isinstance(item, Span))
        return any(span.frame.synced >= gap.first for span in spans)

    # -- records -----------------------------------------------------------------------------

    def _read_record(self, file: LogFile, span: Span) -> Mutation:
        """Carry a record out; one that cannot be is lost."""
        mutation, whole = decode(span.frame.kind, span.meta, file.payloads(span))
        self.report.records += 1
        self.report.nbytes += span.end - span.start
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
                return mutation
        self.replay.lose(mutation)
        kept = self._quarantine.copy(file, span.start, span.end)
        self.report.damage.append(f"{where} {reason}; what it is about is lost; kept as {kept}")
        return mutation

    def _suspect(self, paths: Sequence[Path], what: str) -> None:
        self.suspects.update(paths)
        self.report.damage.append(what)
