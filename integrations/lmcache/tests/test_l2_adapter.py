"""Invariant: every task that LMCache's multiprocess mode submits ends with a result, whatever the
server does, and what is loaded is what was stored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="needs lmcache (Linux): make lmcache")

import torch

from integrations.lmcache.tests import engines, managers
from integrations.lmcache.tests.l2 import PATIENCE, Adapter, fresh, obj
from integrations.lmcache.tests.proxy import FAULTS


@pytest.fixture
def adapter() -> Iterator[Callable[..., Adapter]]:
    made: list[Adapter] = []

    def make(url: str, **options: Any) -> Adapter:
        made.append(Adapter(url, **options))
        return made[-1]

    yield make
    for one in made:
        one.inner.close()


def test_the_fds_are_three(url: str, adapter: Any) -> None:
    inner = adapter(url).inner
    fds = {
        inner.get_store_event_fd(),
        inner.get_load_event_fd(),
        inner.get_lookup_and_lock_event_fd(),
    }
    assert len(fds) == 3


def test_round_trip_with_holes(url: str, adapter: Any) -> None:
    one, other = adapter(url), adapter(url)
    keys, objects = fresh(5), [obj(seed=i + 1) for i in range(5)]
    stored = [0, 1, 3]
    result = one.store([keys[i] for i in stored], [objects[i] for i in stored])
    assert result.is_successful()
    assert result.bytes_transferred() == 3 * 4096
    there = [True, True, False, True, False]
    assert other.look_up(keys) == there
    buffers = [obj() for _ in keys]
    assert other.load(keys, buffers) == there
    for i in stored:
        assert torch.equal(buffers[i].raw_data, objects[i].raw_data)


def test_chunks_of_different_sizes_in_one_batch(url: str, adapter: Any) -> None:
    one = adapter(url)
    sizes, keys = [4096, 8, 65536, 24, 4096, 40], fresh(6)
    objects = [obj(nbytes, torch.uint8, seed=nbytes) for nbytes in sizes]
    assert one.store(keys, objects).is_successful()
    buffers = [obj(nbytes, torch.uint8) for nbytes in sizes]
    assert one.load(keys, buffers) == [True] * 6
    assert all(torch.equal(a.raw_data, b.raw_data) for a, b in zip(objects, buffers, strict=True))


def test_a_buffer_of_another_size_or_dtype_is_a_miss_and_only_that(url: str, adapter: Any) -> None:
    one = adapter(url)
    keys, objects = fresh(4), [obj(seed=9) for _ in range(4)]
    assert one.store(keys, objects).is_successful()
    buffers = [obj(), obj(2048), obj(8192), obj(dtype=torch.float16)]
    assert one.load(keys, buffers) == [True, False, False, False]
    assert one.look_up(keys) == [True] * 4


def test_one_chunk_that_cannot_be_stored_fails_alone(url: str, adapter: Any) -> None:
    one = adapter(url)
    keys, objects = fresh(3), [obj(seed=1), obj(seed=2), obj(seed=3)]
    objects[1].set_used_size(4093)
    assert not one.store(keys, objects).is_successful()
    assert one.look_up(keys) == [True, False, True]
    assert one.load(keys, [obj(), objects[1], obj()]) == [True, False, True]


def test_what_is_there_is_not_sent_again(url: str, adapter: Any) -> None:
    one = adapter(url)
    keys = fresh(2)
    assert one.store(keys, [obj(seed=1), obj(seed=2)]).bytes_transferred() == 2 * 4096
    again = one.store(keys, [obj(seed=1), obj(seed=2)])
    assert again.is_successful()
    assert again.bytes_transferred() == 0
    assert one.inner.get_usage().total_bytes_used == 2 * 4096


def test_delete(url: str, adapter: Any) -> None:
    one = adapter(url)
    keys = fresh(3)
    one.store(keys, [obj(seed=i + 1) for i in range(3)])
    one.inner.delete(keys[:2])
    assert one.look_up(keys) == [False, False, True]
    assert one.inner.get_usage().total_bytes_used == 4096


def test_salts_and_ranks_are_other_keys(url: str, adapter: Any) -> None:
    from dataclasses import replace

    one = adapter(url)
    (key,) = fresh(1)
    one.store([key], [obj(seed=1)])
    others = [
        replace(key, cache_salt="user"),
        replace(key, kv_rank=7),
        replace(key, object_group_id=1),
        replace(key, model_name="b/model"),
    ]
    assert one.look_up([key, *others]) == [True] + [False] * 4


def test_two_threads_and_many_tasks(url: str, adapter: Any) -> None:
    one = adapter(url)
    keys = fresh(40)

    def stores() -> None:
        for key in keys:
            assert one.store([key], [obj(seed=3)]).is_successful()

    def loads() -> None:
        for key in keys:
            one.look_up([key])
            one.load([key], [obj()])

    threads = [threading.Thread(target=stores), threading.Thread(target=loads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert one.look_up(keys) == [True] * 40


@pytest.mark.parametrize("fault", [*(f for f in FAULTS if f != "pass"), "hang"])
def test_every_task_ends_and_it_recovers(proxy: Any, adapter: Any, fault: str) -> None:
    one = adapter(proxy.url, timeout=0.3)
    keys, objects = fresh(2), [obj(seed=1), obj(seed=2)]
    one.store(keys, objects)
    proxy.mode = fault
    for _ in range(2):
        one.store(fresh(1), [obj(seed=4)])
        one.look_up(keys)
        buffers = [obj(), obj()]
        for loaded, buffer, right in zip(one.load(keys, buffers), buffers, objects, strict=True):
            assert not loaded or torch.equal(buffer.raw_data, right.raw_data)
    proxy.mode = "pass"
    give_up = time.monotonic() + PATIENCE
    while not one.store(keys, objects).is_successful() or one.load(keys, buffers) != [True, True]:
        assert time.monotonic() < give_up, "it never recovers"
        time.sleep(0.05)


def test_closing_ends_what_runs(proxy: Any) -> None:
    one = Adapter(proxy.url, timeout=0.3)
    proxy.mode = "hang"
    tasks = [one.inner.submit_load_task(fresh(2), [obj(), obj()]) for _ in range(8)]
    one.inner.close()
    assert all(one.inner.query_load_result(task).popcount() == 0 for task in tasks)
    late = one.inner.submit_load_task(fresh(1), [obj()])
    assert one.inner.query_load_result(late).popcount() == 0
    assert not one.inner.report_status()["is_healthy"]


def test_a_storage_manager_whose_server_dies(own_pion: Any) -> None:
    server = own_pion()
    store = managers.manager(managers.plugin(server.url, retry_after=0.1))
    try:
        kv = engines.random_kv(128, seed=2).reshape(2, *managers.SHAPE)
        server.kill()
        managers.write(store, managers.keys(2, "dies"), kv)
        assert managers.read(store, managers.keys(2, "another")) == []
        server.restart()
        time.sleep(0.2)
        managers.write(store, managers.keys(2, "lives"), kv)
        fresh_store = managers.manager(managers.plugin(server.url))
        give_up = time.monotonic() + PATIENCE
        while len(found := managers.read(fresh_store, managers.keys(2, "lives"))) < 2:
            assert time.monotonic() < give_up
            time.sleep(0.1)
        bits = torch.stack(found).view(torch.int16)
        assert torch.equal(bits, kv.view(torch.int16))
        fresh_store.close()
    finally:
        store.close()
