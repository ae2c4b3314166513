"""Both clients behind one face, and a server that does what a script says.

`connect` runs a test three times: with the blocking client, and with the async one on asyncio's
own loop and on uvloop's. `fake` answers each connection by a script of its own.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import uvloop

from pion_server.client import AsyncClient, Call, Client, PionError
from pion_server.client.methods import Commands
from pion_server.wire.limits import Limits
from pion_server.wire.requests import RequestDecoder

T = TypeVar("T")
PATIENCE = 20.0  # for things that happen at once unless something is broken


class OnLoop(Commands):
    """An AsyncClient on an event loop of its own, called from a plain thread."""

    def __init__(self, url: str, *, timeout: float, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.Thread(target=loop.run_forever)
        self._thread.start()
        self.client = AsyncClient(url, timeout=timeout)

    def execute(self, call: Call[T], *, timeout: float | None = None) -> T:
        return self._wait(self.client.execute(call, timeout=timeout))

    def pipeline(
        self, calls: Sequence[Call[T]], *, timeout: float | None = None
    ) -> list[T | PionError]:
        return self._wait(self.client.pipeline(calls, timeout=timeout))

    def close(self) -> None:
        self._wait(self.client.close())

    def end(self) -> None:
        self.close()
        self._wait(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __repr__(self) -> str:
        return repr(self.client)

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.SelectorEventLoop,
    "uvloop": uvloop.new_event_loop,
}
Connect = Callable[..., Client | OnLoop]


@pytest.fixture(params=["resp", "fast", "unix"])
def url(request: pytest.FixtureRequest, pion_server: Any) -> str:
    """A real server, by every way in."""
    return str(pion_server.urls[request.param])


@pytest.fixture(params=["blocking", *LOOPS])
def kind(request: pytest.FixtureRequest) -> str:
    """Which client."""
    return str(request.param)


@pytest.fixture
def connect(kind: str, fake: object) -> Iterator[Connect]:
    """Makes clients: connect(url, timeout=5.0). They are closed before the fake server's scripts,
    some of which wait for that, are asked how it went."""
    clients: list[Client | OnLoop] = []

    def make(url: str, *, timeout: float = 5.0) -> Client | OnLoop:
        if kind == "blocking":
            clients.append(Client(url, timeout=timeout))
        else:
            clients.append(OnLoop(url, timeout=timeout, loop=LOOPS[kind]()))
        return clients[-1]

    yield make
    for client in clients:
        client.close() if isinstance(client, Client) else client.end()


class Peer:
    """The server's end of one connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.decoder = RequestDecoder(Limits())

    def request(self) -> list[bytes]:
        """The next request. Raises EOFError where the client closes instead."""
        while (args := self.decoder.next_request()) is None:
            nbytes = self.sock.recv_into(self.decoder.get_buffer())
            if not nbytes:
                raise EOFError("the client closed the connection instead of sending a request")
            self.decoder.buffer_updated(nbytes)
        return [bytes(arg) for arg in args]

    def greet(self) -> None:
        """The handshake."""
        assert self.request()[:2] == [b"HELLO", b"3"]
        self.send(b"%1\r\n$6\r\nserver\r\n$4\r\nfake\r\n")

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def closed_by_client(self) -> None:
        """Wait for the end of the connection, passing over what still comes."""
        try:
            while self.sock.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass

    def reset(self) -> None:
        """Close with a RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


Script = Callable[[Peer], None]


class Fake:
    """Runs the i-th script on the i-th connection, and closes what is left open at its end."""

    def __init__(self, scripts: Sequence[Script], tls: ssl.SSLContext | None) -> None:
        self._scripts = scripts
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"pion://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        self.failures: list[BaseException] = []
        self.accepted = 0

    def _accept(self) -> None:
        for script in self._scripts:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            thread = threading.Thread(target=self._run, args=(script, sock), daemon=True)
            self._threads.append(thread)
            thread.start()
        self._listener.close()  # a connection too many is refused

    def _run(self, script: Script, sock: socket.socket) -> None:
        sock.settimeout(PATIENCE)
        with sock:
            try:
                if self._tls is None:
                    script(Peer(sock))
                else:
                    with self._tls.wrap_socket(sock, server_side=True) as encrypted:
                        script(Peer(encrypted))
            except BaseException as failure:
                self.failures.append(failure)

    def finish(self) -> None:
        """Every script ran to its end; raises what went wrong in one."""
        self._listener.close()
        for thread in self._threads[1:]:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a script did not end"
        for failure in self.failures:
            raise failure


@pytest.fixture
def fake() -> Iterator[Callable[..., Fake]]:
    """Makes servers: fake(script, script, ...), fake(script, tls=context)."""
    fakes: list[Fake] = []

    def make(*scripts: Script, tls: ssl.SSLContext | None = None) -> Fake:
        fakes.append(Fake(scripts, tls))
        return fakes[-1]

    yield make
    for server in fakes:
        server.finish()
