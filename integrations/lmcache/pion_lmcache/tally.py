"""Counters that any thread may add to."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable


class Tally:
    """How often each word was counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, word: str, count: int = 1) -> None:
        with self._lock:
            self._counts[word] += count

    def add_each(self, words: Iterable[str]) -> None:
        with self._lock:
            self._counts.update(words)

    def __getitem__(self, word: str) -> int:
        return self._counts[word]

    def snapshot(self) -> dict[str, int]:
        """All counts so far."""
        with self._lock:
            return dict(self._counts)
