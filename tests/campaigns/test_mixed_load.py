"""Invariant: under writes, reads, drops and evictions at once, on both lanes and with clients that
break off, a read gives one whole write or nothing, memory stays within its budget, and neither
memory nor descriptors, threads or the log grow with time.
"""

from __future__ import annotations

import random
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from things import KINDS, REMOVABLE, Thing

from pion_server.client import Client
from pion_server.errors import OutOfMemory

MEMORY = 1_000_000
# What a Python server and its threads take beside the payload, with room for noise.
OVERHEAD = 160_000_000
# What the log may have grown to before it is compacted (journal.py), and while that goes on.
LOG = 200_000_000


class Load(threading.Thread):
    """One client that does a bit of everything to things that it shares with the others."""

    def __init__(self, server: Any, seed: int, things: list[Thing], until: float) -> None:
        super().__init__(daemon=True)
        self._server, self._things, self._until = server, things, until
        self._url = fast_url(server) if seed % 2 else server.url
        self._random = random.Random(seed)
        self._tag = seed * 10**12
        self.steps = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while time.monotonic() < self._until:
                # A connection only lives for a while, as those of short scripts do.
                with Client(self._url, timeout=30) as client:
                    for _ in range(200):
                        self._step(client)
                self._break_off()
        except BaseException as error:
            self.failure = error

    def _break_off(self) -> None:
        """As a client does that is killed while it stores."""
        with socket.create_connection((self._server.host, self._server.port), 30) as sock:
            sock.sendall(b"*3\r\n$3\r\nSET\r\n$6\r\nbroken\r\n$3000000\r\n" + bytes(100_000))

    def _step(self, client: Client) -> None:
        thing, dice = self._random.choice(self._things), self._random.random()
        self._tag += 1
        self.steps += 1
        if dice < 0.4:
            self._write(thing, client)
        elif dice < 0.5 and thing.kind in REMOVABLE:
            thing.remove(client)
        else:
            thing.read(client)

    def _write(self, thing: Thing, client: Client) -> None:
        """Two may write one thing at once, and one of them may find it gone or the other's."""
        try:
            thing.write(client, self._tag)
        except OutOfMemory:
            raise
        except Exception as error:
            words = str(error)
            assert any(known in words for known in ("unknown", "another", "PREFIX.DROP")), words


def fast_url(server: Any) -> str:
    found = re.search(r"binary lane on port (\d+)", server.log.read_text())
    assert found is not None
    return f"pion+fast://{server.host}:{found[1]}"


def run_load(server: Any, seconds: float, clients: int = 4) -> list[Load]:
    things = [Thing(kind, f"shared-{number}") for kind in KINDS for number in range(60)]
    until = time.monotonic() + seconds
    loads = [Load(server, seed, things, until) for seed in range(1, clients + 1)]
    for load in loads:
        load.start()
    for load in loads:
        load.join(seconds + 60)
        assert not load.is_alive()
        if load.failure is not None:
            raise load.failure
    return loads


def test_nobody_reads_half_of_anything(start_pion: Callable[..., Any]) -> None:
    server = start_pion("--max-memory", str(MEMORY))
    loads = run_load(server, seconds=4)
    assert sum(load.steps for load in loads) > 400
    with Client(server.url) as client:
        assert int(client.info("memory")["used_memory"]) <= MEMORY
        assert int(client.info("stats")["evicted_keys"]) > 0


@dataclass(frozen=True)
class Reading:
    resident: int
    descriptors: int
    threads: int
    on_disk: int

    @classmethod
    def of(cls, process: psutil.Process, folder: Path) -> Reading:
        with process.oneshot():
            sizes = [path.stat().st_size for path in (folder / "default").glob("[sw]*")]
            return cls(
                process.memory_info().rss, process.num_fds(), process.num_threads(), sum(sizes)
            )


def soak(start_pion: Callable[..., Any], folder: Path, slices: int, seconds: float) -> None:
    """Mixed load, and a reading after each slice of it; the first one warms up."""
    server = start_pion("--max-memory", str(MEMORY), "--data-dir", str(folder))
    process = psutil.Process(server.pid)
    readings = []
    for _ in range(slices + 1):
        run_load(server, seconds)
        time.sleep(0.3)  # closed connections are noticed
        readings.append(Reading.of(process, folder))
    assert_flat(readings[1:])


def assert_flat(readings: list[Reading]) -> None:
    resident = [each.resident for each in readings]
    assert max(resident) < MEMORY + OVERHEAD
    # Of the second half of the time against the first, so that a slow leak shows.
    half = len(resident) // 2
    assert max(resident[half:]) < max(resident[:half]) * 1.1 + 8_000_000, resident
    for flat in ([each.descriptors for each in readings], [each.threads for each in readings]):
        assert max(flat) - min(flat) <= 2, flat
    assert max(each.on_disk for each in readings) < LOG, readings


def test_memory_and_descriptors_stay_flat(start_pion: Callable[..., Any], tmp_path: Path) -> None:
    soak(start_pion, tmp_path / "data", slices=4, seconds=1.5)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_minutes_of_mixed_load(start_pion: Callable[..., Any], tmp_path: Path) -> None:
    soak(start_pion, tmp_path / "data", slices=20, seconds=30)
