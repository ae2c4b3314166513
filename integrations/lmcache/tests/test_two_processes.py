"""Invariant: a second, fresh process finds and retrieves bit for bit the K/V that a first one
stored: with our connectors, and with LMCache's own clients, unmodified, pointed at Pion; each
configured as the README says.
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

from integrations.lmcache.tests import readme
from integrations.lmcache.tests.servers import Server

SCRIPT = Path(__file__).with_name("process.py")


# The resp:// client loses the answer to one look-up in about twenty, whatever the server, and then
# waits for ever (it asks before it registers who waits for the answer). So it looks up in a process
# of its own, and may try again.
KINDS = ("pion", "redis", "valkey", "mp-pion", "mp-resp", "mp-valkey", "resp")
HANGS = "resp"
ATTEMPTS = 6
# Long enough for a busy machine; only a process that hangs needs as long.
SECONDS, SECONDS_OF_HANGS = 200, 30
# With four workers LMCache's connections end up on several: plain keys are passed on, and our
# connectors are told where a chunk lives.
SERVERS = {"one": (), "four": ("-w", "4")}


def process(role: str, kinds: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The results of one process, by kind, as far as it came in this time."""
    with subprocess.Popen(
        [sys.executable, str(SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        job = json.dumps({"role": role, "kinds": kinds})
        try:
            out, err = child.communicate(job, timeout=seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            out, err = child.communicate()
    results = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert results or len(kinds) == 1, err
    return {result.pop("name"): result for result in results}


@pytest.fixture(scope="module", params=SERVERS)
def kinds(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[dict[str, Any]]]:
    server = Server.pion(tmp_path_factory.mktemp("server") / "log", *SERVERS[request.param])
    yield [
        {"name": name, "url": server.url, "settings": readme.settings(name, server.port)}
        for name in KINDS
    ]
    server.finish()


@pytest.fixture(scope="module")
def results(kinds: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What the two processes saw: {"store": {kind: ...}, "retrieve": {kind: ...}}."""
    seen = {
        "store": process("store", kinds, SECONDS),
        "retrieve": process("retrieve", kinds[:-1], SECONDS),
    }
    attempts = 0
    while HANGS not in seen["retrieve"] and attempts < ATTEMPTS:
        seen["retrieve"] |= process("retrieve", kinds[-1:], SECONDS_OF_HANGS)
        attempts += 1
    return seen


@pytest.mark.parametrize("name", KINDS)
def test_two_processes(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results["retrieve"][name] == results["store"][name]
