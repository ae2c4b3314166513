"""The one way to the server, where every failure becomes `Unavailable`.

An engine must answer whatever happens to Pion, so nothing else comes out of here: a refused, dead
or hanging server, a mismatch, a reply that makes no sense are counted by kind, logged once per
kind, and left at that. After a server could not be reached or did not answer in time, it is left
alone for RETRY_AFTER_S, and twice as long after each further time on end, so that the timeout is
not paid again with every request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from pion_server.client import Call, Client, calls
from pion_server.errors import ConnectionFailed, DeadlineExceeded, PionError
from pion_vllm_mlx.entry import Entry
from pion_vllm_mlx.stats import Stats

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5.0
MAX_RETRY_AFTER_S = 60.0
# What is long may take longer than the timeout, at this pace.
LEAST_BYTES_PER_S = 100e6


class Unavailable(Exception):
    """The server gave no usable answer. It is counted and logged already."""


class Remote:
    """Two connections to one server, so that a long store never keeps a request waiting."""

    def __init__(self, url: str, timeout: float, stats: Stats) -> None:
        self._reader = Client(url, timeout=timeout)
        self._writer = Client(url, timeout=timeout)
        self.timeout = timeout
        self._stats = stats
        self._away_until = 0.0
        self._failures = 0  # on end, of the kind that makes it away

    @property
    def away(self) -> bool:
        """Whether the server failed a moment ago and is not asked for now."""
        return time.monotonic() < self._away_until

    @contextmanager
    def guard(self) -> Iterator[None]:
        """What fails in this block fails as Unavailable. The block is not entered when away."""
        if self.away:
            self._stats.error("Away")
            raise Unavailable
        try:
            yield
        except Exception as error:
            self._note(error)
            raise Unavailable from error

    def seconds(self, nbytes: int) -> float:
        """How long it may take to move so many bytes."""
        return self.timeout + nbytes / LEAST_BYTES_PER_S

    def read(self, requests: Sequence[Call[Any]], timeout: float) -> list[Any]:
        """The values of `requests`, sent as one; raises the first error of any. Use within
        guard()."""
        return self._all(self._reader, requests, timeout)

    def write(self, requests: Sequence[Call[Any]]) -> list[Any]:
        """As read(), over the connection that stores."""
        return self._all(self._writer, requests, self.timeout)

    def store(self, entry: Entry) -> bool:
        """Register an entry, then send what it holds; whether that succeeded. Never raises.

        Not as one: where another model has taken the namespace meanwhile, REGISTER is refused, and
        states sent behind it would take the place of the other model's.
        """
        start = time.perf_counter()
        stored = False
        with suppress(Unavailable), self.guard():
            self.write([entry.register()])
            self._all(self._writer, entry.content(), self.seconds(entry.nbytes))
            stored = True
        self._stats.add(
            stores=stored,
            bytes_stored=entry.nbytes * stored,
            store_ms_total=(time.perf_counter() - start) * 1e3,
        )
        return stored

    def store_missing(self, entries: Sequence[Entry]) -> int:
        """Store those of `entries` that are not there, until one fails; how many of all are there
        now, leading ones. Never raises."""
        there: list[int] = []
        with suppress(Unavailable), self.guard():
            questions = [calls.prefix_match([entry.namespace]) for entry in entries]
            there = self.write(questions)
        for count, (entry, hit) in enumerate(zip(entries, there, strict=False)):
            if not hit and not self.store(entry):
                return count
        return len(there)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _all(self, client: Client, requests: Sequence[Call[Any]], timeout: float) -> list[Any]:
        """The values of all requests, or the first error of any."""
        outcomes = client.pipeline(requests, timeout=timeout)
        self._failures = 0
        for outcome in outcomes:
            if isinstance(outcome, PionError):
                raise outcome
        return outcomes

    def _note(self, error: Exception) -> None:
        if isinstance(error, ConnectionFailed | DeadlineExceeded):
            pause = min(RETRY_AFTER_S * 2**self._failures, MAX_RETRY_AFTER_S)
            self._away_until = time.monotonic() + pause
            self._failures = min(self._failures + 1, 10)
        kind = type(error).__name__
        if self._stats.error(kind):
            logger.warning("going on without Pion: %s: %s (the next ones are counted)", kind, error)
