"""Invariant: a worker that dies is back with what it had acknowledged, at its own port, and the
others serve meanwhile; the workers live exactly as long as their supervisor; and a server that
cannot be started says why and leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from pion_server.client import Client, PionError
from pion_server.config import OWN_PORTS

from .conftest import SECONDS, holds_prefix, store_prefix


def wait_until(what: Callable[..., bool], *args: Any) -> None:
    give_up = time.monotonic() + SECONDS
    while not what(*args):
        assert time.monotonic() < give_up, "it did not come to that"
        time.sleep(0.01)


def children_of(crew: Any) -> list[psutil.Process]:
    return psutil.Process(crew.server.pid).children()


def inner_folder(children: list[psutil.Process]) -> Path:
    """Where worker 0 hears from the others."""
    (path,) = {
        Path(each.laddr)
        for child in children
        for each in child.net_connections("unix")
        if each.laddr and Path(each.laddr).name == "worker-0"
    }
    return path.parent


def kill(crew: Any, worker: int) -> int:
    """SIGKILL; the process id it had."""
    pid: int = crew.workers[worker].pid
    os.kill(pid, signal.SIGKILL)
    return pid


def is_back(crew: Any, worker: int, old: int) -> bool:
    seat = crew.workers[worker]
    return bool(seat.up and seat.pid != old)


class Load(threading.Thread):
    """Stores prefixes on one worker, and writes down what was acknowledged."""

    def __init__(self, crew: Any, worker: int) -> None:
        super().__init__()
        self._crew = crew
        self._worker = worker
        self.stopping = threading.Event()
        self.acknowledged: dict[str, np.ndarray[Any, Any]] = {}
        self.refused = 0

    def go_on(self, count: int) -> None:
        """Wait until so many more were acknowledged."""
        enough = len(self.acknowledged) + count
        wait_until(lambda: len(self.acknowledged) >= enough)

    def run(self) -> None:
        client = self._crew.client(self._worker)
        number = 0
        while not self.stopping.is_set():
            number += 1
            name, rows = f"w{self._worker}-{number}", np.random.rand(256, 64).astype("<f4")
            try:
                client.prefix_register(name, 64, "fp32", layers=1, tokens=256, prefill_ms=number)
                client.prefix_store(name, 0, 256, [(rows, rows)], fmt="FP32")
            except PionError:
                self.refused += 1
            else:
                self.acknowledged[name] = rows


def test_killed_under_load(start_crew: Any, tmp_path: Path) -> None:
    crew = start_crew(3, "--data-dir", str(tmp_path / "data"), "--wal-fsync", "no")
    loads = [Load(crew, worker) for worker in range(3)]
    for load in loads:
        load.start()
    for _ in range(2):
        loads[1].go_on(20)
        old = kill(crew, 1)
        served = [len(load.acknowledged) for load in loads]
        wait_until(is_back, crew, 1, old)
        assert len(loads[0].acknowledged) > served[0]
        assert len(loads[2].acknowledged) > served[2]
    for load in loads:
        load.stopping.set()
        load.join()
    assert [load.refused for load in loads[::2]] == [0, 0]
    everyone = [crew.client(worker) for worker in range(3)]
    for load in loads:
        for client in everyone:
            assert client.prefix_match(list(load.acknowledged)) == len(load.acknowledged)
        for name, rows in list(load.acknowledged.items())[-100:]:
            found = everyone[0].prefix_fetch(name, fmt="NATIVE")
            assert found is not None, name
            assert bytes(found.rows[0][0]) == bytes(found.rows[0][1]) == rows.tobytes()
    assert "worker 1 is gone: SIGKILL" in crew.server.log.read_text()


def test_without_a_disk_its_names_are_free_again(start_crew: Any) -> None:
    crew = start_crew(2)
    ports = [each.port for each in crew.workers]
    store_prefix(crew.client(1), "lost")
    witness = crew.client(0, auto_redirect=False)
    assert witness.prefix_lookup("lost")
    old = kill(crew, 1)
    wait_until(lambda: not witness.prefix_lookup("lost"))
    wait_until(is_back, crew, 1, old)
    assert [each.port for each in crew.workers] == ports
    store_prefix(witness, "lost")
    assert holds_prefix(crew.client(1), "lost")
    assert crew.client(1).prefix_info()["registered_prefixes"] == 0


def test_a_call_meanwhile_waits_for_the_worker(start_crew: Any, tmp_path: Path) -> None:
    """Its port is there all the time, so a client finds what it is sent to."""
    crew = start_crew(2, "--data-dir", str(tmp_path))
    store_prefix(crew.client(1), "kept")
    for _ in range(2):
        client = crew.client(0)
        assert client.prefix_lookup("kept")
        old = kill(crew, 1)
        assert holds_prefix(client, "kept")
        wait_until(is_back, crew, 1, old)


def test_one_that_cannot_come_back_leaves_the_others_alone(start_crew: Any, tmp_path: Path) -> None:
    crew = start_crew(2, "--data-dir", str(tmp_path))
    store_prefix(crew.client(1), "away")
    store_prefix(crew.client(0), "here")
    folder, aside = tmp_path / "worker-1" / "default", tmp_path / "aside"
    folder.rename(aside)
    folder.write_text("no folder")
    old = kill(crew, 1)
    witness = crew.client(0, auto_redirect=False)
    wait_until(lambda: crew.server.log.read_text().count("worker 1 is gone") >= 2)
    assert not witness.prefix_lookup("away")
    assert witness.prefix_lookup("here")
    with pytest.raises(PionError, match="lives on worker 1"):
        witness.prefix_register("away", 4, "fp32")
    folder.unlink()
    aside.rename(folder)
    wait_until(is_back, crew, 1, old)
    assert holds_prefix(crew.client(0), "away")


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_all_stop_together(start_crew: Any, end: signal.Signals) -> None:
    crew = start_crew(2)
    children = children_of(crew)
    assert len(children) == 2
    folder = inner_folder(children)
    assert folder.stat().st_mode & 0o777 == 0o700
    os.kill(crew.server.pid, end)
    assert crew.server.process.wait(SECONDS) == 0
    assert not any(child.is_running() for child in children)
    assert not folder.exists()


def test_workers_without_a_supervisor_stop(start_crew: Any) -> None:
    crew = start_crew(2)
    children = children_of(crew)
    folder = inner_folder(children)
    crew.server.kill()
    gone, left = psutil.wait_procs(children, SECONDS)
    assert (len(gone), left) == (2, [])
    assert not folder.exists()


def test_no_secret_is_on_a_command_line(start_crew: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("PION_REQUIREPASS", "s3cret-of-the-environment")
    crew = start_crew(2, "--host", "0.0.0.0")
    for process in (psutil.Process(crew.server.pid), *children_of(crew)):
        assert "s3cret" not in " ".join(process.cmdline())
    with Client(f"pion://:s3cret-of-the-environment@127.0.0.1:{crew.port}") as client:
        # The address that the server listens on is nobody's; the caller's way in is told instead.
        assert [(each.worker, each.host) for each in client.pion_workers()] == [
            (0, "127.0.0.1"),
            (1, "127.0.0.1"),
        ]


# -- where the server listens ---------------------------------------------------------------------


def free_ports(count: int) -> int:
    """The first of so many, all free a moment ago."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            first: int = probe.getsockname()[1]
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except (OSError, OverflowError):
            continue
        return first


def test_a_workers_port_goes_by_the_servers(start_crew: Any) -> None:
    first = free_ports(OWN_PORTS + 4)
    crew = start_crew(2, "--port", str(first))
    assert crew.port == first
    assert [each.port for each in crew.workers] == [first + OWN_PORTS, first + OWN_PORTS + 2]
    assert [each.fast_port for each in crew.workers] == [each.port + 1 for each in crew.workers]
    for each in crew.workers:
        client = crew.client(each.worker)
        assert client.pion_stats()["worker"] == client.prefix_info()["worker"] == each.worker
        assert client.pion_workers() == crew.workers
        assert psutil.pid_exists(each.pid)
    assert {each.host for each in crew.workers} == {"127.0.0.1"}


def test_a_server_without_workers_is_worker_0(pion_server: Any) -> None:
    with Client(pion_server.url) as client:
        (only,) = client.pion_workers()
    assert only[:5] == (0, "127.0.0.1", pion_server.port, pion_server.pid, True)


# -- what cannot be started -----------------------------------------------------------------------


def refusal_of(*options: str) -> str:
    """Why a server with these options does not start; it has to end by itself, with status 1."""
    command = [sys.executable, "-m", "pion_server", "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 1, done.stderr
    return done.stderr


def test_a_port_that_is_taken() -> None:
    first = free_ports(OWN_PORTS + 4)
    for port in (first, first + OWN_PORTS + 2):  # of all, of worker 1
        with socket.create_server(("127.0.0.1", port)):
            said = refusal_of("-w", "2", "--port", str(first))
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in said


def test_a_worker_that_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "worker-1").mkdir(parents=True)
    (tmp_path / "worker-1" / "default").write_text("no folder")
    (tmp_path / ".workers").write_text("3\n")
    before = set(psutil.Process().children(recursive=True))
    said = refusal_of("-w", "3", "--data-dir", str(tmp_path))
    assert "worker 1 could not start" in said
    assert "listening" not in said
    assert set(psutil.Process().children(recursive=True)) == before


def test_a_folder_of_another_number_of_workers(start_pion: Any, tmp_path: Path) -> None:
    for made, others in (("2", "13"), ("1", "2")):
        folder = str(tmp_path / made)
        server = start_pion("-w", made, "--data-dir", folder)
        with Client(server.url) as client:
            store_prefix(client, "kept")
        server.stop()
        for asked in others:
            said = refusal_of("-w", asked, "--data-dir", folder)
            assert f"is that of a server with {made} workers: start it with -w {made}" in said
    with Client(start_pion("-w", "2", "--data-dir", str(tmp_path / "2")).url) as client:
        assert holds_prefix(client, "kept")
