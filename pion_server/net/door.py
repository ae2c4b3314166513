"""The way in: from listening sockets to connections, through the TLS handshake if there is one.

Accepting is done here and not by asyncio's server, which keeps what is in a handshake to itself: as
many as like could stand there. In the lobby they are counted, and give way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any

from pion_server.net.lobby import Lobby
from pion_server.wire.tcp import tcp_options

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0
# How long a peer may take to close its side of a TLS connection once ours is closed.
CLOSING_SECONDS = 5.0
# After a failed accept, most likely for want of a file descriptor: not at once again.
PAUSE_SECONDS = 0.1


class Arrival:
    """A socket on its way to being a connection; in the lobby for as long as that takes."""

    def __init__(self, work: asyncio.Task[None], lobby: Lobby) -> None:
        self._work = work
        lobby.enter(self)
        work.add_done_callback(lambda _: lobby.leave(self))

    def abort(self) -> None:
        self._work.cancel()


class Door:
    """Accepts, and hands each socket to a protocol of its own from `make` once it is ready."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        lobby: Lobby,
        tls: ssl.SSLContext | None,
        make: Callable[[], asyncio.BufferedProtocol],
    ) -> None:
        self._listeners = listeners
        self._lobby = lobby
        self._make = make
        self._options: dict[str, Any] = {}
        if tls is not None:
            self._options = {
                "ssl": tls,
                "ssl_handshake_timeout": HANDSHAKE_SECONDS,
                "ssl_shutdown_timeout": CLOSING_SECONDS,
            }

    def open(self) -> None:
        """From now on, on the running loop."""
        self._work = [asyncio.create_task(self._accept(each)) for each in self._listeners]

    async def close(self) -> None:
        """Nobody comes in any more."""
        for work in self._work:
            work.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            Arrival(asyncio.create_task(self._connect(sock)), self._lobby)

    async def _connect(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        # OSError is all that a peer can do wrong: no TLS, a wrong certificate, too slow, gone.
        with contextlib.suppress(OSError):
            if sock.family != socket.AF_UNIX:
                for option in tcp_options(sock.getpeername()[0]):
                    sock.setsockopt(*option)
            await loop.connect_accepted_socket(self._make, sock, **self._options)
