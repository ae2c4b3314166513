"""Servers to ask, by what computes there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from softmax_oracle import Doubles, as_kept, assert_near, attention

from pion_server.attention.base import Floats, Partial
from pion_server.client import Client

from ..conftest import finish_pion, launch_pion
from ..raw import Raw

SECONDS = 60.0
OPTIONS = {
    "numpy": ["--metal-attention"],
    "numpy fp16": ["--attention", "numpy", "--metal-attention-fp16"],
    "mlx": ["--attention", "mlx"],
}


class Served:
    """A connection to a server, the backend there, and what its answers have to be near to."""

    def __init__(self, backend: str, port: int, client: Client) -> None:
        self.backend = backend
        self.client = client
        self._port = port

    @contextmanager
    def raw(self) -> Iterator[Raw]:
        """A connection whose replies are the bytes they are."""
        raw = Raw(self._port)
        yield raw
        raw.close()

    def check(
        self,
        out: Floats,
        lse: Floats | None,
        queries: Floats,
        keys: Floats,
        values: Floats,
        head_map: Any,
        seen: Any = True,
        sent_along: int = 0,
    ) -> None:
        """Against softmax in float64 over what is kept, and over the last rows as they were sent.
        An LSE of None is none to compare."""
        kept = [self._kept(side, sent_along) for side in (keys, values)]
        wanted: tuple[Doubles, Doubles]
        wanted = attention(queries, *kept, np.asarray(head_map, np.uint8), seen)
        got = Partial(out, wanted[1].astype(np.float32) if lse is None else lse)
        assert_near(got, wanted, queries, *kept)

    def _kept(self, side: Floats, sent_along: int) -> Floats:
        stored = side.shape[1] - sent_along
        return np.concatenate([as_kept(self.backend, side[:, :stored]), side[:, stored:]], axis=1)


@pytest.fixture(params=list(OPTIONS), scope="session")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Each backend behind a real server."""
    backend = str(request.param)
    server = launch_pion(tmp_path_factory.mktemp("attention") / "log", *OPTIONS[backend])
    with Client(server.url, timeout=SECONDS) as client:
        yield Served(backend, server.port, client)
    finish_pion(server)


_names = itertools.count()


@pytest.fixture
def sid() -> str:
    """A session id that nobody has used."""
    return f"attention-{next(_names)}"


@pytest.fixture
def connect(start_pion: Callable[..., Any]) -> Iterator[Callable[..., Client]]:
    """connect("--attend-slots", "3"): a server of one's own, and a connection to it."""
    clients: list[Client] = []

    def connect(*options: str) -> Client:
        clients.append(Client(start_pion(*options).url, timeout=SECONDS))
        return clients[-1]

    yield connect
    for each in clients:
        each.close()
