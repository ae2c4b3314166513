"""The event loop stays awake only behind a request that came soon after another, and never for
longer than AWAKE_SECONDS; strangers and bytes that are no request keep no core busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

import pytest

from pion_server.config import Config
from pion_server.net import awake, server
from pion_server.net.awake import AWAKE_SECONDS, Awake
from pion_server.net.listening import entrances

from ..raw import request


class Clock:
    """Goes on by `step` seconds whenever it is looked at."""

    def __init__(self) -> None:
        self.now = time.perf_counter()
        self.step = 0.0

    def perf_counter(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(awake, "time", clock)
    return clock


async def turns(kept: Awake, limit: int = 1000) -> int:
    """How many turns the loop takes that it would have slept in."""
    for turn in range(limit):
        if not kept._turning:
            return turn
        await asyncio.sleep(0)
    raise AssertionError("the loop never sleeps again")


def test_a_request_that_comes_alone_lets_the_loop_sleep_at_once(clock: Clock) -> None:
    async def run() -> None:
        kept = Awake()
        for _ in range(3):
            soon = kept.came()
            kept.done(soon)
            assert not soon
            assert await turns(kept) == 0
            clock.now += 2 * AWAKE_SECONDS

    asyncio.run(run())


@pytest.mark.parametrize("looks", [1, 10, 100])
def test_behind_one_that_came_soon_the_loop_is_awake_for_the_time_that_is_said(
    clock: Clock, looks: int
) -> None:
    async def run() -> None:
        kept = Awake()
        kept.done(kept.came())
        clock.now += AWAKE_SECONDS / 2
        assert kept.came()
        kept.done(soon=True)
        clock.step = AWAKE_SECONDS / looks
        begun = clock.now
        assert await turns(kept) == pytest.approx(looks, abs=1)
        assert clock.now - begun == pytest.approx(AWAKE_SECONDS, abs=2 * clock.step)

    asyncio.run(run())


def test_many_at_once_keep_it_awake_once(clock: Clock) -> None:
    async def run() -> None:
        kept = Awake()
        for _ in range(100):  # of as many connections, in one turn of the loop
            kept.done(kept.came())
        clock.step = AWAKE_SECONDS / 10
        begun = clock.now
        await turns(kept)
        assert clock.now - begun <= 1.2 * AWAKE_SECONDS

    asyncio.run(run())


def test_not_while_another_thread_works_for_a_client(clock: Clock) -> None:
    async def run() -> None:
        kept = Awake()
        kept.done(kept.came())
        kept.jobs += 1
        kept.done(kept.came())
        assert await turns(kept) == 0
        kept.jobs -= 1
        kept.done(kept.came())
        assert kept._turning

    asyncio.run(run())


class Counted(Awake):
    """Counts what it is told, and never turns."""

    requests = 0

    def done(self, soon: bool) -> None:
        self.requests += 1


@dataclass
class Peer:
    """A client of a server in this process."""

    awake: Counted  # the server's
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, data: bytes) -> bytes:
        self.writer.write(data)
        return await self.reader.readline()


@asynccontextmanager
async def served(monkeypatch: pytest.MonkeyPatch, **options: str) -> AsyncIterator[Peer]:
    monkeypatch.setattr(server, "Awake", Counted)
    config = Config.model_validate({"port": 0, "no_fast_lane": True, **options})
    pion = server.PionServer(config)
    with entrances(config, [(0, None)]) as (entrance,):
        await pion.start(entrance)
        streams = await asyncio.open_connection("127.0.0.1", entrance.port)
        yield Peer(cast(Counted, pion._shared.awake), *streams)
        streams[1].close()
        await pion.stop()


async def test_strangers_do_not_keep_it_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch, requirepass="sesame") as peer:
        for _ in range(20):
            assert (await peer.ask(b"PING\r\n")).startswith(b"-NOAUTH")
            assert (await peer.ask(b"AUTH guess\r\n")).startswith(b"-WRONGPASS")
        assert peer.awake.requests == 0
        assert await peer.ask(b"AUTH sesame\r\n") == b"+OK\r\n"
        assert await peer.ask(b"PING\r\n") == b"+PONG\r\n"
        assert peer.awake.requests == 2


@pytest.mark.parametrize("nbytes", [200, 1 << 20])
async def test_a_request_counts_once_it_is_whole(
    monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    async with served(monkeypatch) as peer:
        whole = request("SET", "k", bytes(nbytes))
        peer.writer.write(whole[:-50])
        for at in range(len(whole) - 50, len(whole) - 1):
            peer.writer.write(whole[at : at + 1])
            await asyncio.sleep(0.001)
        assert peer.awake.requests == 0
        assert await peer.ask(whole[-1:]) == b"+OK\r\n"
        assert peer.awake.requests == 1


async def test_jobs_are_counted_out_whatever_becomes_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is done, and one whose client is gone."""
    job = request("V.STOREBATCH", "s", "0", "0", "4096", bytes(4096 * 512 * 4))
    async with served(monkeypatch) as peer, asyncio.timeout(20):
        assert await peer.ask(request("V.CREATE", "s", "512")) == b"+OK\r\n"
        assert await peer.ask(job) == b"+OK\r\n"
        assert peer.awake.jobs == 0
        peer.writer.write(job)
        while not peer.awake.jobs:
            await asyncio.sleep(0)
        peer.writer.transport.abort()
        while peer.awake.jobs:
            await asyncio.sleep(0)
