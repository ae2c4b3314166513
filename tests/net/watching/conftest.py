"""Real servers with --metrics-port, seen through a plain HTTP client and a plain Redis client."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import redis


@dataclass(frozen=True)
class Watched:
    """A server and the address of its pages."""

    server: Any
    url: str

    @property
    def web_port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def get(self, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
        """One request; the reply's `text` is what came with it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.web_port, timeout=60)
        connection.request(method, path, headers=headers)
        reply: Any = connection.getresponse()
        reply.text = reply.read().decode()
        connection.close()
        return reply

    def json(self, path: str) -> Any:
        reply: Any = self.get(path)
        return json.loads(reply.text)

    def client(self, user: str | None = None, password: str | None = None) -> redis.Redis:
        return redis.Redis(port=self.server.port, username=user, password=password, protocol=3)


def watch_over(server: Any) -> Watched:
    """A server that was started with --metrics-port."""
    found = re.search(r"health: (\S+)", server.log.read_text())
    assert found
    return Watched(server, found[1])


Watch = Callable[..., Watched]


@pytest.fixture
def watch(start_pion: Any) -> Watch:
    """watch("--requirepass", "x"): a server with these options and pages on a free port."""

    def watch(*args: str, port: int = 0) -> Watched:
        return watch_over(start_pion("--metrics-port", str(port), *args))

    return watch


@pytest.fixture
def watched(watched_pion: Any) -> Watched:
    """The server that all tests share."""
    return watch_over(watched_pion)


def store(client: redis.Redis, ns: str, tokens: int, *options: object) -> None:
    """A prefix of one layer and one fp32 value a row, so 8 bytes a token."""
    words = (ns, 1, "fp32", "LAYERS", 1, "TOKENS", tokens, *options)
    client.execute_command("KV.PREFIX.REGISTER", *words)
    blob = bytes(4 * tokens)
    client.execute_command("KV.PREFIX.STORE", ns, 0, tokens, "DATA", blob, blob)


@pytest.fixture
def stored() -> Callable[..., None]:
    return store


@pytest.fixture
def full_disk() -> Callable[[Watched], AbstractContextManager[None]]:
    """with full_disk(watched): no file of the server grows beyond 1 MB, and a write of 2 MB waits.
    At the end there is room again, and the write is acknowledged."""
    if not hasattr(psutil, "RLIMIT_FSIZE"):
        pytest.skip("fails the server's writes through prlimit, which only Linux has")

    @contextmanager
    def full(watched: Watched) -> Iterator[None]:
        process = psutil.Process(watched.server.pid)
        limits = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (1 << 20, limits[1]))
        with socket.create_connection(("127.0.0.1", watched.server.port), 60) as sock:
            value = bytes(2 << 20)
            sock.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n%b\r\n" % (len(value), value))
            yield
            process.rlimit(psutil.RLIMIT_FSIZE, limits)
            assert sock.recv(100) == b"+OK\r\n"

    return full
