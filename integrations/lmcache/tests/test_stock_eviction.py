"""Invariant: a server that is full evicts rather than refuse, never what LMCache's own clients have
just seen to be there, and never one of two keys that are one chunk.

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

pytest.importorskip("lmcache", reason="needs lmcache (Linux): pip install 'pion-kv[lmcache]'")
pytest.importorskip("glide_sync", reason="needs LMCache's valkey client: valkey-glide-sync")

from integrations.lmcache.tests import engines
from integrations.lmcache.tests.servers import Server

SCRIPT = Path(__file__).with_name("pressure.py")
SCHEMES = ("redis", "resp", "valkey")
CHUNK_BYTES = 2 * 2 * engines.LAYERS * engines.CHUNK * engines.WIDTH


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    logs = tmp_path_factory.mktemp("servers")
    room = str(12 * CHUNK_BYTES + 4096)
    servers = {name: Server.pion(logs / name, "--max-memory", room) for name in SCHEMES}
    job = {name: server.url for name, server in servers.items()}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=200,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(SCHEMES), done.stderr
    yield {line.pop("scheme"): line for line in lines}
    for server in servers.values():
        server.finish()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_eviction_under_a_stock_client(results: dict[str, Any], scheme: str) -> None:
    assert results[scheme] == {
        "seen": [True] * 4,
        "kept": [True] * 4,
        "newest": True,
        "evicted": True,
        "whole": True,
    }
