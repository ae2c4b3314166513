"""How fast rows move: Pion beside raw loopback sockets (the limit) and redis-py on a real Redis.

    python benchmarks/wire.py [--rounds N] [--json PATH]

Every round stores and fetches one blob of 4, 32 and 256 MB each way, in turn. All of them send from
the same buffer and receive into one buffer that was used before, except redis-py, which has no such
call. Raw sockets: the same bytes between two processes with sendall and recv_into, nothing kept.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
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
    def __init__(self, listener: socket.socket, into: memoryview) -> None:
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
    def __init__(self, port: int, into: memoryview) -> None:
        self._client = Client(f"pion://127.0.0.1:{port}", timeout=60)
        self._client.v_create(b"bench", DIM, "fp16")
        self._into = into

    def store(self, blob: memoryview) -> None:
        rows = len(blob) // ROW_BYTES
        self._client.v_storebatch(b"bench", 0, 0, rows, blob, fmt="NATIVE")

    def fetch(self, nbytes: int) -> None:
        into = self._into[:nbytes]
        self._client.v_fetch(b"bench", 0, 0, nbytes // ROW_BYTES, fmt="NATIVE", into=into)


class Redis:
    def __init__(self, port: int) -> None:
        self._client = redis_py.Redis(port=port, socket_timeout=60)

    def store(self, blob: memoryview) -> None:
        self._client.set("bench", blob)

    def fetch(self, nbytes: int) -> None:
        assert len(self._client.get("bench")) == nbytes


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

    listener = socket.create_server(("127.0.0.1", 0))
    raw_server = multiprocessing.Process(target=serve_raw, args=(listener,), daemon=True)
    raw_server.start()
    source = np.random.default_rng(1).integers(0, 256, max(SIZES_MB) << 20, np.uint8).data
    into = np.zeros(max(SIZES_MB) << 20, np.uint8).data
    figures: dict[str, dict[str, Any]] = {}
    with harness.pion() as pion_port, harness.redis() as redis_port:
        peers = {
            "raw": Raw(listener, into),
            "pion": Pion(pion_port, into),
            "redis-py": Redis(redis_port),
        }
        for size in SIZES_MB:
            seconds = measure(peers, source[: size << 20], chosen.rounds)
            row: dict[str, Any] = {}
            for way, by_peer in seconds.items():
                row[f"{way}_vs_raw"] = harness.ratio(by_peer["raw"], by_peer["pion"])
                row[f"{way}_vs_redis"] = harness.ratio(by_peer["redis-py"], by_peer["pion"])
                row[f"{way}_gb_s"] = {
                    name: harness.summary([(size << 20) / 1e9 / s for s in samples])
                    for name, samples in by_peer.items()
                }
            figures[f"{size}MB"] = row
            print(size, "MB", {key: value for key, value in row.items() if "_vs_" in key})
    raw_server.terminate()
    harness.write(chosen.json, figures)
    groups = [f"{way} {size}" for size in figures for way in ("store", "fetch")]
    series = {
        name: [figures[g.split()[1]][f"{g.split()[0]}_gb_s"][name]["median"] for g in groups]
        for name in ("raw", "pion", "redis-py")
    }
    harness.bars(chosen.json, "Moving stored rows over loopback", "GB/s (median)", groups, series)


if __name__ == "__main__":
    main()
