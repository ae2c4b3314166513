"""Raw RESP in the hand. It shares nothing with pion_server.wire, so it is an independent judge."""

from __future__ import annotations

import socket
import ssl
from typing import TypeAlias

SECONDS = 60.0
Word: TypeAlias = bytes | memoryview | str | int


def request(*words: Word) -> bytes:
    """A command as an array of bulks."""
    octets = [w if isinstance(w, bytes | memoryview) else str(w).encode() for w in words]
    return b"*%d\r\n" % len(octets) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in octets)


class Raw:
    """A connection whose replies are the bytes they are."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), SECONDS)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        self._file = self.socket.makefile("rb")

    def ask(self, *words: Word) -> bytes:
        """A command and the frame of its reply; empty where the server closes instead."""
        self.send(*words)
        return self.reply()

    def send(self, *words: Word) -> None:
        self.socket.sendall(request(*words))

    def reply(self) -> bytes:
        line = self._file.readline()
        count = int(line[1:]) if line[:1] in (b"$", b"*", b"%") else 0
        if line[:1] == b"$":
            return line + self._file.read(count + 2 if count >= 0 else 0)
        children = count * (2 if line[:1] == b"%" else 1)
        return line + b"".join(self.reply() for _ in range(children))

    def closed(self) -> bool:
        """Wait for the server's end of it; nothing more may come before."""
        try:
            return self._file.read() == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self._file.close()
        self.socket.close()
