"""A TCP proxy that breaks what passes through it, by the word in `mode`."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable

HEADER_BYTES = 64  # a header, and what stands in small payloads, is shorter
# mode -> what becomes of bytes that the server sent; None closes the connection.
Fault = Callable[[bytes], bytes | None]


def _flipped(data: bytes) -> bytes:
    """A byte in the middle of a payload changed, wherever the pieces begin that come: one with no
    header near it. Replies without a payload stay as they are."""
    for at in range(len(data) // 2, len(data) - HEADER_BYTES):
        if len(data) >= 4096 and b"\r\n" not in data[at - HEADER_BYTES : at + HEADER_BYTES]:
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    return data


FAULTS: dict[str, Fault] = {
    "pass": lambda data: data,
    "garbage": lambda data: random.Random(len(data)).randbytes(len(data)),
    "errors": lambda data: b"-OOM nothing fits\r\n",
    "zeros": lambda data: bytes(len(data)),
    "cut": lambda data: None,
    "flip": _flipped,
}


class Proxy:
    """Forwards to `port` of this machine. In the mode "hang" no reply comes back."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self.mode = "pass"
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"pion://127.0.0.1:{self.port}"

    def disconnect(self) -> None:
        """Close the connections that are open."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed = True
        self.disconnect()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for sock in (self._listener, *self._sockets):
            sock.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                continue
            self._sockets += [client, server]
            for run in (self._requests, self._replies):
                threading.Thread(target=run, args=(client, server), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        self._pump(client, server, lambda data: data)

    def _replies(self, client: socket.socket, server: socket.socket) -> None:
        self._pump(server, client, self._broken)

    def _broken(self, data: bytes) -> bytes | None:
        return b"" if self.mode == "hang" else FAULTS[self.mode](data)

    def _pump(self, source: socket.socket, target: socket.socket, fault: Fault) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                passed = fault(data)
                if passed is None:
                    break
                target.sendall(passed)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
