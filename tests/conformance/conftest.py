"""Raw sockets to both servers at once: what goes out and what comes back is bytes.

The reader here knows only where a reply ends. It shares nothing with pion_server.wire, so it is an
independent judge.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest

SECONDS = 30.0


class RawClient:
    """One connection; replies are returned as the bytes they are."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._held = b""

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def reply(self) -> bytes:
        """The next whole reply."""
        line = self._line()
        kind, rest = line[:1], line[1:-2]
        if kind in b"$=" and rest != b"-1":
            return line + self._take(int(rest) + 2)
        items = {b"*": 1, b"%": 2, b"~": 1}.get(kind, 0) * (int(rest) if kind in b"*%~" else 0)
        return line + b"".join(self.reply() for _ in range(items))

    @staticmethod
    def request(words: Sequence[bytes]) -> bytes:
        """A command as a RESP array of bulk strings."""
        return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)

    def ask(self, *words: bytes) -> bytes:
        self.send(self.request(words))
        return self.reply()

    def rest(self) -> bytes:
        """No more is sent: everything until the server closes."""
        with suppress(OSError):  # the server may have closed already
            self._socket.shutdown(socket.SHUT_WR)
        while self._more():
            pass
        return self._held

    def close(self) -> None:
        self._socket.close()

    def _line(self) -> bytes:
        while b"\r\n" not in self._held:
            if not self._more():
                raise EOFError(f"the server closed; {self._held!r} was left")
        line, _, self._held = self._held.partition(b"\r\n")
        return line + b"\r\n"

    def _take(self, count: int) -> bytes:
        while len(self._held) < count:
            if not self._more():
                raise EOFError(f"the server closed; {self._held!r} was left")
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _more(self) -> bool:
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionResetError:  # it closed before it had read everything
            return False
        self._held += data
        return bool(data)


@dataclass(frozen=True)
class Both:
    """The two servers."""

    pion_port: int
    redis_port: int

    def pion(self) -> RawClient:
        return RawClient(self.pion_port)

    def redis(self) -> RawClient:
        return RawClient(self.redis_port)

    @contextmanager
    def clients(self) -> Iterator[tuple[RawClient, RawClient]]:
        """A connection to each, closed at the end."""
        with closing(self.pion()) as pion, closing(self.redis()) as redis:
            yield pion, redis


@pytest.fixture(scope="session")
def both(pion_server: Any, redis_server: Any) -> Both:
    """pion-server and redis-server, side by side."""
    return Both(pion_server.port, redis_server.port)


@pytest.fixture(scope="session")
def locked(locked_pion: Any, locked_redis: Any) -> Both:
    """The same two servers, with a password."""
    return Both(locked_pion.port, locked_redis.port)
