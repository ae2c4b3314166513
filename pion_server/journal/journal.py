"""The journal of one data folder: opened once, then told of every mutation.

    lock                    held while a server uses the folder
    snapshot                the state after some record (snapshot.py)
    snapshot.tmp, .link     one that is being made, or getting another name
    wal.<first sequence>    the records after it (segment.py)
    quarantine/             what could not be read (recovery.py)

The order of things is what makes it right. A mutation goes to Store.apply first, which may refuse
it, then to append, with nothing in between, so memory and log agree; and every mutation that was
applied is appended, evictions and expiries too. A snapshot starts a new segment first and removes
old ones last, and recovery passes over what the snapshot covers; so a crash in between harms
nothing.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event

from pion_server.errors import Misconf, PionError
from pion_server.journal import quarantine, snapshot
from pion_server.journal.disk import Disk
from pion_server.journal.recovery import Recovered, Report, recover
from pion_server.journal.segment import segment_numbers, segment_path
from pion_server.journal.snapshot import Capture
from pion_server.journal.wal import Policy, Wal
from pion_server.store.mutations import Mutation
from pion_server.store.store import Store

log = logging.getLogger(__name__)

LOCK = "lock"
# Files are compacted once they are this many times what is held, and something worth the while.
COMPACT_RATIO = 2
COMPACT_BYTES = 64 << 20
# After a snapshot that failed the next one is not due for a while.
PATIENCE_SECONDS = 60.0
_EXPORT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


class Journal:
    """What a server needs to know of its log. The methods are for the event loop's thread, and
    none but open() and close() waits for the disk."""

    def __init__(self, disk: Disk, folder: Path, found: Recovered, wal: Wal, lock: int) -> None:
        """open() makes one."""
        self._disk = disk
        self._folder = folder
        self._store = found.store
        self._wal = wal
        self._lock = lock
        self._snapshot_bytes = found.snapshot_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._saving: Future[None] | None = None
        self._closing = Event()
        self._patient_until = 0.0

    @classmethod
    def open(
        cls, folder: Path, policy: Policy, disk: Disk | None = None
    ) -> tuple[Journal, Store, Report]:
        """Recover the state from a data folder, made where it is missing, and go on from there.

        Raises PionError where another server uses the folder, where it cannot be used, and where
        it was written by a newer version.
        """
        disk = disk or Disk()
        lock = _lock(disk, folder)
        try:
            found = recover(disk, folder)
            sizes = _settle(disk, folder, found)
        except OSError as error:
            disk.close(lock)
            raise _unusable(folder, error) from error
        except PionError:
            disk.close(lock)
            raise
        _warn(folder, found.report)
        wal = Wal(disk, folder, policy, found.last, sizes)
        return cls(disk, folder, found, wal, lock), found.store, found.report

    def watch(self, on_change: Callable[[], object]) -> None:
        """Have `on_change` called whenever committed or refusal() may have changed. It is called on
        other threads: pass something that goes through loop.call_soon_threadsafe."""
        self._wal.on_change = on_change

    def append(self, mutation: Mutation) -> int:
        """Log a mutation that Store.apply has just carried out; returns its sequence number. Its
        reply may leave once `committed` is there."""
        return self._wal.append(mutation)

    @property
    def last(self) -> int:
        """The sequence number of the last mutation that was appended."""
        return self._wal.last

    @property
    def committed(self) -> int:
        """Every mutation up to this number is as safe as the policy promises."""
        return self._wal.committed

    def refusal(self) -> Misconf | None:
        """What to answer to a write instead of applying it, or None. One that was applied before
        goes on waiting: its reply is this one only where `is_final()`."""
        return self._wal.refusal()

    def is_final(self) -> bool:
        """Whether what is not yet committed never will be."""
        return self._wal.is_final()

    @property
    def backlog_bytes(self) -> int:
        """About how much memory waits to be written; the caller takes no writes above a bound."""
        return self._wal.backlog_bytes

    @property
    def wal_bytes(self) -> int:
        """Bytes of the log behind the snapshot."""
        return self._wal.nbytes

    def compact_due(self) -> bool:
        """Whether it is time for a save(): much of the files is not current any more, or a
        segment was removed and only a snapshot makes up for it."""
        if self._is_saving() or self._wal.stuck() or time.monotonic() < self._patient_until:
            return False
        written = self._snapshot_bytes + self._wal.nbytes
        limit = COMPACT_RATIO * self._store.bytes_used + COMPACT_BYTES
        return self._wal.lost_a_file or written > limit

    def save(self, name: str | None = None) -> Future[None]:
        """Take a snapshot of the state as it is now, and drop the log before it. `name`: a file in
        the data folder that is to be another name of the snapshot, and stay as it is.

        Raises PionError for a name that may not be used, and where a snapshot is being taken
        already; Misconf where the log cannot be written. The future raises them too.
        """
        target = self._export_path(name)
        if self._is_saving():
            raise PionError("a snapshot is being taken already; try again when it is done")
        self._raise_if_stuck()
        view, covers = snapshot.capture(self._store), self._wal.last
        rotated = self._wal.rotate()
        self._saving = self._thread.submit(self._save, view, covers, rotated, target)
        return self._saving

    def close(self) -> None:
        """Write and sync what is left; a snapshot under way is given up. Raises Misconf where
        something that was appended could not be written."""
        self._closing.set()
        self._thread.shutdown()
        try:
            self._wal.close()
        finally:
            with suppress(OSError):
                self._disk.close(self._lock)

    # -- saving, on its own thread -----------------------------------------------------------

    def _save(self, view: Capture, covers: int, rotated: Event, target: Path | None) -> None:
        try:
            while not rotated.wait(0.05):
                self._raise_if_stuck()
            self._check_room(view.nbytes)
            self._snapshot_bytes = snapshot.write(
                self._disk, self._folder, view, covers, self._raise_if_stuck
            )
            self._wal.cover(covers)
            for number in segment_numbers(self._disk.names(self._folder)):
                if number <= covers:
                    self._disk.unlink(segment_path(self._folder, number))
            if target is not None:
                snapshot.export(self._disk, self._folder, target)
        except BaseException as error:
            self._patient_until = time.monotonic() + PATIENCE_SECONDS
            if isinstance(error, OSError):
                reason = f"the snapshot could not be written ({error.strerror})"
                raise PionError(reason) from error
            raise

    def _check_room(self, nbytes: int) -> None:
        """A snapshot that fills the disk would stop the log as well."""
        free = self._disk.free(self._folder)
        if free < nbytes:
            raise PionError(f"the snapshot needs about {nbytes} bytes of disk, {free} are free")

    def _raise_if_stuck(self) -> None:
        if self._closing.is_set():
            raise PionError("the snapshot is given up, since the server stops")
        if (stuck := self._wal.stuck()) is not None:
            raise stuck

    def _export_path(self, name: str | None) -> Path | None:
        if name is None:
            return None
        own = name in (LOCK, quarantine.NAME) or name.startswith(("wal.", snapshot.NAME))
        if own or not _EXPORT.fullmatch(name):
            raise PionError(
                "the path must be a file name inside the data folder, of letters, digits and _.- "
                "and none that the journal uses itself"
            )
        return self._folder / name

    def _is_saving(self) -> bool:
        return self._saving is not None and not self._saving.done()


def _lock(disk: Disk, folder: Path) -> int:
    try:
        disk.make_folder(folder)
        return disk.lock(folder / LOCK)
    except BlockingIOError as error:
        raise PionError(f"the data folder {folder} is in use by another server") from error
    except OSError as error:
        raise _unusable(folder, error) from error


def _warn(folder: Path, report: Report) -> None:
    if report.torn_bytes:
        log.warning("%s: %d bytes of unfinished records are cut off", folder, report.torn_bytes)
    for damage in report.damage:
        log.warning("%s: %s", folder, damage)


def _unusable(folder: Path, error: OSError) -> PionError:
    where = f" ({error.filename})" if error.filename else ""
    return PionError(f"the data folder {folder} cannot be used: {error.strerror}{where}")


def _settle(disk: Disk, folder: Path, found: Recovered) -> dict[int, int]:
    """Leave nothing in the folder but what recovery took as good, and all of that on the disk.
    Returns the bytes of each segment that stays, by number.

    After damage that is a new snapshot, since the log would tell of the damage again, and of
    what it cost, after records that are yet to come.
    """
    sizes = found.sizes
    if found.report.damage:
        kept = quarantine.Quarantine(disk, folder)
        for path in found.suspects:
            kept.keep(path)
        view = snapshot.capture(found.store)
        found.snapshot_bytes = snapshot.write(disk, folder, view, found.last, lambda: None)
        sizes = {}
    names = disk.names(folder)
    for name in {snapshot.UNFINISHED, snapshot.LINK}.intersection(names):
        disk.unlink(folder / name)
    for number in segment_numbers(names):
        if number in sizes:
            _cut_and_sync(disk, segment_path(folder, number), sizes[number])
        else:
            disk.unlink(segment_path(folder, number))
    return sizes


def _cut_and_sync(disk: Disk, path: Path, size: int) -> None:
    fd = disk.open(path)
    try:
        if disk.size(fd) > size:
            disk.truncate(fd, size)
        disk.sync(fd)
    finally:
        disk.close(fd)
