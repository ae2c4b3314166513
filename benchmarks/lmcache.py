"""LMCache's remote backends, each through LMCache's own RemoteBackend: chunks in, chunks out.

    python benchmarks/lmcache.py [--rounds N] [--json PATH]

Stock redis:// and resp:// against a real Redis and against Pion, and Pion's connector against Pion,
with chunks of 4 and 32 MB, in a batch of 128 or 256 MB and eight one by one, beside raw loopback
sockets. The rounds of all of them alternate. Every round stores keys that are new and fetches them
into buffers of the pool that LMCache holds; whether the bytes are right is a test's business,
except for one look at the first values.
"""

# ruff: noqa: E402 - the path and the environment must be right before LMCache is imported
from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
from pathlib import Path
from typing import Any

# This folder must not be where `import lmcache` looks: this file has the same name.
sys.path[:] = [place for place in sys.path if Path(place).resolve() != Path(__file__).parent]
os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="ERROR", PYTHONHASHSEED="0")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

from benchmarks import harness
from benchmarks.wire import Raw
from pion_server.client import Client

TOKENS, HEADS, HEAD_SIZE = 256, 8, 128
# Chunks of 4 and 32 MB: layers, and how many make a batch.
SIZES = {"4MB": (4, 32), "32MB": (32, 8)}
SINGLES = 8  # that go one by one
PATIENCE = 60
OURS, RESP_REDIS, RESP_PION = "pion connector", "resp:// redis", "resp:// pion"


class Peer:
    """One RemoteBackend."""

    def __init__(self, name: str, server: int, settings: dict[str, Any], pool: Pool) -> None:
        self.name = name
        self._pool = pool
        self._server = Client(f"pion://127.0.0.1:{server}", timeout=PATIENCE)
        config = pool.config(**settings)
        plugin = "pion" if config.remote_storage_plugins else None
        self.backend = RemoteBackend(
            config, pool.metadata, pool.loop, pool.local, "cpu", plugin_name=plugin
        )
        assert self.backend.connection is not None, f"{name} did not come up"

    def put(self, keys: list[CacheEngineKey]) -> None:
        done = threading.Semaphore(0)
        objects = self._pool.source[: len(keys)]
        self.backend.batched_submit_put_task(
            keys, objects, on_complete_callback=lambda key: done.release()
        )
        for _ in keys:
            assert done.acquire(timeout=PATIENCE), f"{self.name}: a put did not end"

    def get(self, keys: list[CacheEngineKey]) -> None:
        for source, obj in zip(
            self._pool.source, self.backend.batched_get_blocking(keys), strict=False
        ):
            assert obj is not None, f"{self.name}: a chunk is missing"
            assert torch.equal(obj.tensor[0, 0, 0], source.tensor[0, 0, 0]), self.name
            obj.ref_count_down()

    def forget(self, keys: list[CacheEngineKey]) -> None:
        """Make room on the server."""
        if self.name == OURS:
            for key in keys:
                self.backend.remove(key)
        else:
            self._server.flushdb()


class Wire:
    """Raw sockets in a peer's place."""

    def __init__(self, raw: Raw) -> None:
        self._raw = raw

    def put(self, chunks: list[memoryview]) -> None:
        for chunk in chunks:
            self._raw.store(chunk)

    def get(self, chunks: list[memoryview]) -> None:
        for chunk in chunks:
            self._raw.fetch(len(chunk))

    def forget(self, chunks: list[memoryview]) -> None:
        """Nothing is kept."""


class Pool:
    """What the backends of one chunk size share: LMCache's event loop and its memory."""

    def __init__(self, layers: int, batch: int) -> None:
        shape = (layers, 2, TOKENS, HEADS, HEAD_SIZE)
        self.metadata = LMCacheMetadata(
            "bench", 1, 1, 0, 0, torch.bfloat16, shape, chunk_size=TOKENS, role="worker"
        )
        self.nbytes = 2 * layers * TOKENS * HEADS * HEAD_SIZE * 2
        self.local = LocalCPUBackend(self.config(), self.metadata, dst_device="cpu")
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        shapes = self.metadata.get_shapes()
        self.source = [self.local.allocate(shapes, [torch.bfloat16]) for _ in range(batch)]
        for obj in self.source:
            obj.tensor.random_()

    def config(self, **settings: Any) -> LMCacheEngineConfig:
        return LMCacheEngineConfig.from_dict(
            {
                "chunk_size": TOKENS,
                "local_cpu": False,
                "max_local_cpu_size": 0.7,
                "remote_serde": "naive",
                "save_unfull_chunk": False,
                "blocking_timeout_secs": PATIENCE,
                **settings,
            }
        )

    def keys(self, label: str, count: int) -> list[CacheEngineKey]:
        names = [hash((label, index)) for index in range(count)]
        return [CacheEngineKey("bench", 1, 0, name, torch.bfloat16) for name in names]


def peers_of(redis_port: int, pion_port: int, pool: Pool) -> list[Peer]:
    own = "remote_storage_plugin.pion."
    plugin = {own + "module_path": "pion_lmcache", own + "class_name": "PionConnectorAdapter"}
    plugin[own + "url"] = f"pion://127.0.0.1:{pion_port}"
    peers = [
        Peer(OURS, pion_port, {"remote_storage_plugins": ["pion"], "extra_config": plugin}, pool)
    ]
    for scheme in ("redis", "resp"):
        for server, port in (("redis", redis_port), ("pion", pion_port)):
            settings = {
                "remote_url": f"{scheme}://127.0.0.1:{port}",
                "extra_config": {"save_chunk_meta": False},
            }
            peers.append(Peer(f"{scheme}:// {server}", port, settings, pool))
    return peers


def measure(peers: list[Peer], raw: Raw, pool: Pool, batch: int, rounds: int) -> dict[str, Any]:
    """Seconds of each round: {"put": {peer: [...]}, ...}; the first round is a warm-up."""
    seconds: dict[str, Any] = {way: {} for way in ("put", "get", "put1", "get1")}
    payload = memoryview(pool.source[0].byte_array).cast("B")
    for number in range(rounds + 1):
        took: dict[str, dict[str, float]] = {}
        for peer in peers:
            keys = pool.keys(f"{peer.name} {number}", batch + SINGLES)
            took[peer.name] = round_of(peer, keys[:batch], keys[batch:])
        took["raw"] = round_of(Wire(raw), [payload] * batch, [payload] * SINGLES)
        if number:
            for name, by_way in took.items():
                for way, duration in by_way.items():
                    seconds[way].setdefault(name, []).append(duration)
    return seconds


def round_of(peer: Peer | Wire, many: list[Any], singles: list[Any]) -> dict[str, float]:
    """Seconds each way: a batch, and the singles one by one."""
    took = {
        "put": harness.timed(lambda: peer.put(many)),
        "get": harness.timed(lambda: peer.get(many)),
    }
    peer.forget(many)
    took["put1"] = harness.timed(lambda: [peer.put([one]) for one in singles])
    took["get1"] = harness.timed(lambda: [peer.get([one]) for one in singles])
    peer.forget(singles)
    return took


def contains(peer: Peer, pool: Pool, rounds: int) -> list[float]:
    """Seconds for one question about 100 keys that are all there."""
    keys = pool.keys("contains", 100)
    for start in range(0, len(keys), len(pool.source)):
        peer.put(keys[start : start + len(pool.source)])
    samples = []
    for _ in range(rounds + 1):
        samples.append(harness.timed(lambda: peer.backend.batched_contains(keys)))
    assert peer.backend.batched_contains(keys) == len(keys)
    peer.forget(keys)
    return samples[1:]


def figures_of(seconds: dict[str, Any], nbytes: int, batch: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for way, by_peer in seconds.items():
        moved = nbytes * (SINGLES if way.endswith("1") else batch) / 1e9
        figures[f"{way}_gb_s"] = {
            name: harness.summary([moved / duration for duration in durations])
            for name, durations in by_peer.items()
        }
        ours, resp, stock = (by_peer[name] for name in (OURS, RESP_REDIS, RESP_PION))
        figures[f"pion_connector_vs_resp_{way}"] = harness.ratio(resp, ours)
        figures[f"stock_resp_pion_vs_redis_{way}"] = harness.ratio(resp, stock)
        figures[f"pion_connector_vs_raw_{way}"] = harness.ratio(by_peer["raw"], ours)
    return figures


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--json", type=Path, default=harness.default_path("lmcache"))
    chosen = options.parse_args()
    raw = Raw(memoryview(bytearray(64 << 20)))
    report: dict[str, Any] = {}
    with harness.pion() as pion_port, harness.redis() as redis_port:
        for size, (layers, batch) in SIZES.items():
            pool = Pool(layers, batch)
            peers = peers_of(redis_port, pion_port, pool)
            report[size] = figures_of(
                measure(peers, raw, pool, batch, chosen.rounds), pool.nbytes, batch
            )
            if size == "4MB":
                asked = {
                    peer.name: contains(peer, pool, 20) for peer in peers if "resp" not in peer.name
                }
            print(size, {k: v for k, v in report[size].items() if "_vs_" in k}, flush=True)
    for ratio in ("pion_connector_vs_resp", "stock_resp_pion_vs_redis"):
        for way in ("put", "get"):
            report[f"{ratio}_{way}"] = min(report[size][f"{ratio}_{way}"] for size in SIZES)
    milliseconds = {n: harness.summary([s * 1e3 for s in took]) for n, took in asked.items()}
    report["contains100_ms"] = milliseconds[OURS]["median"]
    report["contains100_ms_of"] = milliseconds
    harness.write(chosen.json, report)
    by_size = {size: report[size] for size in SIZES}
    names = list(report["4MB"]["put_gb_s"])
    title = "LMCache chunks, a batch at a time"
    harness.speeds(chosen.json, title, by_size, ("put", "get"), names)
    os._exit(0)  # redis:// and resp:// do not close


if __name__ == "__main__":
    main()
