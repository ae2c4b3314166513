"""The log while the server runs: mutations in, on one thread, in order.

`append` is called on the event loop, after Store.apply has taken the mutation and in the same
order; it does no I/O and never waits for any. The journal's thread takes all that has gathered,
writes it in as few calls as it can and, under `always`, syncs once: group commit. `committed` then
says how far the replies may go. Payloads go from the stored chunks to the kernel without a copy.

- A batch that cannot be written is cut off the file again, kept, and tried anew every second.
- An error of a sync is for good: what the kernel then still has of the file is anybody's guess.
- A segment that was removed is noticed at the next write; a snapshot makes up for it (`cover`).

Meanwhile `refusal()` says why, and the caller refuses writes; what is appended all the same is
kept in order, or dropped where nothing will ever be written again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

from pion_server.errors import Misconf
from pion_server.journal.disk import Disk
from pion_server.journal.records import payload_bytes
from pion_server.journal.segment import Segments
from pion_server.store.mutations import Mutation

log = logging.getLogger(__name__)

Policy: TypeAlias = Literal["always", "everysec", "no"]
Entry: TypeAlias = tuple[int, Mutation]
Work: TypeAlias = "list[Entry] | threading.Event"  # an event asks for a new segment

RETRY_SECONDS = 1.0
# A sync begins this long after the one before, and acknowledging waits for one that takes longer
# than this; so under `everysec` a power cut costs no more than a second.
SYNC_SECONDS = 0.5
# Written before the next is looked at, so that acknowledging does not wait for a long queue.
BATCH_BYTES = 32 << 20
BATCH_ENTRIES = 1024
# What an entry of the queue holds on to beyond its payload, about.
ENTRY_BYTES = 512


def _size(mutation: Mutation) -> int:
    """About how much memory it takes in the queue."""
    return payload_bytes(mutation) + ENTRY_BYTES


def _refuse(reason: str) -> Misconf:
    return Misconf(f"writes are refused, reads go on: {reason}")


class _Over(Exception):
    """Nothing more can be written."""


class Wal:
    """The log's writer. `on_change` is called, on some thread, whenever `committed` or refusal()
    may have changed."""

    def __init__(
        self, disk: Disk, folder: Path, policy: Policy, last: int, sizes: dict[int, int]
    ) -> None:
        """`last`: the number of the last record that is there already, and on the disk; `sizes`:
        the bytes of the segments that are there, by number."""
        self.last = last
        self.committed = last
        self.on_change: Callable[[], object] = lambda: None
        self._policy = policy
        self._segments = Segments(disk, folder, policy != "no", sizes)
        self._written = self._synced = last
        self._done = last  # written, and synced where the policy asks for it
        self._covered = 0  # a snapshot holds everything up to here
        # The loop appends and the thread takes, each alone. There is no lock around it that the
        # loop could have to wait for; it is only told whether there is somebody to wake up.
        self._queue: deque[Entry | threading.Event] = deque()
        self._idle = False
        self._bytes_in = self._bytes_out = 0
        self._changed = threading.Condition()  # guards what follows, and waking up
        self._fault: str | None = None  # why nothing can be written at the moment
        self._failed: str | None = None  # why nothing will be written any more
        self._gone = 0  # records before this one may have been in a file that was removed
        self._closing = False
        self._syncing_since: float | None = None
        self._slow_sync = threading.Lock()  # held by the thread that syncs under `everysec`
        self._no_more_syncs = threading.Event()
        self._threads = [threading.Thread(target=self._write_on, name="journal", daemon=True)]
        if policy == "everysec":
            self._threads += [threading.Thread(target=self._sync_on, name="sync", daemon=True)]
        for thread in self._threads:
            thread.start()

    # -- on the event loop -------------------------------------------------------------------

    def append(self, mutation: Mutation) -> int:
        """Take a mutation that Store.apply has carried out; returns its sequence number."""
        self.last += 1
        if self._failed is None:
            self._bytes_in += _size(mutation)
            self._enqueue((self.last, mutation))
        return self.last

    @property
    def backlog_bytes(self) -> int:
        """About how much memory waits to be written. The caller bounds it: no new writes above."""
        return self._bytes_in - self._bytes_out

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return self._segments.nbytes

    @property
    def lost_a_file(self) -> bool:
        """Whether only a snapshot can make the log whole again."""
        return self._gone > self._covered + 1

    def refusal(self) -> Misconf | None:
        """Why writes are to be refused, or None."""
        if self.lost_a_file and not self.stuck():
            return _refuse("a file of the log was removed; KV.PREFIX.SAVE makes up for it")
        return self.stuck()

    def stuck(self) -> Misconf | None:
        """Why nothing can be written, or None."""
        reason = self._failed or self._fault
        return _refuse(reason) if reason else None

    def is_final(self) -> bool:
        """Whether nothing will be written any more."""
        return self._failed is not None

    def rotate(self) -> threading.Event:
        """Let what is appended from now on go to a new segment; the event tells that the old one
        is written."""
        finished = threading.Event()
        self._enqueue(finished)
        return finished

    def cover(self, sequence: int) -> None:
        """A snapshot with everything up to `sequence` is on the disk, so that older segments do not
        count any more, removed or not. May be called on any thread."""
        self._segments.forget(sequence)
        with self._changed:
            self._covered = sequence
        self._publish()

    def close(self) -> None:
        """Write and sync what is left, and end. Raises Misconf where something could not be."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._no_more_syncs.set()
        for thread in self._threads:
            thread.join()
        if self._failed is None:
            self._sync()
        with suppress(OSError):  # what matters is synced, or was given up before
            self._segments.close()
        if (refusal := self.refusal()) is not None:
            raise refusal

    def _enqueue(self, item: Entry | threading.Event) -> None:
        self._queue.append(item)
        if self._idle:
            with self._changed:
                self._changed.notify()

    # -- the journal's thread ----------------------------------------------------------------

    def _write_on(self) -> None:
        try:
            while self._step():
                pass
        except _Over:
            pass
        except Exception:
            log.exception("the journal's thread ended; this is a defect of the server")
            self._fail("a defect of the server, see its log; a restart may help")
        if self._failed is not None:
            self._queue.clear()
            self._bytes_out = self._bytes_in

    def _step(self) -> bool:
        """Do the next piece of work; False where there will be none."""
        work = self._take()
        if isinstance(work, threading.Event):
            self._segments.finish()
            work.set()
        elif work:
            self._commit(work)
        return bool(work)

    def _take(self) -> Work:
        """Wait for something to do, and take what goes together; nothing at the end."""
        with self._changed:
            self._idle = True
            self._changed.wait_for(lambda: self._queue or self._closing or self._failed)
            self._idle = False
        batch: list[Entry] = []
        size = 0
        while self._queue and self._failed is None:
            head = self._queue[0]
            if isinstance(head, threading.Event):
                if batch:
                    break
                self._queue.popleft()
                return head
            self._queue.popleft()
            batch.append(head)
            size += _size(head[1])
            if size >= BATCH_BYTES or len(batch) == BATCH_ENTRIES:
                break
        return batch

    def _commit(self, batch: list[Entry]) -> None:
        """Make a batch durable as the policy says, however long it takes."""
        while (fault := self._attempt(batch)) is not None:
            self._set_fault(fault)
            self._pause()
        self._set_fault(None)
        self._written = batch[-1][0]
        if self._policy == "always":
            self._sync()
        self._wait_for_a_slow_sync()
        if self._failed is not None:
            raise _Over
        self._done = self._written
        self._bytes_out += sum(_size(mutation) for _, mutation in batch)
        self._publish()
        self._segments.release()

    def _attempt(self, batch: list[Entry]) -> str | None:
        """Write a batch; returns why it is not written, or None."""
        try:
            if self._segments.is_missing():
                self._segments.finish()
                self._gone = batch[0][0]
                log.warning("a file of the log was removed; writes are refused until a snapshot")
            self._segments.write(batch, self._synced)
        except OSError as error:
            return f"the log cannot be written ({error.strerror}); it is tried again by itself"
        return None

    def _set_fault(self, fault: str | None) -> None:
        if fault != self._fault:
            log.warning(fault or "the log can be written again")
            self._fault = fault
            self.on_change()

    def _pause(self) -> None:
        """Between attempts. Raises _Over where there is to be no other."""
        with self._changed:
            if self._closing or self._failed:
                raise _Over
            self._changed.wait_for(lambda: self._closing or self._failed, RETRY_SECONDS)

    def _publish(self) -> None:
        """Say how far it is."""
        with self._changed:
            done = self._covered if self.lost_a_file else self._done
            self.committed = max(self.committed, self._covered, done)
        self.on_change()

    # -- syncs -------------------------------------------------------------------------------

    def _sync_on(self) -> None:
        """Under `everysec`, on a thread of its own: writing and acknowledging go on meanwhile."""
        took = 0.0
        while self._failed is None and not self._no_more_syncs.wait(max(0.0, SYNC_SECONDS - took)):
            with self._slow_sync:
                self._syncing_since = began = time.monotonic()
                if self._synced < self._written:
                    self._sync()
                self._syncing_since = None
                took = time.monotonic() - began

    def _wait_for_a_slow_sync(self) -> None:
        since = self._syncing_since
        if since is not None and time.monotonic() - since > SYNC_SECONDS:
            with self._slow_sync:
                pass

    def _sync(self) -> None:
        """Sync what is written, or see to it that nothing more is acknowledged."""
        written = self._written
        try:
            self._segments.sync()
        except OSError as error:
            self._fail(f"the log could not be synced ({error.strerror}); check the disk, restart")
        else:
            self._synced = max(self._synced, written)

    def _fail(self, reason: str) -> None:
        log.error("%s; writes are refused from now on", reason)
        with self._changed:
            self._failed = reason
            self._changed.notify()
        self.on_change()
