"""Invariant: whatever moment the server is killed at, nothing acknowledged is lost or different.

Writers keep a ledger outside the server; it is killed under them, started again on the same folder,
and everything it holds is compared. Snapshots are taken meanwhile, so that the kills hit them too.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ledger import Writer

from pion_server.client import Call, Client
from pion_server.errors import PionError

WRITERS = 3
THINGS = 12
SAVE: Call[Any] = Call([b"KV.PREFIX.SAVE"], lambda reply: reply)


def keep_saving(url: str, stopping: threading.Event) -> None:
    with suppress(PionError), Client(url, timeout=20) as client:
        while not stopping.wait(0.05):
            client.execute(SAVE)


def live(server: Any, writers: list[Writer], seconds: float) -> None:
    """Let the writers write for a while, then kill the server under them."""
    stopping = threading.Event()
    saver = threading.Thread(target=keep_saving, args=(server.url, stopping), daemon=True)
    threads = [*writers, saver]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    server.kill()
    stopping.set()
    for writer in writers:
        writer.stopping.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a client hangs on a dead server"


def campaign(start_pion: Callable[..., Any], folder: Path, policy: str, rounds: int) -> int:
    chance = random.Random(rounds)
    writers = [Writer(number, THINGS, seed=number) for number in range(1, WRITERS + 1)]
    acknowledged = 0
    for number in range(rounds):
        server = start_pion("--data-dir", str(folder), "--wal-fsync", policy)
        with Client(server.url, timeout=20) as client:
            for writer in writers:
                writer.check(client)
        writers = [writer.again(server.url, seed=number * 100) for writer in writers]
        live(server, writers, chance.uniform(0.02, 0.5))
        acknowledged += sum(writer.acknowledged for writer in writers)
    server = start_pion("--data-dir", str(folder))
    with Client(server.url, timeout=20) as client:
        for writer in writers:
            writer.check(client)
    return acknowledged


@pytest.mark.parametrize("policy", ["no", "always"])
def test_a_few_kills(start_pion: Callable[..., Any], tmp_path: Path, policy: str) -> None:
    assert campaign(start_pion, tmp_path / "data", policy, rounds=4) > 20


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
def test_a_thousand_kills(start_pion: Callable[..., Any], tmp_path: Path) -> None:
    assert campaign(start_pion, tmp_path / "data", "everysec", rounds=1000) > 10_000
