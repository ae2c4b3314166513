"""Invariant: nobody can keep others out, by taking all connections or by standing in the door; and
a client that does not read makes the server hold no more than a bound.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pion_server import tenants
from pion_server.commands.registry import TABLE, Access, Command, Job
from pion_server.config import TenantOptions
from pion_server.journal.disk import Buffer, Disk
from pion_server.net import connection, door, lobby
from pion_server.wire.values import OK

from ..raw import request

FULL = b"-ERR max number of clients reached\r\n"
TWO = tuple(TenantOptions.parse(text) for text in ("alice:alices-s3cret", "bob:bobs-s3cret"))


def test_one_too_many_is_told_so_and_closed(start_pion: Any, dial: Any) -> None:
    port = start_pion("--maxclients", "3").port
    inside = [dial(port) for _ in range(3)]
    assert [raw.ask("PING") for raw in inside] == [b"+PONG\r\n"] * 3
    for _ in range(5):
        late = dial(port)
        assert late.reply() == FULL
        assert late.closed()
    assert inside[0].ask("CONFIG", "GET", "maxclients") == b"*2\r\n$10\r\nmaxclients\r\n$1\r\n3\r\n"
    assert inside[0].ask("QUIT") == b"+OK\r\n"
    assert inside[0].closed()
    assert dial(port).ask("PING") == b"+PONG\r\n"


def test_nobody_takes_the_seats_of_another(two_tenants: Any, dial: Any) -> None:
    port = two_tenants("--maxclients", "5").port
    alices = [dial(port, "alice") for _ in range(2)]
    for login in (["AUTH", "alice"], ["HELLO", "3", "AUTH", "alice"]):
        late = dial(port)
        assert late.ask(*login, "alices-s3cret") == FULL
        assert late.closed()
    bobs = [dial(port, "bob") for _ in range(2)]
    assert [raw.ask("DBSIZE") for raw in (*alices, *bobs)] == [b":0\r\n"] * 4
    # A seat is free again once its client is gone, or is nobody's or another's.
    assert alices[0].ask("RESET") == b"+RESET\r\n"
    assert alices[0].ask("AUTH", "alice", "alices-s3cret") == b"+OK\r\n"
    assert bobs[0].ask("QUIT") == b"+OK\r\n"
    assert bobs[0].closed()
    assert alices[0].ask("AUTH", "bob", "bobs-s3cret") == b"+OK\r\n"
    assert dial(port, "alice").ask("DBSIZE") == b":0\r\n"


def test_strangers_keep_nobody_out(inside: Any, dial: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(lobby, "ROOM", 10)
    port = inside(tenants=TWO, maxclients=4).port
    bob = dial(port, "bob")
    strangers = []
    for number in range(50):
        strangers.append(dial(port))
        if number % 10 == 9:
            raw = dial(port, "bob")
            assert raw.ask("DBSIZE") == b":0\r\n"
            raw.close()
    assert all(raw.closed() for raw in strangers[:35])
    assert strangers[-1].ask("PING").startswith(b"-NOAUTH")
    assert bob.ask("DBSIZE") == b":0\r\n"


def test_who_logs_off_is_a_stranger_again(inside: Any, dial: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(lobby, "ROOM", 3)
    port = inside(tenants=TWO).port
    raw = dial(port, "alice")
    assert raw.ask("RESET") == b"+RESET\r\n"
    assert dial(port, "alice").ask("PING") == b"+PONG\r\n"
    later = [dial(port) for _ in range(10)]
    assert raw.closed()
    assert later[-1].ask("PING").startswith(b"-NOAUTH")


def test_a_handshake_that_never_comes_keeps_nobody_out(
    inside: Any, dial: Any, certificates: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(lobby, "ROOM", 10)
    server = inside(tls_cert=certificates.cert, tls_key=certificates.key, maxclients=2)
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
    raw = dial(server.port, tls=certificates.trusting())
    assert raw.ask("PING") == b"+PONG\r\n"
    for sock in silent[:25]:
        sock.settimeout(20)
        assert sock.recv(1) == b""
    for sock in silent:
        sock.close()


def test_a_handshake_ends_in_time(inside: Any, certificates: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_SECONDS", 0.2)
    server = inside(tls_cert=certificates.cert, tls_key=certificates.key)
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.settimeout(20)
        assert sock.recv(1) == b""


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_who_takes_nothing_is_dropped(
    inside: Any, dial: Any, certificates: Any, monkeypatch: Any, encrypted: bool
) -> None:
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.5)
    options = {"tls_cert": certificates.cert, "tls_key": certificates.key} if encrypted else {}
    server = inside(**options)
    tls = certificates.trusting() if encrypted else None
    reader, sleeper = dial(server.port, tls=tls), dial(server.port, tls=tls)
    assert reader.ask("SET", "k", b"x" * (32 << 20)) == b"+OK\r\n"
    sleeper.send("GET", "k")
    while b"connected_clients:1\r" not in reader.ask("INFO", "clients"):
        pass
    assert len(reader.ask("GET", "k")) > 32 << 20
    assert reader.ask("PING") == b"+PONG\r\n"


def test_replies_behind_one_that_is_being_made_are_bounded(
    inside: Any, dial: Any, monkeypatch: Any
) -> None:
    """Each GET finds another value, and they all have to wait for the first reply."""
    go = threading.Event()

    def wait(ctx: Any, raw: Any) -> Job:
        return Job(lambda: go.wait(60), lambda _: OK)

    row = Command("TEST.WAIT", 1, Access.READ, "", "", "", (), "", wait)
    monkeypatch.setitem(TABLE, "TEST.WAIT", row)
    monkeypatch.setattr(connection, "MAX_OWED", 8 << 20)
    server = inside()
    writer, reader = dial(server.port), dial(server.port)
    (stats,) = (tenant.stats for tenant in server.server.state.tenants)
    size, rounds = 1 << 20, 40
    reader.send("TEST.WAIT")
    for number in range(rounds):
        assert writer.ask("SET", "k", b"%c" % number * size) == b"+OK\r\n"
        reader.send("GET", "k")
        while stats.key_hits < min(number + 1, 8):  # the reader's GETs are taken in their time
            assert writer.ask("PING") == b"+PONG\r\n"
    assert stats.key_hits == 8
    go.set()
    assert reader.reply() == b"+OK\r\n"
    got = [reader.reply()[-3] for _ in range(rounds)]
    assert got == [*range(8), *[rounds - 1] * (rounds - 8)]


@pytest.mark.parametrize(
    ("behind", "most"),
    [("TEST.WAIT", connection.MAX_JOBS), ("TEST.COUNT", connection.MAX_WAITING)],
)
def test_requests_behind_one_that_takes_long_are_bounded(
    inside: Any, dial: Any, monkeypatch: Any, behind: str, most: int
) -> None:
    go, taken = threading.Event(), []

    def count(ctx: Any, raw: Any) -> Any:
        taken.append(raw)
        return OK

    def wait(ctx: Any, raw: Any) -> Job:
        taken.append(raw)
        return Job(lambda: go.wait(20), lambda _: OK)

    for name, handler in (("TEST.WAIT", wait), ("TEST.COUNT", count)):
        row = Command(name, 1, Access.READ, "", "", "", (), "", handler)
        monkeypatch.setitem(TABLE, name, row)
    server = inside()
    client, other = dial(server.port), dial(server.port)
    client.socket.sendall(request("TEST.WAIT") + request(behind) * 2 * most)
    while len(taken) < most:
        assert other.ask("PING") == b"+PONG\r\n"
    for _ in range(100):  # turns in which more could be taken
        assert other.ask("PING") == b"+PONG\r\n"
    assert len(taken) == most
    go.set()
    assert [client.reply() for _ in range(1 + 2 * most)] == [b"+OK\r\n"] * (1 + 2 * most)


def test_what_waits_for_a_slow_disk_is_bounded(
    inside: Any, dial: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    """It is in nobody's memory limit, since the next write replaces it."""
    go = threading.Event()
    real = Disk.writev

    def wait(disk: Disk, fd: int, buffers: Sequence[Buffer]) -> int:
        go.wait(20)
        return real(disk, fd, buffers)

    monkeypatch.setattr(Disk, "writev", wait)
    monkeypatch.setattr(tenants, "MAX_BACKLOG", 8 << 20)
    server = inside(data_dir=tmp_path / "data")
    (tenant,) = server.server.state.tenants
    writer, other = dial(server.port), dial(server.port)
    rounds = 40
    sets = [request("SET", "k", b"%c" % number * (1 << 20)) for number in range(rounds)]
    sending = threading.Thread(target=writer.socket.sendall, args=(b"".join(sets),))
    sending.start()
    while not tenant.is_behind():
        assert other.ask("PING") == b"+PONG\r\n"
    for _ in range(200):  # turns in which more could be taken
        assert other.ask("PING") == b"+PONG\r\n"
    assert tenant.journal.backlog_bytes < 10 << 20
    go.set()
    assert [writer.reply() for _ in range(rounds)] == [b"+OK\r\n"] * rounds
    sending.join()
    assert other.ask("GET", "k")[-3] == rounds - 1
