"""One process of test_stock_eviction.py: LMCache's own clients on servers that are too small.

    python pressure.py < job.json      {scheme: url of a server with room for twelve chunks}

Stores four chunks, sees that they are there, stores ten more, and gets the four. Leaves without
closing anything, as some of these clients hang when they are closed.
"""

from __future__ import annotations

import json
import os
import sys

from integrations.lmcache.tests import engines
from integrations.lmcache.tests.backends import Backend
from pion_server.client import Client


def pressed(scheme: str, url: str) -> dict[str, object]:
    backend = Backend(engines.stock(url.replace("pion", scheme)))
    seen, contents = backend.stored(4)
    there = [backend.remote.contains(key) for key in seen]
    later, _ = backend.stored(10)
    kept = backend.get(seen)
    with Client(url) as client:
        held = client.scan(count=1000)[1]
        halves = [key.removesuffix(b"metadata").removesuffix(b"kv_bytes") for key in held]
        evicted = int(client.info("stats")["evicted_keys"])
    return {
        "seen": there,
        "kept": [one == right for one, right in zip(kept, contents, strict=True)],
        "newest": backend.remote.contains(later[-1]),
        "evicted": evicted > 0,
        "whole": all(halves.count(half) == len(held) // len(set(halves)) for half in halves),
    }


def main() -> None:
    for scheme, url in json.load(sys.stdin).items():
        print(json.dumps({"scheme": scheme, **pressed(scheme, url)}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
