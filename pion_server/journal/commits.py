"""Replies that wait until the journal has what they acknowledge.

Lives on the event loop. A write takes a place with the number of its last record; places are given
up in order as the journal gets there, so a batch that was written at once is acknowledged at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from pion_server.errors import Misconf
from pion_server.journal.journal import Journal

# Called with None once the record is safe, or with why it never will be.
Release: TypeAlias = Callable[[Misconf | None], None]


class Commits:
    """The waiting replies of one journal. `advance` is to be called whenever it has changed."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._waiting: deque[tuple[int, Release]] = deque()

    def wait(self, sequence: int, release: Release) -> None:
        """Have `release` called once everything up to `sequence` is safe: now, or later."""
        self._waiting.append((sequence, release))
        self.advance()

    def advance(self) -> None:
        """Let go of those whose records are safe, and of all where nothing will be any more."""
        committed = self._journal.committed
        while self._waiting and self._waiting[0][0] <= committed:
            self._waiting.popleft()[1](None)
        if self._waiting and self._journal.is_final():
            lost = self._journal.refusal()
            while self._waiting:
                self._waiting.popleft()[1](lost)
