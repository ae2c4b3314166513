"""Invariant: LMCache's own clients, unmodified, find on Pion what they need and Redis lacks: a full
server evicts rather than refuse, never what they have just seen to be there, and never one of two
keys that are one chunk; keys go after a time; users and databases do not meet.

The resp:// client waits for ever for the answer to a GET of a key that is gone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="needs lmcache (Linux): make lmcache")
pytest.importorskip("glide_sync", reason="needs LMCache's valkey client: valkey-glide-sync")

from integrations.lmcache.tests import engines
from integrations.lmcache.tests.servers import Server

SCRIPT = Path(__file__).with_name("stock.py")
SCHEMES = ("redis", "resp", "valkey")
CHUNK_BYTES = 2 * 2 * engines.LAYERS * engines.CHUNK * engines.WIDTH
USERS = {"ann": "secret-a", "bob": "secret-b"}


def spaces(scheme: str, place: str) -> list[dict[str, Any]]:
    """How a client says who it is, and which database it means."""
    if scheme == "redis":
        urls = [f"redis://{user}:{secret}@{place}" for user, secret in USERS.items()]
        return [engines.stock(url) for url in (*urls, f"{urls[0]}/3")]
    if scheme == "resp":
        return [
            engines.stock(f"resp://{place}", username=user, password=secret)
            for user, secret in USERS.items()
        ]
    # This client hands the two to its library in the wrong order.
    who = [{"valkey_username": secret, "valkey_password": user} for user, secret in USERS.items()]
    return [
        engines.stock(f"valkey://{place}", **extra)
        for extra in (*who, {**who[0], "valkey_database": 3})
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    logs = tmp_path_factory.mktemp("servers")
    room = ("--max-memory", str(12 * CHUNK_BYTES + 4096), "--default-ttl", "600")
    small = {name: Server.pion(logs / name, *room) for name in SCHEMES}
    users = [word for pair in USERS.items() for word in ("--tenant", ":".join(pair))]
    shared = Server.pion(logs / "shared", *users)
    jobs: list[dict[str, Any]] = []
    for name, server in small.items():
        settings = engines.stock(server.url.replace("pion", name))
        place = shared.url.removeprefix("pion://")
        jobs += [
            {"name": f"{name} pressed", "run": "pressed", "url": server.url, "settings": settings},
            {"name": f"{name} apart", "run": "apart", "spaces": spaces(name, place)},
        ]
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        timeout=200,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(jobs), done.stderr
    yield {line.pop("name"): line for line in lines}
    for server in (*small.values(), shared):
        server.finish()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_eviction_and_time_to_live(results: dict[str, Any], scheme: str) -> None:
    assert results[f"{scheme} pressed"] == {
        "seen": [True] * 4,
        "kept": [True] * 4,
        "newest": True,
        "evicted": True,
        "whole": True,
        "mortal": True,
    }


@pytest.mark.parametrize("scheme", SCHEMES)
def test_users_and_databases_are_apart(results: dict[str, Any], scheme: str) -> None:
    places = 2 if scheme == "resp" else 3
    assert results[f"{scheme} apart"] == {"own": [True] * places}
