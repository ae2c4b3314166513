"""Invariant: calls awaited at once keep their own replies, whoever of them is given up."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from typing import Any

import numpy as np
import pytest

from pion_server.client import (
    AsyncClient,
    Call,
    Client,
    ConnectionFailed,
    DeadlineExceeded,
    calls,
)
from pion_server.client.calls.base import integer
from pion_server.wire.encode import encode_reply

MB = 1 << 20


def echoes(peer: Any) -> None:
    peer.greet()
    with contextlib.suppress(EOFError):
        while request := peer.request():
            peer.send(b"$%d\r\n%b\r\n" % (len(request[1]), request[1]))


async def test_a_thousand_calls_at_once_keep_their_replies(url: str) -> None:
    messages = [b"%d:" % number + bytes(random.randrange(40_000)) for number in range(1000)]
    async with AsyncClient(url, timeout=60) as client:
        assert await asyncio.gather(*map(client.echo, messages)) == messages


async def test_the_first_calls_share_one_connection(fake: Any) -> None:
    server = fake(echoes)
    async with AsyncClient(server.url) as client:
        replies = await asyncio.gather(*(client.echo(str(number)) for number in range(50)))
    assert replies == [b"%d" % number for number in range(50)]
    assert server.accepted == 1


async def test_a_cancelled_fetch_leaves_the_buffer_and_the_others_alone(fake: Any) -> None:
    def half(peer: Any) -> None:
        peer.greet()
        peer.request()
        peer.send(b"$%d\r\n" % MB + b"\1" * (MB // 2))
        loop.call_soon_threadsafe(begun.set)
        peer.closed_by_client()

    loop, begun = asyncio.get_running_loop(), asyncio.Event()
    server, into = fake(half, echoes), np.zeros(MB, np.uint8)
    async with AsyncClient(server.url) as client:
        fetching = asyncio.create_task(client.get("k", into=into))
        await begun.wait()
        safe = [asyncio.create_task(client.echo(f"{number}")) for number in range(20)]
        unsafe = asyncio.create_task(client.set("k", "v", nx=True))
        await asyncio.sleep(0.02)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        received = int(into.sum())
        assert await asyncio.gather(*safe) == [b"%d" % number for number in range(20)]
        with pytest.raises(ConnectionFailed, match=r"another call .* was given up"):
            await unsafe
        assert int(into.sum()) == received <= MB // 2
    assert server.accepted == 2


async def test_a_deadline_of_one_call_does_not_shift_the_others(fake: Any) -> None:
    def stalls(peer: Any) -> None:
        peer.greet()
        peer.request()
        peer.closed_by_client()

    server = fake(stalls, echoes)
    async with AsyncClient(server.url) as client:
        impatient = client.execute(calls.echo("late"), timeout=0.1)
        late, *others = await asyncio.gather(
            impatient, *(client.echo(f"{n}") for n in range(20)), return_exceptions=True
        )
    assert isinstance(late, DeadlineExceeded)
    assert others == [b"%d" % number for number in range(20)]


async def test_calls_at_once_land_in_their_own_buffers(url: str) -> None:
    values = {f"at-once-{n}": bytes([n]) * (n * 997) for n in range(1, 100)}
    buffers = {key: np.zeros(len(value), np.uint8) for key, value in values.items()}
    async with AsyncClient(url) as client:
        await client.mset(values)
        await asyncio.gather(*(client.get(key, into=buffers[key]) for key in values))
        await client.delete(*values)
    assert {key: buffer.tobytes() for key, buffer in buffers.items()} == values


async def test_a_call_is_repeated_once_even_if_the_next_connection_serves_others(
    fake: Any,
) -> None:
    def breaks(peer: Any) -> None:
        """Two calls come in; the first is answered where `answered` says so."""
        peer.greet()
        for answered in peers.pop(0):
            request = peer.request()
            if answered:
                peer.send(b"$%d\r\n%b\r\n" % (len(request[1]), request[1]))

    peers = [(True, False, False), (True, False)]
    server = fake(breaks, breaks, echoes)
    async with AsyncClient(server.url) as client:
        await client.echo("warm")
        first, second = await asyncio.gather(
            client.echo("first"), client.echo("second"), return_exceptions=True
        )
        assert first == b"first"
        assert isinstance(second, ConnectionFailed)
        assert await client.echo("third") == b"third"
    assert server.accepted == 3


async def test_calls_that_are_cancelled_at_random(url: str) -> None:
    rng = random.Random(11)
    async with AsyncClient(url, timeout=30) as client:

        async def one(number: int) -> None:
            message = b"%d:" % number + bytes(rng.randrange(100_000))
            assert await client.echo(message) == message

        tasks = [asyncio.create_task(one(number)) for number in range(200)]
        for task in tasks:
            if rng.random() < 0.1:
                await asyncio.sleep(0)
                task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        failures = [r for r in results if r and not isinstance(r, asyncio.CancelledError)]
        assert not failures
        assert results.count(None) > 100
        assert await client.ping() == "PONG"


async def test_cancelled_while_waiting_to_send_costs_nobody_anything(fake: Any) -> None:
    def slow(peer: Any) -> None:
        peer.greet()
        loop.call_soon_threadsafe(greeted.set)
        go.wait(20)
        with contextlib.suppress(EOFError):
            while request := peer.request():
                peer.send(b":%d\r\n" % len(request[-1]))

    loop, greeted, go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    server = fake(slow)
    async with AsyncClient(server.url) as client:
        payload = bytes(32 * MB)
        sending = asyncio.create_task(client.execute(Call(("SET", "k", payload), integer)))
        await greeted.wait()
        waiting = asyncio.create_task(client.ping())
        await asyncio.sleep(0.02)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go.set()
        assert await sending == 32 * MB
    assert server.accepted == 1


async def test_a_call_that_was_never_sent_outlives_the_connection(fake: Any) -> None:
    def deaf(peer: Any) -> None:
        peer.greet()
        loop.call_soon_threadsafe(greeted.set)
        go.wait(20)

    def once(peer: Any) -> None:
        peer.greet()
        assert peer.request()[-1] == b"NX"
        peer.send(b"+OK\r\n")

    loop, greeted, go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    server = fake(deaf, once)
    async with AsyncClient(server.url) as client:
        sending = asyncio.create_task(client.set("large", bytes(64 * MB)))
        await greeted.wait()
        await asyncio.sleep(0)
        unsafe = asyncio.create_task(client.set("k", "v", nx=True))
        await asyncio.sleep(0.05)
        sending.cancel()
        assert await unsafe is True
        go.set()
    assert server.accepted == 2


async def test_a_worker_that_says_nothing_delays_only_calls_to_itself(fake: Any) -> None:
    def silent(peer: Any) -> None:
        loop.call_soon_threadsafe(reached.set)
        peer.closed_by_client()

    def directs(peer: Any) -> None:
        """Whatever is asked for lives on worker 1; ECHO is answered by anyone."""
        worker = {"worker": 1, "host": b"127.0.0.1", "port": int(stuck.url.rpartition(":")[2])}
        worker |= {"pid": 1, "up": True, "fast_port": 0, "unixsocket": b""}
        told = {
            b"PION.WORKERS": b"".join(encode_reply([worker], 3)),
            b"ECHO": b"$4\r\nhere\r\n",
        }
        peer.greet()
        with contextlib.suppress(EOFError):
            while request := peer.request():
                peer.send(told.get(request[0], b"-ERR session lives on worker 1\r\n"))

    loop, reached = asyncio.get_running_loop(), asyncio.Event()
    stuck = fake(silent)
    async with AsyncClient(fake(directs).url, timeout=60) as client:
        waiting = asyncio.create_task(client.execute(calls.prefix_drop("there"), timeout=20))
        await reached.wait()
        for _ in range(100):
            assert await client.echo("hello") == b"here"
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert stuck.accepted == 1


async def test_closing_ends_the_calls_in_flight(fake: Any) -> None:
    server = fake(lambda peer: (peer.greet(), peer.closed_by_client()))
    client = AsyncClient(server.url)
    waiting = asyncio.create_task(client.ping())
    while not client._links:
        await asyncio.sleep(0.001)
    await client.close()
    with pytest.raises(ConnectionFailed, match="closed"):
        await waiting


def test_a_waiting_threads_deadline_passes_alone(fake: Any) -> None:
    def late(peer: Any) -> None:
        peer.greet()
        peer.request()
        asked.set()
        go.wait(20)
        peer.send(b"+PONG\r\n")

    asked, go = threading.Event(), threading.Event()
    with Client(fake(late).url, timeout=20) as client:
        answers: list[str] = []
        first = threading.Thread(target=lambda: answers.append(client.ping()))
        first.start()
        asked.wait(20)
        with pytest.raises(DeadlineExceeded):
            client.execute(calls.ping(), timeout=0.1)
        go.set()
        first.join()
    assert answers == ["PONG"]
