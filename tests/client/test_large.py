"""Invariant: large payloads go out and come in without a copy, and a slow peer is not answered
with memory.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import threading
import tracemalloc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pion_server.client import AsyncClient, calls
from pion_server.client.asynchronous import SLICE
from pion_server.client.conversation import DOOR

MB = 1 << 20
SIZE = 64 * MB


@pytest.fixture
def payload() -> Any:
    return np.random.default_rng(3).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def test_no_copy_on_the_way_out_or_in(connect: Any, url: str, payload: Any, traced: None) -> None:
    client, into = connect(url), np.zeros_like(payload)
    client.ping()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    client.set("large", payload)
    value = client.get("large", into=into)
    peak = tracemalloc.get_traced_memory()[1] - before
    client.delete("large")
    assert np.shares_memory(np.frombuffer(value, np.uint8), into)
    assert np.array_equal(into, payload)
    assert peak < 4 * MB


def test_a_recurrent_state_of_64_mb(connect: Any, url: str, payload: Any, traced: None) -> None:
    client, into = connect(url), np.zeros_like(payload)
    client.ping()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    client.ssm_store("large", 5, payload)
    state = client.ssm_fetch("large", 5, into=into)
    peak = tracemalloc.get_traced_memory()[1] - before
    client.ssm_drop("large")
    assert np.shares_memory(np.frombuffer(state, np.uint8), into)
    assert np.array_equal(into, payload)
    assert client.ssm_fetch("large", 5) is None
    assert peak < 4 * MB


def test_a_prefix_larger_than_any_buffer(connect: Any, url: str) -> None:
    layers, tokens, dim = 4, 4096, 1024
    rows = np.random.default_rng(5).integers(0, 2**15, (layers, 2, tokens, dim), np.uint16)
    into = np.zeros_like(rows)
    client = connect(url)
    client.prefix_register("large", dim, "fp16", layers=layers, tokens=tokens)
    client.prefix_store("large", 0, tokens, [(k, v) for k, v in rows], fmt="NATIVE")

    def sink(index: int, nbytes: int) -> memoryview:
        return into[index // 2, index % 2].reshape(-1).view(np.uint8).data

    fetched = client.prefix_fetch("large", fmt="NATIVE", into=sink)
    client.prefix_drop("large")
    assert np.array_equal(into, rows)
    assert all(np.shares_memory(np.asarray(v), into) for pair in fetched.rows for v in pair)


def test_nothing_is_held_once_a_call_is_over(connect: Any, url: str) -> None:
    client = connect(url)
    payload, into = np.ones(MB, np.uint8), np.zeros(MB, np.uint8)
    client.set("held", payload)
    client.get("held", into=into)
    held = [weakref.ref(payload), weakref.ref(into)]
    del payload, into
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    client.delete("held")


async def test_a_slow_reader_holds_back_the_sender(fake: Any, payload: Any) -> None:
    def reads_late(peer: Any) -> None:
        peer.greet()
        loop.call_soon_threadsafe(greeted.set)
        looked.wait(20)
        value = peer.request()[2]
        peer.send(b"$64\r\n" + hashlib.sha256(value).hexdigest().encode() + b"\r\n")

    loop, greeted, looked = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    async with AsyncClient(fake(reads_late).url, timeout=30) as client:
        call = calls.Call(("SET", "k", payload.data), lambda reply: reply)
        sending = asyncio.create_task(client.execute(call))
        await greeted.wait()
        await asyncio.sleep(0.05)
        link = client._links[DOOR]
        assert link is not None
        held = link._transport.get_write_buffer_size()
        looked.set()
        assert await sending == hashlib.sha256(payload).hexdigest().encode()
    assert 0 < held <= 2 * SLICE
