"""How long a router waits to learn which blocks are held: MEMBERSHIP beside Redis' SMISMEMBER.

    python benchmarks/membership.py [--calls N] [--json PATH]

K = N = 1,562 hashes (100,000 tokens in blocks of 64), half of the probes held. All send the same
8-byte hashes over loopback and wait: our client for MEMBERSHIP, redis-py for SMISMEMBER, and the
same redis-py for MEMBERSHIP, so that the client's share can be told from the server's. PING is the
round trip alone. Peers take turns in bursts, as a busy router sends them; `first_us` is the median
of what the first call of a burst takes, which meets a server that slept.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import redis as redis_py

from benchmarks import harness
from pion_server.client import Client

HASHES = 1562
BURST = 500


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--calls", type=int, default=5000)
    options.add_argument("--json", type=Path, default=harness.default_path("membership"))
    chosen = options.parse_args()

    rng = np.random.default_rng(1)
    held = rng.integers(0, 2**63, HASHES, np.uint64)
    probes = held.copy()
    probes[::2] = rng.integers(2**63, 2**64 - 1, (HASHES + 1) // 2, np.uint64, endpoint=True)
    rng.shuffle(probes)
    wanted = np.isin(probes, held)
    members = [value.tobytes() for value in probes]

    with harness.pion() as pion_port, harness.redis() as redis_port:
        pion = Client(f"pion://127.0.0.1:{pion_port}")
        pion.prefix_register(b"bench", 64, "fp16", blocks=(64, held))
        redis = redis_py.Redis(port=redis_port)
        redis.sadd("bench", *(value.tobytes() for value in held))
        redis_to_pion = redis_py.Redis(port=pion_port)
        blob = probes.tobytes()

        assert (pion.prefix_membership(b"bench", probes) == wanted).all()
        assert (np.array(redis.smismember("bench", members)) == wanted).all()
        calls: dict[str, Callable[[], object]] = {
            "pion": lambda: pion.prefix_membership(b"bench", probes),
            "pion_by_redis_py": lambda: redis_to_pion.execute_command(
                "KV.PREFIX.MEMBERSHIP", "bench", HASHES, blob
            ),
            "redis_smismember": lambda: redis.smismember("bench", members),
            "pion_ping": pion.ping,
        }
        samples = measure(calls, chosen.calls)

    figures: dict[str, Any] = {"hashes": HASHES}
    for name, bursts in samples.items():
        micros = [each for burst in bursts for each in burst]
        figures[f"{name}_us"] = {
            "p50": round(harness.percentile(micros, 0.50), 1),
            "p99": round(harness.percentile(micros, 0.99), 1),
            "first": round(statistics.median(burst[0] for burst in bursts), 1),
            "calls": len(micros),
        }
    for key in ("p50", "p99", "first"):
        figures[f"{key}_us"] = figures["pion_us"][key]
    harness.write(chosen.json, figures)
    for name in calls:
        shown = figures[f"{name}_us"]
        print(name.ljust(18), *(f"{key} {shown[key]:8.1f} us  " for key in ("p50", "p99", "first")))
    series = {key: [figures[f"{name}_us"][key] for name in calls] for key in ("p50", "p99")}
    harness.bars(
        chosen.json, f"{HASHES} block hashes, are they held?", "microseconds", list(calls), series
    )


def measure(calls: dict[str, Callable[[], object]], count: int) -> dict[str, list[list[float]]]:
    """Microseconds of each call, by burst. The peers' order changes; the first bursts are a
    warm-up."""
    samples: dict[str, list[list[float]]] = {name: [] for name in calls}
    order = list(calls)
    chance = random.Random(1)
    for number in range(count // BURST + 1):
        chance.shuffle(order)
        for name in order:
            burst = [harness.timed(calls[name]) * 1e6 for _ in range(BURST)]
            if number:
                samples[name].append(burst)
    return samples


if __name__ == "__main__":
    main()
