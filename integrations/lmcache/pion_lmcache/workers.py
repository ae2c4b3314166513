"""Connections to the workers of one server.

Each worker of `pion-server -w N` owns its sessions, and a new connection lands on any of them. A
call for a session of another worker is `-ERR session lives on worker N`; it is run again on a
connection to that one, which is found by opening more and asking each where it is.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import TypeVar

from pion_server.client import Call, Client, PionError

T = TypeVar("T")

_ELSEWHERE = re.compile(r"session lives on worker (\d+)")
# A worker takes each new connection with the chance 1/N. After so many the one of 16 workers was
# missed with a probability below 1e-7.
ATTEMPTS = 256


class Workers:
    """Runs calls on the worker that can answer them. Thread-safe as Client is."""

    def __init__(self, url: str, timeout: float, redirect: bool) -> None:
        self._url = url
        self._timeout = timeout
        self._redirect = redirect
        self._first = self._connection()
        self._known: dict[int, Client] = {}
        self._redirecting = threading.Lock()

    def run(self, call: Call[T]) -> T:
        """The value of a call. Raises PionError, among them that the session lives elsewhere where
        redirection is off or that worker is not to be found."""
        try:
            return self._first.execute(call)
        except PionError as error:
            refusal, elsewhere = error, _ELSEWHERE.search(str(error))
        if not (self._redirect and elsewhere):
            raise refusal
        with self._redirecting:
            return self._run_on(int(elsewhere[1]), call, refusal)

    def _run_on(self, worker: int, call: Call[T], refusal: PionError) -> T:
        for client in self._connections_to(worker):
            self._known[worker] = client
            try:
                return client.execute(call)
            except PionError as error:
                if not _ELSEWHERE.search(str(error)):
                    raise
                self._known.pop(worker).close()  # it was opened again, and landed elsewhere
        raise refusal

    def close(self) -> None:
        """Close all connections."""
        for client in (self._first, *self._known.values()):
            client.close()

    def _connections_to(self, worker: int) -> Iterator[Client]:
        """The connection that is known to lead there, then new ones that do."""
        if worker in self._known:
            yield self._known[worker]
        for _ in range(ATTEMPTS):
            client = self._connection()
            if client.pion_stats()["worker"] == worker:
                yield client
            else:
                client.close()

    def _connection(self) -> Client:
        return Client(self._url, timeout=self._timeout)
