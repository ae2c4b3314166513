"""Invariant: plain keys are the same on every worker, as if there were one, in order and byte for
byte; and while the worker that keeps them is away, a command ends with an error, not never.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from pion_server.commands import load_families
from pion_server.commands.registry import TABLE, Home
from pion_server.errors import PionError
from pion_server.workers import relay

from ..raw import Raw
from .conftest import SECONDS

LARGE = os.urandom(1 << 20) * 32

# One reply each, whatever the clock says. Every command that is passed on is among them.
STORY: list[list[Any]] = [
    ["FLUSHALL"],
    ["SET", "a", "1"],
    ["SET", "a", "2", "NX"],
    ["SET", "a", "2", "GET"],
    ["SET", "a", "3", "XX", "PX", 500_000],
    ["SET", "a"],
    ["SET", "a", "1", "NX", "XX"],
    ["GET", "a"],
    ["GET", "none"],
    ["GET"],
    ["MSET", "b", "", "c", b"\0\r\n", "d", "x" * 100_000],
    ["MGET", "a", "b", "c", "none", "d"],
    ["STRLEN", "d"],
    ["EXISTS", "a", "a", "none"],
    ["TYPE", "a"],
    ["EXPIRE", "b", 1000],
    ["PEXPIRE", "b", 10, "GT"],
    ["EXPIRE", "b", "soon"],
    ["TTL", "b"],
    ["PTTL", "c"],
    ["PERSIST", "b"],
    ["TTL", "b"],
    ["DBSIZE"],
    ["KEYS", "*"],
    ["SCAN", 0, "COUNT", 100],
    ["SCAN", "no cursor"],
    ["SELECT", 5],
    ["GET", "a"],
    ["SET", "a", "of db 5"],
    ["GET", "a"],
    ["FLUSHDB"],
    ["GET", "a"],
    ["SELECT", 0],
    ["GET", "a"],
    ["DEL", "a", "none"],
    ["UNLINK", "b"],
    ["DBSIZE"],
    ["FLUSHALL"],
]


@pytest.mark.parametrize("proto", [2, 3])
def test_every_worker_says_what_a_server_without_workers_says(
    crew: Any, pion_server: Any, proto: int
) -> None:
    load_families()
    passed_on = {name for name, row in TABLE.items() if row.home is Home.FIRST}
    assert passed_on == {words[0] for words in STORY} - {"SELECT"}
    told = []
    for raw in (Raw(pion_server.port), *(crew.raw(each) for each in (0, 1, 2))):
        raw.ask("HELLO", proto)
        told.append([raw.ask(*words) for words in STORY])
    for words, expected, *others in zip(STORY, *told, strict=True):
        assert all(other == expected for other in others), words


def test_set_on_one_connection_get_on_the_others(crew: Any) -> None:
    connections = [
        redis.Redis(port=port, protocol=3)
        for port in [crew.port] * 12 + [crew.port_of(worker) for worker in range(3)]
    ]
    for number, writer in enumerate(connections):
        writer.set("coherent", number)
        assert {int(reader.get("coherent")) for reader in connections} == {number}
    connections[3].delete("coherent")
    assert {reader.get("coherent") for reader in connections} == {None}
    for each in connections:
        each.close()


def test_a_pipeline_is_in_order(crew: Any) -> None:
    """Also where commands that are not passed on stand in between."""
    raw = crew.raw(2)
    expected = []
    for number in range(2000):
        raw.send("SET", "ordered", number)
        raw.send("GET", "ordered")
        raw.send("ECHO", f"e{number}")
        raw.send("EXISTS", "ordered", "ordered")
        expected += [b"+OK\r\n", bulk(number), bulk(f"e{number}"), b":2\r\n"]
    assert [raw.reply() for _ in expected] == expected


def bulk(value: Any) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(str(value)), str(value).encode())


def test_clients_at_once_do_not_meet(crew: Any) -> None:
    """Each counts its own key up, on any worker, with others between its commands."""
    wrong: list[Any] = []

    def count(mine: int) -> None:
        with redis.Redis(port=crew.port_of(mine % 3), db=mine % 4) as client:
            for number in range(150):
                client.set(f"count-{mine}", number)
                if client.get(f"count-{mine}") != str(number).encode():
                    wrong.append((mine, number))

    threads = [threading.Thread(target=count, args=(mine,)) for mine in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_large_values_come_through(crew: Any) -> None:
    writer, reader = redis.Redis(port=crew.port_of(1)), redis.Redis(port=crew.port_of(2))
    assert writer.set("large", LARGE)
    with reader.pipeline(transaction=False) as pipeline:
        for _ in range(4):
            pipeline.get("large").strlen("large")
        got = pipeline.execute()
    assert got == [LARGE, len(LARGE)] * 4
    assert writer.delete("large") == 1


def test_they_are_in_no_other_worker(crew: Any) -> None:
    clients = [crew.client(worker) for worker in range(3)]
    before = [client.prefix_info()["memory_used"] for client in clients]
    clients[1].set("where", "x" * 1000)
    assert all(client.dbsize() > 0 for client in clients)
    used = [client.prefix_info()["memory_used"] for client in clients]
    assert used[1:] == before[1:]
    assert used[0] >= before[0] + 1000
    keyspace = [client.info("keyspace") for client in clients]
    assert [bool(fields) for fields in keyspace] == [True, False, False]


def test_while_worker_0_is_away(start_crew: Any, tmp_path: Path) -> None:
    crew = start_crew(2, "--data-dir", str(tmp_path), "--wal-fsync", "no")
    client = redis.Redis(port=crew.port_of(1))
    acknowledged = -1
    errors = []
    for round_ in range(2):
        old = crew.workers[0].pid
        os.kill(old, signal.SIGKILL)
        give_up = time.monotonic() + SECONDS
        while True:
            assert time.monotonic() < give_up
            try:
                client.set("survivor", acknowledged + 1)
            except redis.ResponseError as error:
                errors.append(str(error))
            else:
                acknowledged += 1
                if acknowledged % 50 == 0 and crew.workers[0].pid != old:
                    break
        assert int(client.get("survivor") or -1) == acknowledged, round_
    assert all("did not answer" in error for error in errors), errors
    assert len(errors) <= 2, "a command that was never sent need not fail"


def test_a_read_outlives_worker_0(start_crew: Any, tmp_path: Path) -> None:
    crew = start_crew(2, "--data-dir", str(tmp_path))
    client = redis.Redis(port=crew.port_of(1))
    client.set("k", "v")
    for _ in range(2):
        old = crew.workers[0].pid
        os.kill(old, signal.SIGKILL)
        assert client.get("k") == b"v"


async def test_where_worker_0_does_not_answer_it_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(relay, "SECONDS", 0.3)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "worker-0"))
        listener.listen()
        link = relay.Relay(tmp_path / "worker-0")
        asked = [link.ask("default", 0, [b"GET", b"k"], repeatable) for repeatable in (True, False)]
        for answer in asked:
            with pytest.raises(PionError, match="worker 0, which keeps"):
                await answer
        await link.close()
