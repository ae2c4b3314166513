"""One process of test_stock.py: LMCache's own clients, unmodified.

    python stock.py < job.json      [{"run": "pressed" | "apart", "name": ..., ...}, ...]

Prints a JSON object for each job. Leaves without closing anything, as some of these clients hang
when they are closed.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from integrations.lmcache.tests.backends import Backend, bits
from pion_server.client import Client


def pressed(url: str, settings: dict[str, Any]) -> dict[str, Any]:
    """On a server with room for twelve chunks: stores four, sees that they are there, stores ten
    more, and gets the four."""
    backend = Backend(settings)
    seen, contents = backend.stored(4)
    there = [backend.remote.contains(key) for key in seen]
    later, _ = backend.stored(10)
    kept = backend.get(seen)
    with Client(url) as client:
        held = client.scan(count=1000)[1]
        halves = [key.removesuffix(b"metadata").removesuffix(b"kv_bytes") for key in held]
        evicted = int(client.info("stats")["evicted_keys"])
        mortal = [client.ttl(key) > 0 for key in held]
    return {
        "seen": there,
        "kept": [one == right for one, right in zip(kept, contents, strict=True)],
        "newest": backend.remote.contains(later[-1]),
        "evicted": evicted > 0,
        "whole": all(halves.count(half) == len(held) // len(set(halves)) for half in halves),
        "mortal": bool(mortal) and all(mortal),
    }


def apart(spaces: list[dict[str, Any]]) -> dict[str, Any]:
    """The same keys in several places of one server: what each of them holds in the end is what was
    stored there."""
    backends = [Backend(settings) for settings in spaces]
    keys = backends[0].keys(2)
    stored = []
    for backend in backends:
        objects = backend.chunks(2)
        strangers = [backend.remote.contains(key) for key in keys]
        backend.put(keys, objects)
        stored.append([bits(obj) for obj in objects])
        if any(strangers):
            return {"strangers": strangers}
    return {
        "own": [backend.get(keys) == own for backend, own in zip(backends, stored, strict=True)]
    }


RUNS = {"pressed": pressed, "apart": apart}


def main() -> None:
    for job in json.load(sys.stdin):
        name, run = job.pop("name"), RUNS[job.pop("run")]
        print(json.dumps({"name": name, **run(**job)}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
