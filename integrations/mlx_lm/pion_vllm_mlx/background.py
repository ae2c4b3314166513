"""One worker thread that stores prefixes off the request's path.

A job carries rows in memory, so only MAX_PENDING_BYTES of them may wait or run; more are refused,
which costs a later request a prefill and nothing else. One job alone may have any size. A worker
that was idle begins after PAUSE_S, or as soon as somebody waits for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

MAX_PENDING_BYTES = 512 << 20
# A prefix is handed over just when the engine computes its first token. Sent at the same time, it
# made that token 15 ms later on two cores.
PAUSE_S = 0.1


class Job(NamedTuple):
    """Work that must not raise, known by a name."""

    name: str
    nbytes: int
    run: Callable[[], object]


class Background:
    """Runs jobs one after the other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pending: deque[Job] = deque()  # the head is running
        self._closed = False
        self._idle = True  # the worker had nothing to do
        self._waiting = 0  # callers in wait(), for whom the worker hurries
        # A daemon: an exit must not wait for a server that hangs longer than close() allows.
        self._thread = threading.Thread(target=self._run, name="pion-store", daemon=True)

    def has_room(self, nbytes: int) -> bool:
        """Whether submit() would take a job of this size now."""
        with self._changed:
            return self._takes(nbytes)

    def submit(self, job: Job) -> bool:
        """Whether `job` was taken; it is not when too much is waiting, or after close()."""
        with self._changed:
            if not self._takes(job.nbytes):
                return False
            self._pending.append(job)
            if self._thread.ident is None:
                self._thread.start()
            self._changed.notify_all()
        return True

    def wait(self, timeout: float, name: str | None = None) -> bool:
        """Wait until no job called `name` (None: no job at all) is pending; False on timeout."""

        def idle() -> bool:
            return not any(name in (None, job.name) for job in self._pending)

        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(idle, timeout)
            finally:
                self._waiting -= 1

    def close(self, timeout: float) -> bool:
        """Take no more jobs and wait for the pending ones; False where time ran out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return self.wait(timeout)

    def _takes(self, nbytes: int) -> bool:
        pending = sum(job.nbytes for job in self._pending)
        fits = pending + nbytes <= MAX_PENDING_BYTES or not self._pending
        return fits and not self._closed

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run one job. A frame of its own, so that the job's memory goes with it."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closed)
            if self._idle:
                self._changed.wait_for(lambda: self._waiting or self._closed, PAUSE_S)
            if not self._pending:
                return False
            job = self._pending[0]
        job.run()
        with self._changed:
            self._pending.popleft()
            self._idle = not self._pending
            self._changed.notify_all()
        return True
