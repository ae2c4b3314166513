"""Invariant: whatever becomes of the server, LMCache gets right bytes or a miss, in time, and all
is as before once the server is well: the defects of LMCache's own clients are not ours.

What they do in lmcache 0.5.6, and what shows that ours does not:
- a look-up loses its answer and waits for ever: test_a_thousand_look_ups_by_many_threads
- a value of another size, or a dead connection, is a hit with junk in it:
  test_a_value_of_another_size, test_killed_while_chunks_move, test_bad_replies
- the get of an absent key wedges a worker: test_misses_wedge_nothing
- an error as a reply puts the connection out of step: test_bad_replies[errors]
- it never reconnects: test_killed_and_restarted, test_connections_that_close_while_they_are_idle,
  test_a_server_that_comes_up_later
- slow replies kill its workers one by one: test_more_stalls_than_lmcache_has_workers
- later chunks move up into a hole: test_evicted_between_look_up_and_get, and
  test_connector.py::test_the_leading_run_is_all_that_a_non_blocking_get_returns
- close() deadlocks: test_closing_with_work_under_way, test_an_engine_that_closes_while_it_stores
- every key is said to be there, with no server: test_killed_and_restarted
- user and password change places: test_connector.py::test_users_see_keys_of_their_own
- one odd-sized chunk fails its whole batch: test_l2_adapter.py::
  test_chunks_of_different_sizes_in_one_batch, test_one_chunk_that_cannot_be_stored_fails_alone
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="needs lmcache (Linux): make lmcache")

import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder

from integrations.lmcache.tests import engines
from integrations.lmcache.tests.backends import PATIENCE, bits, release
from integrations.lmcache.tests.proxy import FAULTS
from integrations.lmcache.tests.servers import free_port
from pion_server.client import Client


def recovered(backend: Any, keys: Any, contents: Any) -> None:
    """Within PATIENCE the chunks are hits again, though nobody did anything about it."""
    give_up = time.monotonic() + PATIENCE
    while (found := backend.get(keys)) != contents:
        assert found == [None] * len(keys), "wrong bytes"
        assert time.monotonic() < give_up, "it never recovers"
        time.sleep(0.05)


# -- the server goes away -----------------------------------------------------------------------


def test_killed_and_restarted(own_pion: Any, connect: Any) -> None:
    server = own_pion()
    backend = connect(server.url)
    keys, contents = backend.stored(3)
    assert backend.get(keys) == contents
    server.kill()
    assert backend.get(keys) == [None] * 3
    assert not backend.remote.contains(keys[0])
    backend.stored(2)  # a store that fails is no error either
    server.restart()
    assert backend.get(keys) in ([None] * 3, contents)
    give_up = time.monotonic() + PATIENCE
    again, contents = backend.stored(3)
    while backend.remote.batched_contains(again) < 3:
        assert time.monotonic() < give_up, "it never recovers"
        again, contents = backend.stored(3)
    assert backend.get(again) == contents
    assert backend.in_use == 0


def test_killed_while_chunks_move(own_pion: Any, connect: Any) -> None:
    server = own_pion()
    backend = connect(server.url)
    keys, contents = backend.stored(20)
    wrong: list[Any] = []

    def reads() -> None:
        for _ in range(50):
            found = backend.get(keys)
            wrong.extend(
                one for one, right in zip(found, contents, strict=True) if one not in (None, right)
            )

    readers = [threading.Thread(target=reads) for _ in range(3)]
    for reader in readers:
        reader.start()
    time.sleep(0.05)
    server.kill()
    server.restart()
    for reader in readers:
        reader.join(PATIENCE)
        assert not reader.is_alive()
    assert not wrong
    assert backend.in_use == 0


def test_connections_that_close_while_they_are_idle(proxy: Any, connect: Any) -> None:
    backend = connect(proxy.url)
    keys, contents = backend.stored(2)
    for _ in range(5):
        proxy.disconnect()
        assert backend.get(keys) == contents
        assert backend.remote.batched_contains(keys) == 2


def test_a_server_that_comes_up_later(own_pion: Any, connect: Any) -> None:
    port = free_port()
    backend = connect(f"pion://127.0.0.1:{port}")
    assert backend.get(backend.keys(1)) == [None]
    own_pion(port=port)
    keys, contents = backend.keys(1), []
    give_up = time.monotonic() + PATIENCE
    while not contents or not backend.remote.contains(keys[0]):
        assert time.monotonic() < give_up
        keys, contents = backend.stored(1)
    assert backend.get(keys) == contents


# -- the server is not well ---------------------------------------------------------------------


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "pass"])
def test_bad_replies(url: str, proxy: Any, connect: Any, fault: str) -> None:
    patient, backend = connect(url), connect(proxy.url, timeout=0.5)
    keys, contents = patient.stored(3)
    proxy.mode = fault
    for _ in range(3):
        for found, right in zip(backend.get(keys), contents, strict=True):
            assert found in (None, right)
        backend.remote.batched_contains(keys)
        backend.stored(1)
    proxy.mode = "pass"
    if fault == "flip":  # the chunks that came wrong were dropped, so they are stored again
        keys, contents = patient.stored(3)
    recovered(backend, keys, contents)
    assert backend.in_use == 0


def test_a_flipped_bit_is_a_miss_and_makes_room_for_the_right_bytes(
    proxy: Any, connect: Any
) -> None:
    backend = connect(proxy.url)
    keys, _ = backend.stored(1)
    proxy.mode = "flip"
    assert backend.get(keys) == [None]
    proxy.mode = "pass"
    assert not backend.remote.contains(keys[0])
    assert backend.connector.engine.counts["corrupt"] == 1


def test_a_hanging_server_costs_its_timeout_once(proxy: Any, connect: Any) -> None:
    backend = connect(proxy.url, timeout=2, retry_after=60)
    keys, _ = backend.stored(1)
    proxy.mode = "hang"
    assert backend.get(keys) == [None]
    assert backend.connector.engine.remote.away
    asked = backend.connector.engine.remote.errors["DeadlineExceeded"]
    for _ in range(100):
        assert backend.get(keys) == [None]
        assert not backend.remote.contains(keys[0])
    assert backend.connector.engine.remote.errors["DeadlineExceeded"] == asked == 1
    assert backend.call(backend.remote.connection.ping()) == 1
    proxy.mode = "pass"
    assert backend.call(backend.remote.connection.ping()) == 0  # and is used again at once
    assert backend.remote.contains(keys[0])


def test_more_stalls_than_lmcache_has_workers(url: str, proxy: Any, connect: Any) -> None:
    backend = connect(proxy.url, timeout=0.2, retry_after=0)
    keys, contents = connect(url).stored(2)
    proxy.mode = "hang"
    for _ in range(10):
        assert backend.get(keys) == [None, None]
    proxy.mode = "pass"
    recovered(backend, keys, contents)


def test_a_thousand_look_ups_by_many_threads(url: str, connect: Any) -> None:
    backend = connect(url)
    keys, _ = backend.stored(4)
    answers: list[int] = []

    def asks() -> None:
        answers.extend(backend.remote.batched_contains(keys) for _ in range(200))

    threads = [threading.Thread(target=asks) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert answers == [4] * 1000


def test_misses_wedge_nothing(url: str, connect: Any) -> None:
    backend = connect(url)
    absent = backend.keys(20)
    assert [backend.remote.get_blocking(key) for key in absent] == [None] * 20
    assert backend.get(absent) == [None] * 20
    assert not any(backend.remote.contains(key) for key in absent)
    keys, contents = backend.stored(1)
    assert backend.get(keys) == contents


# -- under a whole engine -----------------------------------------------------------------------

TOKENS = list(range(8 * engines.CHUNK))


def retrieved(engine: Any, kv: torch.Tensor) -> int:
    """How many tokens the engine finds; each of them must have the right bits."""
    engine.lookup(TOKENS)
    found = torch.zeros_like(kv)
    mask = engine.retrieve(TOKENS, kv=found)
    rows, right = (each.view(torch.int16)[:, :, mask] for each in (found, kv))
    assert torch.equal(rows, right), "wrong bytes"
    return int(mask.sum())


def stored_again(engine: Any, kv: torch.Tensor) -> None:
    """Store until all is found, as an engine does that meets the same prompt over and over."""
    give_up = time.monotonic() + PATIENCE
    while retrieved(engine, kv) < len(TOKENS):
        assert time.monotonic() < give_up, "it never recovers"
        engine.store(TOKENS, kv=kv)
        time.sleep(0.05)


@pytest.mark.parametrize("fault", [*(fault for fault in FAULTS if fault != "pass"), "hang"])
def test_an_engine_whose_server_is_not_well(proxy: Any, fault: str) -> None:
    options = {"timeout": 0.3, "retry_after": 0.1, "prefix": f"engine {fault}/"}
    engine = engines.engine(engines.plugin(proxy.url, **options))
    kv = engines.random_kv(len(TOKENS), seed=3)
    stored_again(engine, kv)
    proxy.mode = fault
    for _ in range(3):
        retrieved(engine, kv)
        engine.store(TOKENS, kv=kv)
    proxy.mode = "pass"
    stored_again(engine, kv)
    closed(engine)


def test_an_engine_whose_server_is_killed(own_pion: Any) -> None:
    server = own_pion()
    engine = engines.engine(engines.plugin(server.url, timeout=0.5, retry_after=0.1))
    kv = engines.random_kv(len(TOKENS), seed=4)
    stored_again(engine, kv)
    engine.store(TOKENS, kv=kv)
    server.kill()
    assert retrieved(engine, kv) == 0
    engine.store(TOKENS, kv=kv)
    server.restart()
    stored_again(engine, kv)
    closed(engine)


# -- between a look-up and its get --------------------------------------------------------------


def test_evicted_between_look_up_and_get(url: str, connect: Any) -> None:
    backend = connect(url)
    keys, contents = backend.stored(3)
    assert backend.remote.batched_contains(keys) == 3
    with Client(url) as client:
        client.prefix_drop(backend.connector._name(keys[1]))
    assert backend.get(keys) == [contents[0], None, contents[2]]
    found = backend.call(backend.remote.batched_get_non_blocking("id", keys))
    assert [bits(obj) for obj in found] == contents[:1]
    release(found)


def test_a_full_server_evicts_and_never_fails(own_pion: Any, connect: Any) -> None:
    size = 4 * engines.LAYERS * engines.CHUNK * engines.WIDTH
    backend = connect(own_pion("--max-memory", str(10 * size)).url)
    for _ in range(5):
        keys, contents = backend.stored(8)
        found = backend.get(keys)
        assert all(one in (None, right) for one, right in zip(found, contents, strict=True))
        assert found[-1] == contents[-1]
    assert not backend.connector.engine.remote.errors.snapshot()


@pytest.mark.parametrize("rows", [-1, 1])
def test_a_value_of_another_size(url: str, connect: Any, rows: int) -> None:
    backend = connect(url)
    keys, contents = backend.stored(2)
    name, layout = backend.connector._name(keys[0]), backend.connector.layout
    other = bytes(2 * layout.dim * (layout.rows + rows))
    with Client(url) as client:
        client.prefix_drop(name)
        fingerprint = backend.connector._fingerprint
        client.prefix_register(
            name, layout.dim, "bf16", layers=1, tokens=layout.rows + rows, fingerprint=fingerprint
        )
        client.prefix_store(name, 0, layout.rows + rows, [(other, other)], fmt="NATIVE")
    assert backend.get(keys) == [None, contents[1]]
    assert backend.in_use == 0


def test_another_fingerprint(url: str, connect: Any) -> None:
    backend = connect(url)
    keys, contents = backend.stored(2)
    name, layout = backend.connector._name(keys[0]), backend.connector.layout
    with Client(url) as client:
        client.prefix_drop(name)
        client.prefix_register(name, layout.dim, "bf16", fingerprint="ab" * 16)
    assert backend.get(keys) == [None, contents[1]]


# -- cancellation and the end -------------------------------------------------------------------


def test_a_hundred_cancelled_gets(url: str, connect: Any) -> None:
    backend = connect(url)
    keys, contents = backend.stored(5)
    chance = random.Random(1)
    for _ in range(100):
        job = asyncio.run_coroutine_threadsafe(
            backend.remote.connection.batched_get(keys), backend.loop
        )
        time.sleep(chance.uniform(0, 0.003))
        if not job.cancel():
            release(job.result())
    assert backend.get(keys) == contents
    give_up = time.monotonic() + PATIENCE
    while backend.in_use and time.monotonic() < give_up:
        time.sleep(0.01)
    assert backend.in_use == 0


def test_a_cancelled_get_keeps_its_buffer_until_the_transfer_is_over(
    proxy: Any, connect: Any
) -> None:
    backend = connect(proxy.url, timeout=1)
    keys, _ = backend.stored(1)
    proxy.mode = "hang"
    job = asyncio.run_coroutine_threadsafe(backend.remote.connection.get(keys[0]), backend.loop)
    time.sleep(0.2)
    assert job.cancel()
    time.sleep(0.1)
    assert backend.in_use > 0
    give_up = time.monotonic() + PATIENCE
    while backend.in_use and time.monotonic() < give_up:
        time.sleep(0.01)
    assert backend.in_use == 0


@pytest.mark.parametrize("mode", ["pass", "hang"])
def test_closing_with_work_under_way(proxy: Any, connect: Any, mode: str) -> None:
    backend = connect(proxy.url, timeout=0.3)
    keys, _ = backend.stored(3)
    proxy.mode = mode
    jobs = [
        asyncio.run_coroutine_threadsafe(backend.remote.connection.batched_get(keys), backend.loop)
        for _ in range(8)
    ]
    closing = threading.Thread(target=backend.remote.close, daemon=True)
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    for job in jobs:
        if not job.cancelled() and job.exception(PATIENCE) is None:
            release(job.result())
    assert not backend.remote.contains(keys[0])
    assert backend.remote.batched_contains(keys) == 0
    assert backend.get(keys) == [None] * 3
    assert backend.in_use == 0


def closed(engine: Any) -> None:
    closing = threading.Thread(
        target=LMCacheEngineBuilder.destroy, args=(engine.name,), daemon=True
    )
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive()


@pytest.mark.parametrize("mode", ["pass", "hang"])
def test_an_engine_that_closes_while_it_stores(proxy: Any, mode: str) -> None:
    """LMCache frees its memory before it closes the connector that still reads from it."""
    tokens = list(range(40 * engines.CHUNK))
    kv = engines.random_kv(len(tokens), seed=5)
    for attempt in range(5):
        proxy.mode = "pass"
        settings = engines.plugin(proxy.url, timeout=0.3, prefix=f"{mode}-{attempt}/")
        engine = engines.engine(settings)
        proxy.mode = mode
        engine.store(tokens, kv=kv)
        closed(engine)
