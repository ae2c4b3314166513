"""How fast rows move: Pion beside raw loopback sockets (the limit) and redis-py on a real Redis.

    python benchmarks/wire.py [--rounds N] [--json PATH]

Every round stores and fetches one blob of 4, 32 and 256 MB each way, in turn. All of them send from
the same buffer and receive into one buffer that was used before, except redis-py, which has no such
call. Raw sockets: the same bytes between two processes with sendall and recv_into, nothing kept.
Pion and Redis over a Unix socket stand beside them, as the way between processes of one machine.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import redis as redis_py

from benchmarks import harness
from pion_server.client import Client

SIZES_MB = (4, 32, 256)
DIM = 1024
ROW_BYTES = 2 * DIM  # fp16


def serve_raw(listener: socket.socket) -> None:
    """`S<8-byte length>` then that many bytes: received and forgotten; `F<length>`: sent."""
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = np.zeros(max(SIZES_MB) << 20, np.uint8).data
    while head := connection.recv(9, socket.MSG_WAITALL):
        length = int.from_bytes(head[1:], "little")
        if head[:1] == b"S":
            receive(connection, buffer[:length])
            connection.sendall(b"+")
        else:
            connection.sendall(buffer[:length])


def receive(connection: socket.socket, into: memoryview) -> None:
    done = 0
    while done < len(into):
        count = connection.recv_into(into[done:])
        if not count:
            raise ConnectionError("the raw server went away")
        done += count


class Raw:
    """A connection to a process of its own that runs serve_raw."""

    def __init__(self, into: memoryview) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        multiprocessing.Process(target=serve_raw, args=(listener,), daemon=True).start()
        self._socket = socket.create_connection(listener.getsockname())
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._into = into

    def store(self, blob: memoryview) -> None:
        self._socket.sendall(b"S" + len(blob).to_bytes(8, "little"))
        self._socket.sendall(blob)
        assert self._socket.recv(1) == b"+"

    def fetch(self, nbytes: int) -> None:
        self._socket.sendall(b"F" + nbytes.to_bytes(8, "little"))
        receive(self._socket, self._into[:nbytes])


class Pion:
    def __init__(self, url: str, into: memoryview) -> None:
        self._client = Client(url, timeout=60)
        self._session = url.encode()
        self._client.v_create(self._session, DIM, "fp16")
        self._into = into

    def store(self, blob: memoryview) -> None:
        rows = len(blob) // ROW_BYTES
        self._client.v_storebatch(self._session, 0, 0, rows, blob, fmt="NATIVE")

    def fetch(self, nbytes: int) -> None:
        into = self._into[:nbytes]
        self._client.v_fetch(self._session, 0, 0, nbytes // ROW_BYTES, fmt="NATIVE", into=into)


class Redis:
    def __init__(self, client: redis_py.Redis, key: str) -> None:
        self._client = client
        self._key = key

    def store(self, blob: memoryview) -> None:
        self._client.set(self._key, blob)

    def fetch(self, nbytes: int) -> None:
        assert len(self._client.get(self._key)) == nbytes


def measure(
    peers: dict[str, Raw | Pion | Redis], blob: memoryview, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round: {"store": {peer: [...]}, "fetch": {...}}; the first is a warm-up."""
    seconds: dict[str, dict[str, list[float]]] = {
        way: {name: [] for name in peers} for way in ("store", "fetch")
    }
    for round_number in range(rounds + 1):
        for name, peer in peers.items():
            runs: dict[str, Callable[[], None]] = {
                "store": lambda peer=peer: peer.store(blob),
                "fetch": lambda peer=peer: peer.fetch(len(blob)),
            }
            for way, run in runs.items():
                took = harness.timed(run)
                if round_number:
                    seconds[way][name].append(took)
    return seconds


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--json", type=Path, default=harness.default_path("wire"))
    chosen = options.parse_args()

    source = np.random.default_rng(1).integers(0, 256, max(SIZES_MB) << 20, np.uint8).data
    into = np.zeros(max(SIZES_MB) << 20, np.uint8).data
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
        pion_path, redis_path = f"{folder}/pion", f"{folder}/redis"
        pion_port = servers.enter_context(harness.pion("--unixsocket", pion_path))
        redis_port = servers.enter_context(harness.redis("--unixsocket", redis_path))
        peers = {
            "raw": Raw(into),
            "pion": Pion(f"pion://127.0.0.1:{pion_port}", into),
            "redis-py": Redis(redis_py.Redis(port=redis_port, socket_timeout=60), "tcp"),
            "pion, unix": Pion(f"pion+unix://{pion_path}", into),
            "redis-py, unix": Redis(
                redis_py.Redis(unix_socket_path=redis_path, socket_timeout=60), "unix"
            ),
        }
        for size in SIZES_MB:
            seconds = measure(peers, source[: size << 20], chosen.rounds)
            row: dict[str, Any] = {}
            for way, by_peer in seconds.items():
                row[f"{way}_vs_raw"] = harness.ratio(by_peer["raw"], by_peer["pion"])
                row[f"{way}_vs_redis"] = harness.ratio(by_peer["redis-py"], by_peer["pion"])
                row[f"{way}_raw_vs_redis"] = harness.ratio(by_peer["redis-py"], by_peer["raw"])
                row[f"{way}_unix_vs_redis"] = harness.ratio(
                    by_peer["redis-py, unix"], by_peer["pion, unix"]
                )
                row[f"{way}_gb_s"] = {
                    name: harness.summary([(size << 20) / 1e9 / s for s in samples])
                    for name, samples in by_peer.items()
                }
            figures[f"{size}MB"] = row
            print(size, "MB", {key: value for key, value in row.items() if "_vs_" in key})
    harness.write(chosen.json, figures)
    title = "Moving stored rows over loopback"
    harness.speeds(chosen.json, title, figures, ("store", "fetch"), list(peers))


if __name__ == "__main__":
    main()
