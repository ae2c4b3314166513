"""Sockets in the hand: what is sent, in which pieces and when; what is read, and what is left."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from ..raw import SECONDS, Word, request

PIECE = 1 << 20


class Wire:
    """One connection. Replies are compared as the bytes they are."""

    request = staticmethod(request)

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="127.0.0.1")

    def send(self, *words: Word) -> None:
        self.socket.sendall(request(*words))

    def write(self, data: bytes | memoryview) -> None:
        self.socket.sendall(data)

    def take(self, nbytes: int) -> bytes:
        """Exactly so many bytes; fewer if the server closes before."""
        parts, left = [], nbytes
        while left and (part := self.socket.recv(min(left, PIECE))):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def expect(self, reply: bytes) -> None:
        """The next bytes are these."""
        assert self.take(len(reply)) == reply

    def expect_bulk(self, pattern: bytes, repeats: int) -> None:
        """The next reply is a bulk that repeats `pattern`; compared piece by piece."""
        self.expect(b"$%d\r\n" % (len(pattern) * repeats))
        for _ in range(repeats):
            assert self.take(len(pattern)) == pattern
        self.expect(b"\r\n")

    def ask(self, *words: Word) -> bytes:
        """A command whose reply is one short line."""
        self.send(*words)
        return self.line()

    def line(self) -> bytes:
        line = b""
        while not line.endswith(b"\r\n"):
            byte = self.socket.recv(1)
            assert byte, f"the server closed; {line!r} was left"
            line += byte
        return line

    def rest(self) -> bytes:
        """Everything until the server closes."""
        parts = []
        while part := self.socket.recv(PIECE):
            parts.append(part)
        return b"".join(parts)

    def half_close(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.socket.close()

    def reset(self) -> None:
        """Close as a process that was killed with unread data does: with RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.socket.close()


Dial = Callable[..., Wire]


@pytest.fixture
def dial() -> Iterator[Dial]:
    """Opens connections: dial(port), dial(port, context) over TLS."""
    wires: list[Wire] = []

    def dial(port: int, tls: ssl.SSLContext | None = None) -> Wire:
        wires.append(Wire(port, tls))
        return wires[-1]

    yield dial
    for wire in wires:
        wire.close()


@pytest.fixture
def wire(pion_server: Any, dial: Dial) -> Wire:
    """A connection to the shared server."""
    return dial(pion_server.port)


@pytest.fixture(scope="session")
def eventually() -> Callable[..., None]:
    """eventually(condition): wait until it holds; what never comes is a failure."""

    def eventually(condition: Callable[[], bool]) -> None:
        give_up = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < give_up, "it never came about"
            time.sleep(0.01)

    return eventually


@pytest.fixture(scope="session")
def resident() -> Callable[[int], int]:
    """resident(pid): bytes of memory the process has now."""
    return lambda pid: int(psutil.Process(pid).memory_info().rss)
