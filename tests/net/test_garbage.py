"""Invariant: what clients make, leave and get refused is freed when its last use is over, with no
help of a garbage collection; so nothing grows where old objects are no longer visited by one, and
no full collection ever visits what is held.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion_server.client import Client
from pion_server.errors import PionError

MB = 1 << 20
# A server that tells on request what only a collection would free, and how many objects a full
# collection would visit.
TOLD = """
import gc, json, sys, threading
from pathlib import Path
import uvloop
from pion_server.config import Config
from pion_server.net.server import log_to_stderr, serve

gc.disable()
folder, *tls = map(Path, sys.argv[1:])
files = dict(zip(("tls_cert", "tls_key"), tls))
config = Config(port=0, data_dir=folder, max_memory=4_000_000, **files)
log_to_stderr(config)

def answer():
    for line in sys.stdin:
        visited = sum(len(gc.get_objects(generation=each)) for each in range(3))
        print(json.dumps([gc.collect(), visited]), flush=True)

threading.Thread(target=answer, daemon=True).start()
uvloop.run(serve(config))
"""


class Told:
    """That server, over TLS where there are certificates."""

    def __init__(self, folder: Path, dial: Any, certificates: Any = None) -> None:
        command = [sys.executable, "-c", TOLD, str(folder / "data")]
        if certificates is not None:
            command += [str(certificates.cert), str(certificates.key)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"listening on \S+:(\d+)", line):
                break
        port = int(found[1])  # type: ignore[index]
        self.url = f"pion://127.0.0.1:{port}"
        if certificates is not None:
            self.url = f"pions://127.0.0.1:{port}?ca={certificates.ca}"
        self.dial = partial(dial, port, certificates and certificates.trusting())

    def collect(self) -> list[int]:
        """[objects that only this collection freed, objects that it visited]"""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("now\n")
        self.process.stdin.flush()
        told: list[int] = json.loads(self.process.stdout.readline())
        return told


@pytest.fixture(params=["plain", "tls"])
def told(
    request: pytest.FixtureRequest, tmp_path: Path, dial: Any, certificates: Any
) -> Iterator[Told]:
    server = Told(tmp_path, dial, certificates if request.param == "tls" else None)
    yield server
    server.process.terminate()
    assert server.process.wait(20) == 0
    for pipe in (server.process.stdin, server.process.stdout, server.process.stderr):
        pipe.close()  # type: ignore[union-attr]


def everything(told: Told) -> None:
    """Clients that store, read, evict, are refused, break the protocol and leave in every way."""
    keys = np.ones((2, 3, 4), np.float32)
    with Client(told.url) as client:
        for i in range(60):
            name = f"prefix-{i}"
            client.prefix_register(name, 8, "fp16", layers=2, tokens=4)
            rows = bytes(4 * 8 * 2)
            client.prefix_store(name, 0, 4, [(rows, rows)] * 2, fmt="NATIVE")
            client.prefix_fetch(name, fmt="NATIVE")
            client.set(f"key-{i}", bytes(100_000))
            client.ssm_store(name, 0, b"state")
            client.prefix_warm(name, 2, 4)
            client.attend_store("state", 0, keys, keys)
            client.attend_query("state", 0, keys)
            with pytest.raises(PionError):
                client.attend_query("state", 0, keys[:, :, 1:])
            with pytest.raises(PionError):
                client.v_fetch("nowhere", 0, 0, 1)
            with pytest.raises(PionError):
                client.prefix_store("unknown", 0, 4, [(rows, rows)] * 2, fmt="NATIVE")
    for how in ("close", "reset", "half_close"):
        for last in (
            b"*1\r\n$4\r\nPING\r\n",
            b"*1\r\n$x\r\n",
            b"*2\r\n$3\r\nGET\r\n$9\r\nhalf",
            b"",
        ):
            wire = told.dial()
            wire.write(last)
            getattr(wire, how)()
            if how == "half_close":
                wire.rest()


def test_nothing_is_left_for_the_collector(told: Told, eventually: Any) -> None:
    everything(told)
    told.collect()  # what is left of the start, and of what is loaded when it is first used
    everything(told)
    other = told.dial()
    eventually(lambda: clients(other) == 1)
    freed, _ = told.collect()
    assert freed == 0


def test_a_full_collection_visits_nothing_that_is_held(told: Told) -> None:
    everything(told)
    _, before = told.collect()
    _, after = told.collect()
    assert before > 1_000
    assert after < 500


def clients(wire: Any) -> int:
    wire.send("INFO", "clients")
    text = wire.take(int(wire.line()[1:]) + 2)
    found = re.search(rb"connected_clients:(\d+)", text)
    assert found is not None
    return int(found[1])


def test_a_refused_write_leaves_memory_at_once(pion_server: Any, dial: Any, resident: Any) -> None:
    blob, before = bytes(32 * MB), resident(pion_server.pid)
    for _ in range(10):
        wire = dial(pion_server.port)
        refusal = wire.ask("V.STOREBATCH", "nowhere", 0, 0, 1, blob)
        assert refusal == b"-ERR unknown session 'nowhere'\r\n"
    assert resident(pion_server.pid) - before < 5 * 32 * MB
