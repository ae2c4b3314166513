"""What durability costs: storing with the log off and on, recovery, snapshots and their stalls.

    python benchmarks/durability.py [--gb N] [--rounds N] [--prefixes N] [--json PATH]

Each way of keeping the log has a server of its own, and they take turns: a round stores 32 MB with
each, on a disk that has nothing else to do; in one command, and in eight that are sent at once, as
the connectors send blocks. Redis runs beside with the same policies of its append-only file. Then
the server that flushes every second holds --gb of rows and 20,000 small prefixes of 8 layers: a
snapshot is taken while another client asks PING all the time (its longest wait is the stall), and
the server is killed and started again (recovery).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import redis as redis_py

from benchmarks import harness
from pion_server.client import Call, Client
from pion_server.errors import PionError

BLOB = 32 << 20
DIM = 1024
ROWS = BLOB // (2 * DIM)  # fp16
SLOTS = 8  # sessions that the rounds overwrite in turn
PIECES = (1, 8)  # commands that a blob is stored with
LAYERS = 8  # of each small prefix
POLICIES = ("no", "everysec", "always")
Start: TypeAlias = "Callable[[contextlib.ExitStack, Path, str], Pion | Redis]"


class Pion:
    def __init__(self, port: int) -> None:
        self.client = Client(f"pion://127.0.0.1:{port}", timeout=120)

    def store(self, slot: int, blob: memoryview, pieces: int = 1) -> None:
        rows, sid = ROWS // pieces, b"slot%d" % slot
        calls = [Client.v_create(sid, DIM, "fp16")]
        for number, piece in enumerate(cut(blob, pieces)):
            calls.append(Client.v_storebatch(sid, 0, number * rows, rows, piece, fmt="NATIVE"))
        refused = [each for each in self.client.pipeline(calls) if isinstance(each, PionError)]
        assert not refused, refused[0]


class Redis:
    def __init__(self, port: int) -> None:
        self.client = redis_py.Redis(port=port, socket_timeout=120)

    def store(self, slot: int, blob: memoryview, pieces: int = 1) -> None:
        with self.client.pipeline(transaction=False) as pipeline:
            for number, piece in enumerate(cut(blob, pieces)):
                pipeline.set(f"slot{slot}.{number}", piece)
            pipeline.execute()


def cut(blob: memoryview, pieces: int) -> list[memoryview]:
    """Of equal size."""
    size = len(blob) // pieces
    return [blob[start : start + size] for start in range(0, len(blob), size)]


def pion_options(folder: Path, policy: str) -> list[str]:
    return ["--data-dir", str(folder), "--wal-fsync", policy]


def throughput(folder: Path, rounds: int, blob: memoryview, pieces: int) -> dict[str, list[float]]:
    """GB/s of each round, by way. Pion first and then Redis, whose files grow without end: the
    memory that the kernel keeps of them is what others do not get."""
    return {
        f"{who} {policy}": speed
        for who, start in (("pion", start_pion), ("redis", start_redis))
        for policy, speed in take_turns(start, folder / f"{who}-{pieces}", rounds, blob, pieces)
    }


def take_turns(
    start: Start, folder: Path, rounds: int, blob: memoryview, pieces: int
) -> Iterable[tuple[str, list[float]]]:
    folder.mkdir()
    with contextlib.ExitStack() as servers:
        ways = {each: start(servers, folder / each, each) for each in ("off", *POLICIES)}
        speed: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(SLOTS + rounds):
            for name, way in ways.items():
                os.sync()  # nobody waits for what another has left to the disk
                took = harness.timed(partial(way.store, number % SLOTS, blob, pieces))
                if number >= SLOTS:
                    speed[name].append(BLOB / 1e9 / took)
    return speed.items()


def start_pion(servers: contextlib.ExitStack, folder: Path, policy: str) -> Pion:
    options = [] if policy == "off" else pion_options(folder, policy)
    return Pion(servers.enter_context(harness.pion(*options)))


def start_redis(servers: contextlib.ExitStack, folder: Path, policy: str) -> Redis:
    log = [] if policy == "off" else ["--appendonly", "yes", "--appendfsync", policy]
    return Redis(servers.enter_context(harness.redis(*log)))


class Pinger(threading.Thread):
    """Another client, asking all the time; `waits` in milliseconds."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._client = Client(f"pion://127.0.0.1:{port}", timeout=60)
        self.waits: list[float] = []
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.is_set():
            self.waits.append(harness.timed(self._client.ping) * 1000)

    def finish(self) -> list[float]:
        self.stopped.set()
        self.join()
        return self.waits


def store_prefixes(client: Client, count: int) -> None:
    """Prefixes of one token, which take time for being many."""
    pair = (bytes(8), bytes(8))
    for start in range(0, count, 500):
        calls: list[Call[Any]] = []
        for name in (b"prefix%d" % number for number in range(start, min(start + 500, count))):
            calls.append(Client.prefix_register(name, 4, "fp16", layers=LAYERS, tokens=1))
            calls.append(Client.prefix_store(name, 0, 1, [pair] * LAYERS, fmt="NATIVE"))
        refused = [each for each in client.pipeline(calls) if isinstance(each, PionError)]
        assert not refused, refused[0]


def snapshot_and_recovery(
    folder: Path, gigabytes: float, prefixes: int, blob: memoryview
) -> dict[str, Any]:
    options = pion_options(folder / "big", "everysec")
    slots = max(1, round(gigabytes * 1e9 / BLOB))
    held = slots * BLOB / 1e9
    with harness.pion(*options) as port:
        server = Pion(port)
        for slot in range(slots):
            server.store(slot, blob)
        store_prefixes(server.client, prefixes)
        held_bytes = server.client.prefix_info()["vstore_bytes"]
        quiet = pings(port, lambda: time.sleep(2))
        while_saving = pings(port, lambda: server.client.execute(save()))
        saving = while_saving["took_s"]
    start = time.perf_counter()
    with harness.pion(*options) as port:
        server = Pion(port)
        recovered = time.perf_counter() - start
        kept = server.client.prefix_info()["vstore_bytes"]
        assert kept == held_bytes, f"{kept} bytes came back of {held_bytes}"
    with harness.pion() as port:
        start_empty = harness.timed(Client(f"pion://127.0.0.1:{port}").ping)
    return {
        "held_gb": round(held, 3),
        "held_prefixes": prefixes,
        "snapshot_s_per_gb": round(saving / held, 3),
        "stall_ms_while_saving": while_saving,
        "stall_ms_without": quiet,
        "recovery_s_per_gb": round(recovered / held, 3),
        "ping_of_an_empty_server_ms": round(start_empty * 1000, 3),
    }


def save() -> Call[Any]:
    return Call([b"KV.PREFIX.SAVE"], lambda reply: reply)


def pings(port: int, during: Callable[[], object]) -> dict[str, float]:
    """How long another client waited for its PINGs while `during` ran."""
    pinger = Pinger(port)
    pinger.start()
    took = harness.timed(during)
    waits = pinger.finish()
    return {
        "took_s": round(took, 3),
        "median": round(harness.percentile(waits, 0.5), 3),
        "p99": round(harness.percentile(waits, 0.99), 3),
        "longest": round(max(waits), 3),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--gb", type=float, default=1.0)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--prefixes", type=int, default=20_000)
    options.add_argument("--json", type=Path, default=harness.default_path("durability"))
    chosen = options.parse_args()
    blob = np.random.default_rng(1).integers(0, 256, BLOB, np.uint8).data
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        speeds = {pieces: throughput(folder, chosen.rounds, blob, pieces) for pieces in PIECES}
        rest = snapshot_and_recovery(folder, chosen.gb, chosen.prefixes, blob)
    stored = {f"in_{pieces}": storing(speed) for pieces, speed in speeds.items()}
    figures = {**stored, **rest}
    harness.write(chosen.json, figures)
    print(json.dumps(figures, indent=2))
    groups = [f"{policy}\nin {pieces}" for pieces in PIECES for policy in ("off", *POLICIES)]
    series = {
        who: [
            stored[f"in_{pieces}"]["store_gb_s"][f"{who} {policy}"]["median"]
            for pieces in PIECES
            for policy in ("off", *POLICIES)
        ]
        for who in ("pion", "redis")
    }
    harness.bars(chosen.json, "Storing 32 MB with the log", "GB/s (median)", groups, series)


def storing(speed: dict[str, list[float]]) -> dict[str, Any]:
    """`log_costs`: how many times as long it takes with the log as without."""
    return {
        "store_gb_s": {name: harness.summary(values) for name, values in speed.items()},
        "log_costs": {
            f"{who} {policy}": harness.ratio(speed[f"{who} off"], speed[f"{who} {policy}"])
            for who in ("pion", "redis")
            for policy in POLICIES
        },
    }


if __name__ == "__main__":
    main()
