"""A crew of workers, and connections to one of them or to whichever comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest

from pion_server.client import Client
from pion_server.client.calls import Worker

from ..raw import Raw

SECONDS = 30.0
# A prefix of one layer and two tokens, 4 fp32 values a row.
ROWS = np.arange(8, dtype="<f4")
PREFIX = {"dim": 4, "codec": "fp32", "layers": 1, "tokens": 2}


@dataclass
class Crew:
    """A running server with workers."""

    server: Any
    _stack: ExitStack

    @property
    def port(self) -> int:
        """The one that all workers share."""
        return int(self.server.port)

    @property
    def workers(self) -> list[Worker]:
        """As they are now."""
        with Client(self.server.url) as client:
            return client.pion_workers()

    @cached_property
    def _own_ports(self) -> list[int]:
        return [each.port for each in self.workers]

    def port_of(self, worker: int | None) -> int:
        """That worker's own port; without a number, the one of all."""
        return self.port if worker is None else self._own_ports[worker]

    def raw(self, worker: int | None = None) -> Raw:
        """A connection to that worker, or to any."""
        connection = Raw(self.port_of(worker))
        self._stack.callback(connection.close)
        return connection

    def client(self, worker: int | None = None, **options: Any) -> Client:
        url = f"pion://127.0.0.1:{self.port_of(worker)}"
        return self._stack.enter_context(Client(url, timeout=SECONDS, **options))


def store_prefix(client: Client, name: str) -> None:
    """ROWS under a name, sealed."""
    client.prefix_register(name, **PREFIX)
    client.prefix_store(name, 0, 2, [(ROWS, ROWS)], fmt="FP32")


def holds_prefix(client: Client, name: str) -> bool:
    """Whether ROWS are there, and nothing else."""
    found = client.prefix_fetch(name, fmt="NATIVE")
    if found is None:
        return False
    assert [bytes(side) for side in found.rows[0]] == [ROWS.tobytes()] * 2
    return True


@pytest.fixture
def crew(pion_crew: Any) -> Iterator[Crew]:
    """The three workers of the whole run, for tests that leave them alive. Names are each test's
    own."""
    with ExitStack() as stack:
        yield Crew(pion_crew, stack)


@pytest.fixture
def start_crew(start_pion: Callable[..., Any]) -> Iterator[Callable[..., Crew]]:
    """start_crew(3, "--data-dir", folder)."""
    with ExitStack() as stack:

        def start(workers: int, *options: str) -> Crew:
            return Crew(start_pion("-w", str(workers), *options), stack)

        yield start
