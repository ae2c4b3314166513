"""One clock for everything a call does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pion_server.errors import DeadlineExceeded, PionError


class Deadline:
    """The time that one call has, from connecting to the last byte of its reply. `what` says which
    call that is, once it is to be said."""

    def __init__(self, seconds: float, what: Callable[[], str]) -> None:
        if not 0 < seconds <= threading.TIMEOUT_MAX:
            raise PionError(f"a timeout is a number of seconds above 0, got {seconds}")
        self._what = what
        self._seconds = seconds
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, above 0. Raises DeadlineExceeded where there are none."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise self.exceeded()
        return left

    def exceeded(self) -> DeadlineExceeded:
        """The error that says whose deadline passed."""
        return DeadlineExceeded(f"{self._what()}: no complete answer within {self._seconds:g} s")
