"""Invariant: LMCache's own acceptance tools find nothing wrong with Pion, neither behind our
connectors nor behind LMCache's own clients.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="needs lmcache (Linux): make lmcache")
pytest.importorskip("glide_sync", reason="needs LMCache's valkey client: valkey-glide-sync")

from integrations.lmcache.tests import engines, managers
from integrations.lmcache.tests.servers import Server

# Python alone needs seconds to start LMCache, more on a busy machine.
PATIENCE = 200.0
CHECK = ["-m", "lmcache.v1.basic_check", "--num-keys", "3"]
BENCH = ["-c", "import sys; from lmcache.cli.main import main; sys.exit(main())", "bench", "l2"]
BENCH += ["--num-keys", "4", "--data-size-kb", "256", "--rounds", "2", "--no-skip-verify"]


def remote(url: str, scheme: str) -> tuple[list[str], dict[str, str]]:
    """basic_check of the engine's remote backend; it is configured by the environment alone."""
    address = f"{scheme}://{url.removeprefix('pion://')}"
    settings = engines.plugin(url) if scheme == "pion" else engines.stock(address)
    return [*CHECK, "--mode", "test_remote"], {
        "LMCACHE_REMOTE_URL": "plugin://pion" if scheme == "pion" else address,
        "LMCACHE_REMOTE_STORAGE_PLUGINS": ",".join(settings.get("remote_storage_plugins", [])),
        "LMCACHE_EXTRA_CONFIG": json.dumps(settings["extra_config"]),
        "LMCACHE_LOCAL_CPU": "false",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.1",
    }


def second_level(command: list[str], adapter: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    return [*command, "--l2-adapter", json.dumps(adapter)], {}


def tools(urls: Iterator[str]) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Name -> arguments and environment of each run; each has a server of its own."""
    l2_check = [*CHECK, "--mode", "test_l2_adapter", "--obj-size", "4096"]
    bench = [*BENCH, "--format", "json"]
    return {
        **{f"remote {scheme}": remote(next(urls), scheme) for scheme in SCHEMES},
        "l2 pion": second_level(l2_check, managers.plugin(next(urls))),
        "bench pion": second_level(bench, managers.plugin(next(urls))),
        "bench resp": second_level(bench, managers.resp(next(urls))),
        "bench valkey": second_level(bench, managers.valkey(next(urls))),
    }


SCHEMES = ("pion", "redis", "resp", "valkey")
BENCHES = [f"bench {scheme}" for scheme in ("pion", "resp", "valkey")]
RUNS = [*(f"remote {scheme}" for scheme in SCHEMES), "l2 pion", *BENCHES]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What each of the tools prints; most of their time is Python's, so they run side by side."""
    folder: Path = tmp_path_factory.mktemp("runs")
    servers = [Server.pion(folder / f"server-{i}") for i in range(len(RUNS))]
    runs = {
        name: started(folder / name.replace(" ", "-"), *tool)
        for name, tool in tools(iter(server.url for server in servers)).items()
    }
    yield {name: finished(*run) for name, run in runs.items()}
    for server in servers:
        server.finish()


def started(
    output: Path, arguments: list[str], environment: dict[str, str]
) -> tuple[subprocess.Popen[bytes], Path]:
    environment = {"PYTHONUNBUFFERED": "1", "LMCACHE_LOG_LEVEL": "WARNING", **environment}
    with output.open("wb") as sink:
        command = [sys.executable, *arguments]
        child = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=sink, stderr=subprocess.STDOUT
        )
    return child, output


def finished(child: subprocess.Popen[bytes], output: Path) -> str:
    """All that a tool prints. It is not waited for after its table of results: closing is where
    two of LMCache's own clients hang."""
    give_up = time.monotonic() + PATIENCE
    table = re.compile(r"Performance Results.*(\n-+.*){3}", re.DOTALL)
    while child.poll() is None and not table.search(output.read_text()):
        assert time.monotonic() < give_up, output.read_text()
        time.sleep(0.05)
    child.kill()
    child.wait()
    return output.read_text()


@pytest.mark.parametrize("name", [run for run in RUNS if run not in BENCHES])
def test_basic_check(said: dict[str, str], name: str) -> None:
    counts = re.findall(r"Validation.*?(\d+)/(\d+)", said[name])
    assert len(counts) >= 4, said[name]
    assert all(passed == asked == "3" for passed, asked in counts), said[name]


@pytest.mark.parametrize("name", BENCHES)
def test_bench_l2_verifies_what_it_loads(said: dict[str, str], name: str) -> None:
    assert "data verified OK" in said[name], said[name]
    report = json.loads(said[name][said[name].index("{\n") : said[name].rindex("}") + 1])
    operations = {v["operation"]: v for k, v in report["metrics"].items() if k != "config"}
    for operation in ("Store", "Load"):
        assert operations[operation]["total_success"] == operations[operation]["total_keys"] == 8
        assert operations[operation]["rounds_timed_out"] == 0
