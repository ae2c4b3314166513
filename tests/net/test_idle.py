"""Invariant: connections that say nothing cost a few KB and a descriptor each, and give both back;
the server answers the others, takes as many again, and ends when it is told to.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

KB, MB = 1 << 10, 1 << 20
SHELL = 256  # files that a process may open on macOS, unless somebody says more
SPARE = 500  # files of the tests
PATIENCE = 60.0


@contextmanager
def open_files(soft: int) -> Iterator[None]:
    """This process, and those that it starts, may open so many files."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < soft:
        pytest.skip(f"needs {soft} open files, and the system allows {hard} (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def crowd(dial: Any, port: int, count: int) -> list[Any]:
    """So many clients that have said one thing, each of them another one."""
    wires = [dial(port) for _ in range(count)]
    for wire in wires:
        wire.send("CLIENT", "ID")
    assert len({wire.line() for wire in wires}) == count
    return wires


def work(wire: Any) -> None:
    blob = b"x" * MB
    assert wire.ask("SET", "k", blob) == b"+OK\r\n"
    wire.send("GET", "k")
    wire.expect_bulk(blob, 1)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_idle_connections(
    start_pion: Any, dial: Any, resident: Any, eventually: Any, count: int
) -> None:
    with open_files(SHELL):
        server = start_pion("--maxclients", str(count + 1))
    process = psutil.Process(server.pid)
    with open_files(count + SPARE):
        worker = dial(server.port)
        work(worker)
        memory, files, peaks = resident(server.pid), process.num_fds(), []
        for _ in range(3):
            wires = crowd(dial, server.port, count)
            work(worker)
            assert process.num_fds() == files + count
            peaks.append(resident(server.pid))
            for wire in wires:
                wire.close()
            eventually(lambda: process.num_fds() == files)
        assert peaks[0] - memory < count * 24 * KB + 4 * MB
        assert max(peaks[1:]) < peaks[0] + 4 * MB, peaks
        crowd(dial, server.port, count)
        server.process.terminate()
        assert server.process.wait(PATIENCE) == 0
