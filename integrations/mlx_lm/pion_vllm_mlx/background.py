"""One worker thread that stores prefixes off the request's path, a few at a time.

A job carries whole prefixes in memory, so only MAX_PENDING may wait or run; more are refused,
which costs a later request a prefill and nothing else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

MAX_PENDING = 2


class Background:
    """Runs jobs one after the other; a job is known by a name and must not raise."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pending: deque[tuple[str, Callable[[], None]]] = deque()  # the head is running
        self._closed = False
        # A daemon: an exit must not wait for a server that hangs longer than close() allows.
        self._thread = threading.Thread(target=self._run, name="pion-store", daemon=True)

    @property
    def has_room(self) -> bool:
        """Whether submit() would take a job now."""
        with self._changed:
            return not self._closed and len(self._pending) < MAX_PENDING

    def submit(self, name: str, job: Callable[[], None]) -> bool:
        """Whether `job` was taken; it is not when enough are waiting, or after close()."""
        with self._changed:
            if self._closed or len(self._pending) >= MAX_PENDING:
                return False
            self._pending.append((name, job))
            if self._thread.ident is None:
                self._thread.start()
            self._changed.notify_all()
        return True

    def wait(self, timeout: float, name: str | None = None) -> bool:
        """Wait until no job called `name` (None: no job at all) is pending; False on timeout."""

        def idle() -> bool:
            return not any(name in (None, pending) for pending, _ in self._pending)

        with self._changed:
            return self._changed.wait_for(idle, timeout)

    def close(self, timeout: float) -> bool:
        """Take no more jobs and wait for the pending ones; False where time ran out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return self.wait(timeout)

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run one job. A frame of its own, so that the job's memory goes with it."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closed)
            if not self._pending:
                return False
            _, job = self._pending[0]
        job()
        with self._changed:
            self._pending.popleft()
            self._changed.notify_all()
        return True
