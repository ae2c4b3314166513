"""A dispatcher over an empty store, without sockets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pion_server.commands.context import Server
from pion_server.commands.dispatcher import Dispatcher
from pion_server.config import Config
from pion_server.tenants import Client, Tenant, Tenants


class Session:
    """One client of a server of its own; call it with a command's words."""

    def __init__(self, **options: Any) -> None:
        config = Config(**options)
        self.server = Server(config, Tenants(config))
        self.client = Client("127.0.0.1:5", "127.0.0.1:1974")
        if self.server.tenants.open:
            self.server.tenants.open.admit(self.client)
        self._dispatcher = Dispatcher(self.server)

    @property
    def tenant(self) -> Tenant:
        """The one it is logged in as."""
        assert self.client.tenant is not None
        return self.client.tenant

    def __call__(self, *words: bytes | str | memoryview) -> Any:
        args = [word.encode() if isinstance(word, str) else word for word in words]
        return self._dispatcher.dispatch(self.client, args)


@pytest.fixture
def session() -> Session:
    """With the options' defaults."""
    return Session()


@pytest.fixture(scope="session")
def open_session() -> Callable[..., Session]:
    """Opens a Session with options: open_session(max_memory=1000)."""
    return Session
