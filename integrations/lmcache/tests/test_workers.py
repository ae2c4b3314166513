"""Invariant: on a server of several workers a chunk is found wherever it lives, and a worker that
is killed costs misses at most, until it is back.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="needs lmcache (Linux): make lmcache")

import torch

from integrations.lmcache.tests.backends import PATIENCE, Backend
from integrations.lmcache.tests.l2 import Adapter, fresh, obj
from integrations.lmcache.tests.servers import Server
from pion_server.client import Client

WORKERS = 4
CHUNKS = 12
# A process that starts on a busy machine; below LMCache's blocking_timeout_secs.
SECONDS = 6


@pytest.fixture
def four(own_pion: Callable[..., Server], tmp_path: Any) -> Server:
    """A server of four workers, each of which is back with what it held when it is killed."""
    return own_pion("-w", str(WORKERS), "--data-dir", str(tmp_path / "data"))


def ports(server: Server) -> list[str]:
    """URLs, each of one worker alone: what it stores lives there."""
    with Client(server.url, timeout=PATIENCE) as client:
        return [f"pion://127.0.0.1:{each.port}" for each in client.pion_workers()]


def kill_worker(server: Server, number: int) -> None:
    """SIGKILL; the supervisor starts another one in its place."""
    with Client(server.url, timeout=PATIENCE) as client:
        os.kill(client.pion_workers()[number].pid, signal.SIGKILL)


def spread(server: Server, connect: Callable[..., Backend]) -> tuple[list[Any], list[bytes]]:
    """Chunks in turn on all workers: their keys and bytes."""
    stored = [connect(url, timeout=SECONDS).stored(CHUNKS // WORKERS) for url in ports(server)]
    keys = [key for turn in zip(*(keys for keys, _ in stored), strict=True) for key in turn]
    return keys, [content for turn in zip(*(c for _, c in stored), strict=True) for content in turn]


def test_a_batch_of_all_workers(four: Server, connect: Callable[..., Backend]) -> None:
    keys, contents = spread(four, connect)
    for url in (four.url, *ports(four)):
        backend = connect(url, timeout=SECONDS)
        assert backend.remote.batched_contains(keys) == CHUNKS
        assert backend.get(keys) == contents
        backend.put(keys, held := backend.chunks(CHUNKS))  # all there: nothing is sent
        for each in held:
            each.ref_count_down()
        assert backend.connector.engine.counts["there"] == CHUNKS
        assert not backend.connector.engine.remote.errors.snapshot()
    assert all(backend.remote.remove(key) for key in keys)
    assert backend.get(keys) == [None] * CHUNKS


def test_a_worker_is_killed_while_chunks_move(
    four: Server, connect: Callable[..., Backend]
) -> None:
    keys, contents = spread(four, connect)
    backend = connect(four.url, timeout=SECONDS)
    wrong: list[Any] = []
    over = threading.Event()

    def reads() -> None:
        while not over.is_set():
            found = backend.get(keys)
            wrong.extend(
                one for one, right in zip(found, contents, strict=True) if one not in (None, right)
            )

    readers = [threading.Thread(target=reads) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(WORKERS):
        kill_worker(four, number)
        new, _ = backend.stored(2)
        backend.remote.batched_contains(new)
    give_up = time.monotonic() + PATIENCE
    while backend.get(keys) != contents:  # by itself, and all of it
        assert time.monotonic() < give_up, "it never recovers"
    over.set()
    for reader in readers:
        reader.join(PATIENCE)
        assert not reader.is_alive()
    assert not wrong
    again, contents = backend.stored(CHUNKS)
    assert backend.get(again) == contents
    assert backend.in_use == 0


def test_the_second_level_on_all_workers(four: Server) -> None:
    keys, objects = fresh(CHUNKS), [obj(seed=i + 1) for i in range(CHUNKS)]
    for number, url in enumerate(ports(four)):
        writer = Adapter(url, timeout=SECONDS)
        assert writer.store(keys[number::WORKERS], objects[number::WORKERS]).is_successful()
        writer.inner.close()
    reader = Adapter(four.url, timeout=SECONDS)
    assert reader.look_up(keys) == [True] * CHUNKS
    kill_worker(four, 1)
    give_up = time.monotonic() + PATIENCE
    while not all(loaded := reader.load(keys, buffers := [obj() for _ in keys])):
        assert time.monotonic() < give_up, "it never recovers"
        for whole, buffer, right in zip(loaded, buffers, objects, strict=True):
            assert not whole or torch.equal(buffer.raw_data, right.raw_data)
    assert all(
        torch.equal(buffer.raw_data, right.raw_data)
        for buffer, right in zip(buffers, objects, strict=True)
    )
    reader.inner.delete(keys[:-1])
    assert reader.look_up(keys) == [False] * (CHUNKS - 1) + [True]
    reader.inner.close()
