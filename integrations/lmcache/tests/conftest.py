"""What these tests share: servers, backends of LMCache, and a way to break what passes between."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from integrations.lmcache.tests.proxy import Proxy
from integrations.lmcache.tests.servers import Server


@pytest.fixture(scope="session")
def pion(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One pion-server for all tests that do not harm it."""
    server = Server.pion(tmp_path_factory.mktemp("pion") / "log")
    yield server
    server.finish()


@pytest.fixture
def url(pion: Server) -> str:
    return pion.url


@pytest.fixture
def own_pion(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """`own_pion(*options, port=None)`: a pion-server of the test's own."""
    servers: list[Server] = []

    def start(*options: str, port: int | None = None) -> Server:
        servers.append(Server.pion(tmp_path / f"pion-{len(servers)}.log", *options, port=port))
        return servers[-1]

    yield start
    for server in servers:
        server.finish()


@pytest.fixture
def proxy(pion: Server) -> Iterator[Proxy]:
    """A proxy in front of the server."""
    made = Proxy(pion.port)
    yield made
    made.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., Any]]:
    """`connect(url, **options)`: a RemoteBackend of LMCache's with our connector."""
    # LMCache is imported by the first test that needs it: not at all where all are skipped.
    backends = importlib.import_module("integrations.lmcache.tests.backends")
    engines = importlib.import_module("integrations.lmcache.tests.engines")
    made: list[Any] = []

    def make(url: str, metadata: Any = None, **options: Any) -> Any:
        options = {"timeout": 2, "retry_after": 0.1, **options}
        made.append(backends.Backend(engines.plugin(url, **options), metadata))
        return made[-1]

    yield make
    for backend in made:
        backend.close()
