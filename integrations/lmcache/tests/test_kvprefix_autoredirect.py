"""Invariant: a session that lives on another worker is found there, whatever worker a connection
lands on; without auto_redirect the server's answer is what the caller sees.

The workers are scripted, each connection landing on the next one.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from pion_lmcache import PionStore

from pion_server.client import PionError
from pion_server.wire.limits import Limits
from pion_server.wire.requests import RequestDecoder

WORKERS = 4
ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


class Cluster:
    """`owner` says which worker holds every session."""

    def __init__(self) -> None:
        self.owner = 0
        self.landings = 0
        self.stored: list[tuple[int, bytes]] = []
        self._next = itertools.cycle(range(WORKERS))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for sock in (self._listener, *self.sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self.landings += 1
                self.sockets.append(sock)
                serve = threading.Thread(
                    target=self._serve, args=(sock, next(self._next)), daemon=True
                )
                serve.start()

    def _serve(self, sock: socket.socket, worker: int) -> None:
        decoder = RequestDecoder(Limits())
        with suppress(OSError):
            while True:
                while (args := decoder.next_request()) is None:
                    nbytes = sock.recv_into(decoder.get_buffer())
                    if not nbytes:
                        return
                    decoder.buffer_updated(nbytes)
                sock.sendall(self._answer([bytes(arg) for arg in args], worker))

    def _answer(self, args: list[bytes], worker: int) -> bytes:
        if args[0] == b"HELLO":
            return b"%1\r\n$5\r\nproto\r\n:3\r\n"
        if args[0] == b"PION.STATS":
            return b"%%1\r\n$6\r\nworker\r\n:%d\r\n" % worker
        if worker != self.owner:
            return b"-ERR session lives on worker %d\r\n" % self.owner
        if args[0] == b"V.STOREBATCH":
            self.stored.append((worker, args[1]))
            return b"+OK\r\n"
        if args[0] == b"V.FETCH":
            return b"$%d\r\n%s\r\n" % (ROWS.nbytes, ROWS.tobytes())
        return b"+OK\r\n"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def store_rows(store: PionStore) -> None:
    store.store_layer("ns", "K", layer=0, token_offset=0, tensor_fp32=ROWS)


@pytest.mark.parametrize("owner", range(WORKERS))
def test_every_worker_is_found(cluster: Cluster, owner: int) -> None:
    cluster.owner = owner
    with PionStore(port=cluster.port) as store:
        store.register("ns", kv_dim=4)
        store_rows(store)
        assert np.array_equal(store.fetch_layer("ns", "K", layer=0, start=0, end=2), ROWS)
        landings = cluster.landings
        store_rows(store)
        assert cluster.landings == landings  # the connection that leads there is kept
    assert cluster.stored == [(owner, b"ns_pk")] * 2


def test_a_session_that_moves_is_followed(cluster: Cluster) -> None:
    with PionStore(port=cluster.port) as store:
        for cluster.owner in (3, 1, 0, 3):
            store_rows(store)
    assert [worker for worker, _ in cluster.stored] == [3, 1, 0, 3]


def test_a_known_connection_that_comes_back_elsewhere(cluster: Cluster) -> None:
    cluster.owner = 2
    with PionStore(port=cluster.port) as store:
        store_rows(store)
        for sock in cluster.sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        store_rows(store)
    assert cluster.stored == [(2, b"ns_pk")] * 2


def test_without_it_the_answer_is_raised(cluster: Cluster) -> None:
    cluster.owner = 3
    with (
        PionStore(port=cluster.port, auto_redirect=False) as store,
        pytest.raises(PionError, match="session lives on worker 3"),
    ):
        store_rows(store)


def test_a_worker_that_does_not_exist(cluster: Cluster) -> None:
    cluster.owner = WORKERS
    with (
        PionStore(port=cluster.port) as store,
        pytest.raises(PionError, match=f"session lives on worker {WORKERS}"),
    ):
        store_rows(store)


def test_other_errors_are_not_chased(pion: Any) -> None:
    with PionStore(port=pion.port) as store, pytest.raises(PionError, match="unknown session"):
        store_rows(store)
