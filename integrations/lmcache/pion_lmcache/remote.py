"""The one way to the server: connections, deadlines, and a breaker, for any number of threads.

Nothing but `Unavailable` comes out of here, whatever the server or the network does: errors are
counted by kind, and the first of a kind is logged, again once the server has been well in between.
After a server could not be reached or did not answer in time it is left alone for a while, so that
the timeout is not paid again with every request.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pion_lmcache.options import Options
from pion_lmcache.tally import Tally
from pion_server.client import Call, Client, ConnectionFailed, DeadlineExceeded, PionError
from pion_server.client.url import parse_url

logger = logging.getLogger(__name__)

T = TypeVar("T")
_OUTAGES = {ConnectionFailed.__name__, DeadlineExceeded.__name__}


class Unavailable(Exception):
    """The server gave no usable answer. It is counted and logged already."""


class Remote:
    """Connections to one server: a few for payloads, and one for questions, which must not wait
    behind them. Raises PionError on a URL that is none."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._place = parse_url(options.url).place
        self._questions = self._client()
        self._clients = [self._client() for _ in range(options.connections)]
        self._free: queue.LifoQueue[Client] = queue.LifoQueue()
        for client in self._clients:
            self._free.put(client)
        self._lock = threading.Lock()
        self._away_until = 0.0
        self._quiet: set[str] = set()  # kinds of errors that are logged already
        self.errors = Tally()
        self.closed = False

    def __str__(self) -> str:
        return f"Pion at {self._place}"

    @property
    def away(self) -> bool:
        """Whether the server failed a moment ago and is not asked for now."""
        return time.monotonic() < self._away_until

    def ask(self, questions: Sequence[Call[Any]]) -> list[Any]:
        """The answers to small calls, each a value or its PionError. Raises Unavailable."""
        return self._guarded(lambda: self._questions.pipeline(questions))

    def move(self, transfers: Sequence[Call[Any]]) -> list[Any]:
        """`ask` for calls that carry payloads."""
        return self._guarded(lambda: self._moved(transfers))

    def ping(self) -> None:
        """Ask whether the server is well, also while it is left alone; it is used again at once
        where it is. Raises Unavailable."""
        self._away_until = 0.0
        self._guarded(self._questions.ping)

    def close(self) -> None:
        """Give up. A call that runs ends by its deadline, and is waited for."""
        self.closed = True
        for client in (self._questions, *self._clients):
            client.close()

    def _client(self) -> Client:
        return Client(self._options.url, timeout=self._options.timeout)

    def _moved(self, transfers: Sequence[Call[Any]]) -> list[Any]:
        try:
            client = self._free.get(timeout=self._options.timeout)
        except queue.Empty:
            raise PionError("all connections are busy; give more of them (`connections`)") from None
        try:
            return client.pipeline(transfers)
        finally:
            self._free.put(client)

    def _guarded(self, run: Callable[[], T]) -> T:
        if self.closed or self.away:
            self.errors.add("Away")
            raise Unavailable
        try:
            answer = run()
        except Exception as error:
            self.note(error)
            raise Unavailable from error
        if self._quiet & _OUTAGES:
            self._well_again()
        return answer

    def note(self, error: Exception) -> None:
        """Count an error by its kind, and log the first of a kind."""
        kind = type(error).__name__
        self.errors.add(kind)
        with self._lock:
            if kind in _OUTAGES:
                self._away_until = time.monotonic() + self._options.retry_after
            first = kind not in self._quiet
            self._quiet.add(kind)
        if first and not self.closed:
            logger.warning(
                "going on without Pion: %s: %s (more of this kind are only counted)", kind, error
            )

    def _well_again(self) -> None:
        with self._lock:
            self._quiet -= _OUTAGES
        logger.warning("%s answers again", self)
