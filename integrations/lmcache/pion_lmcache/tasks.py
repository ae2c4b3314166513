"""Tasks of LMCache's second level: a result for each, an event fd that says there are some."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from lmcache.v1.platform import create_event_notifier

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Tasks(Generic[T]):
    """Tasks of one kind. `failed(n)` is the result of one that failed for n keys."""

    def __init__(self, failed: Callable[[int], T]) -> None:
        self._failed = failed
        self._notifier = create_event_notifier()
        self._lock = threading.Lock()
        self._results: dict[int, T] = {}
        self._last = 0
        self._closed = False

    @property
    def fd(self) -> int:
        """Readable when there are results that nobody was told of."""
        return int(self._notifier.fileno())

    def add(self, keys: int, job: Future[T]) -> int:
        """The number of a task: what `job` returns is its result, however it ends."""
        with self._lock:
            self._last += 1
            task = self._last
        job.add_done_callback(lambda done: self._publish(task, keys, done))
        return task

    def pop(self, task: int) -> T | None:
        """A task's result, once."""
        with self._lock:
            return self._results.pop(task, None)

    def pop_all(self) -> dict[int, T]:
        """All results that nobody has asked for."""
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        """Close the fd."""
        with self._lock:
            self._closed = True
            self._notifier.close()

    def _publish(self, task: int, keys: int, done: Future[T]) -> None:
        try:
            result = done.result()
        except BaseException as error:
            logger.error("a task for Pion failed: %r", error)
            result = self._failed(keys)
        with self._lock:
            self._results[task] = result
            if not self._closed:
                self._notifier.notify()
