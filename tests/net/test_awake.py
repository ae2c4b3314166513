"""The event loop stays awake only behind a request that came soon after another, and never for
longer than AWAKE_SECONDS."""

from __future__ import annotations

import asyncio
import time

import pytest

from pion_server.net import awake
from pion_server.net.awake import AWAKE_SECONDS, Awake


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
