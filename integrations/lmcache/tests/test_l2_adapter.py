"""Invariant: every task that LMCache's multiprocess mode submits ends with a result, whatever the
server does, and what is loaded is what was stored.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="needs lmcache (Linux): pip install 'pion-kv[lmcache]'")

import torch
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from integrations.lmcache.tests import engines, managers
from integrations.lmcache.tests.proxy import FAULTS

PATIENCE = 30.0


class Adapter:
    """An adapter as LMCache makes and calls it: submit, sleep on the fd, ask once."""

    def __init__(self, url: str, **options: Any) -> None:
        options = {"timeout": 0.5, "retry_after": 0.1, **options}
        config = parse_args_to_l2_adapters_config(_arguments(managers.plugin(url, **options)))
        self.inner: Any = create_l2_adapter(config.adapters[0])

    def store(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        task = self.inner.submit_store_task(list(keys), list(objects))
        results: dict[int, Any] = {}
        fd = self.inner.get_store_event_fd()
        _wait(fd, lambda: results.update(self.inner.pop_completed_store_tasks()) or task in results)
        return results[task]

    def look_up(self, keys: Sequence[Any]) -> list[bool]:
        task = self.inner.submit_lookup_and_lock_task(list(keys), {0: managers.LAYOUT})
        fd = self.inner.get_lookup_and_lock_event_fd()
        found = self._bitmap(fd, lambda: self.inner.query_lookup_and_lock_result(task), len(keys))
        self.inner.submit_unlock(list(keys))
        return found

    def load(self, keys: Sequence[Any], objects: Sequence[Any]) -> list[bool]:
        task = self.inner.submit_load_task(list(keys), list(objects))
        fd = self.inner.get_load_event_fd()
        return self._bitmap(fd, lambda: self.inner.query_load_result(task), len(keys))

    def _bitmap(self, fd: int, ask: Callable[[], Any], count: int) -> list[bool]:
        answers: list[Any] = []

        def asked() -> bool:
            answers.append(ask())
            return answers[-1] is not None

        _wait(fd, asked)
        assert ask() is None  # once
        return [answers[-1].test(i) for i in range(count)]


def _arguments(adapter: dict[str, Any]) -> Any:
    import argparse
    import json

    return argparse.Namespace(l2_adapter=[json.dumps(adapter)])


def _wait(fd: int, done: Callable[[], bool]) -> None:
    """Sleep on the fd; a result without a signal, or a signal without an end, is a failure."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while True:
        assert poll.poll(PATIENCE * 1000), "a task without an end"
        consume_fd(fd)
        if done():
            return


def obj(nbytes: int = 4096, dtype: torch.dtype = torch.bfloat16, seed: int | None = None) -> Any:
    """A buffer of random bits, or of zeros."""
    generator = torch.Generator().manual_seed(seed or 0)
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    data = data if seed else torch.zeros_like(data)
    shape = torch.Size([2, 1, 4, nbytes // 8 // dtype.itemsize])
    meta = MemoryObjMetadata(
        shape,
        dtype,
        data.data_ptr(),
        nbytes,
        1,
        fmt=MemoryFormat.KV_2LTD,
        shapes=[shape],
        dtypes=[dtype],
    )
    return TensorMemoryObj(data, meta, parent_allocator=None)


@pytest.fixture
def adapter() -> Iterator[Callable[..., Adapter]]:
    made: list[Adapter] = []

    def make(url: str, **options: Any) -> Adapter:
        made.append(Adapter(url, **options))
        return made[-1]

    yield make
    for one in made:
        one.inner.close()


_labels = iter(range(1 << 30))


def fresh(count: int) -> list[Any]:
    return managers.keys(count, f"test {next(_labels)}")


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
    store = managers.manager(managers.plugin(server.url, timeout=0.3, retry_after=0.1))
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
