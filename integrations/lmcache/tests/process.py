"""One process of test_two_processes.py: stores or retrieves with several kinds of LMCache.

    python process.py < job.json

Prints a JSON object for each kind as soon as it is done, and leaves without closing anything, as
some of LMCache's clients hang when they are closed. Each kind has a model of its own, so they may
share a server.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from integrations.lmcache.tests import engines, managers
from pion_server.client import Client

TOKENS = 4 * engines.CHUNK
SEED = 11


def engine(role: str, kind: dict[str, Any]) -> dict[str, Any]:
    worker = engines.engine(kind["settings"], f"a/{kind['name']}")
    tokens, kv = list(range(TOKENS)), engines.random_kv(TOKENS, SEED)
    if role == "store":
        before = held(kind["url"])
        worker.store(tokens, kv=kv)
        wait_until_held(kind["url"], before + kv.nbytes)
        return {"found": TOKENS, "retrieved": TOKENS, "digest": engines.digest(kv)}
    kv.zero_()
    found = worker.lookup(tokens)
    retrieved = int(worker.retrieve(tokens, kv=kv).sum())
    return {"found": found, "retrieved": retrieved, "digest": engines.digest(kv)}


def manager(role: str, kind: dict[str, Any]) -> dict[str, Any]:
    store, names = managers.manager(kind["settings"]), managers.keys(4, kind["name"])
    kv = engines.random_kv(TOKENS, SEED).reshape(4, *managers.SHAPE)
    if role == "store":
        before = held(kind["url"])
        managers.write(store, names, kv)
        wait_until_held(kind["url"], before + kv.nbytes)
        return {"found": 4, "digest": engines.digest(kv)}
    chunks = managers.read(store, names)
    return {"found": len(chunks), "digest": engines.digest(engines.torch.stack(chunks))}


def held(url: str) -> int:
    """Bytes that all workers of a server hold."""
    with Client(url) as client:
        places = [f"pion://{each.host}:{each.port}" for each in client.pion_workers()]
    total = 0
    for place in places:
        with Client(place) as client:
            total += int(client.info("memory")["used_memory"])
    return total


def wait_until_held(url: str, nbytes: int) -> None:
    """LMCache stores behind the caller's back and does not say when it is done."""
    give_up = time.monotonic() + 30
    while held(url) < nbytes:
        assert time.monotonic() < give_up, "it is never stored"
        time.sleep(0.01)


def main() -> None:
    job = json.load(sys.stdin)
    for kind in job["kinds"]:
        run = manager if kind["name"].startswith("mp-") else engine
        print(json.dumps({"name": kind["name"], **run(job["role"], kind)}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
