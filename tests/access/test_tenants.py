"""Invariant: what a tenant sees goes by what it has done itself, whatever the others do: in every
command there is, byte for byte.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import pion_server
from pion_server.commands import load_families
from pion_server.commands.registry import SUBCOMMANDS, TABLE

# What differs between two servers, or two moments, that have nothing to do with tenants.
MOMENTS = re.compile(
    rb"(addr=|age=|idle=|uptime_in_seconds:|uptime_in_days:|uptime_seconds:|uptime_seconds\r\n:"
    rb"|process_id:|run_id:|tcp_port:|fast_port:|port\r\n\$\d+\r\n|port\r\n:|pid\r\n:)[^ \r]*"
)
TIMES = {"TTL", "PTTL"}


def said(words: list[Any], reply: bytes) -> bytes:
    """A reply without what nobody can help."""
    reply = MOMENTS.sub(rb"\1", reply)
    if words[0] in TIMES:
        reply = re.sub(rb"\d+", b"", reply)
    return re.sub(rb"\$\d+\r\n(id=|# Server)", rb"\1", reply)  # lengths go by the digits above


def live(raw: Any, life: list[Any], user: str, secret: str, between: Any = None) -> list[bytes]:
    """Every command of LIFE, and what was said to it."""
    replies = []
    for words in life:
        if between is not None:
            between()
        mine = [{"<me>": user, "<secret>": secret}.get(word, word) for word in words]
        replies.append(said(words, raw.ask(*mine)))
    return replies


def test_the_life_has_every_command(life: list[Any]) -> None:
    load_families()
    found = {str(words[0]) for words in life}
    found |= {f"{words[0]}|{words[1]}" for words in life if len(words) > 1}
    missing = (TABLE.keys() | SUBCOMMANDS.keys()) - found
    assert not missing, f"give {missing} a line in LIFE (conftest.py)"


@pytest.mark.parametrize("kept", ["in memory", "on disk"])
def test_nothing_that_one_does_can_be_seen_by_another(
    two_tenants: Any, dial: Any, life: list[Any], tmp_path: Path, kept: str
) -> None:
    def start(name: str) -> Any:
        disk = ["--data-dir", str(tmp_path / name)] if kept == "on disk" else []
        return two_tenants(*disk, alice=":100kb", bob=":100kb")

    calm, loud = start("calm"), start("loud")
    idle = [dial(loud.port, "alice") for _ in range(5)]

    def noise() -> None:
        """All of it with Alice, and more than she has room for."""
        raw = dial(loud.port, "alice")
        live(raw, life, "alice", "alices-s3cret")
        raw = dial(loud.port, "alice")
        for number in range(30):
            raw.ask("SET", f"big-{number}", "x" * 15_000)
        assert raw.ask("SET", "k1", "x" * 150_000).startswith(b"-OOM")
        raw.close()

    expected = live(dial(calm.port, "bob"), life, "bob", "bobs-s3cret")
    got = live(dial(loud.port, "bob"), life, "bob", "bobs-s3cret", noise)
    for words, ours, theirs in zip(life, got, expected, strict=True):
        assert ours == theirs, words
    assert b"evicted_keys:0" in expected[-2]
    assert b"evicted_keys:0\r" not in idle[0].ask("INFO")


def test_the_same_names_are_different_things(two_tenants: Any, dial: Any) -> None:
    server = two_tenants()
    alice, bob = dial(server.port, "alice"), dial(server.port, "bob")
    rows = {alice: b"\1" * 16, bob: b"\2" * 16}
    for raw, row in rows.items():
        assert raw.ask("SET", "k", row) == b"+OK\r\n"
        assert raw.ask("V.CREATE", "s", 4, "VQUANT", "fp32") == b"+OK\r\n"
        assert raw.ask("V.STOREBATCH", "s", 0, 0, 1, row) == b"+OK\r\n"
        assert raw.ask("KV.PREFIX.REGISTER", "n", 4, "fp32") == b"+OK\r\n"
        assert raw.ask("KV.PREFIX.STORE", "n", 0, 1, "DATA", row, row) == b"+OK\r\n"
        assert raw.ask("KV.PREFIX.WARM", "n", 1, 4) == b"+1\r\n"
    for raw, row in rows.items():
        bulk = b"$16\r\n" + row + b"\r\n"
        assert raw.ask("GET", "k") == bulk
        assert raw.ask("V.FETCH", "s", 0, 0) == bulk
        assert raw.ask("KV.PREFIX.FETCH", "n").endswith(bulk * 2)
        assert raw.ask("ATTEND.PREFIX.QUERY", "n", 0, 1, 4, 0, bytes(16)) == bulk
    assert alice.ask("FLUSHALL") == b"+OK\r\n"
    assert alice.ask("KV.PREFIX.DROP", "n") == b":1\r\n"
    assert bob.ask("EXISTS", "k") == b":1\r\n"
    assert bob.ask("KV.PREFIX.LOOKUP", "n") == b"+HIT\r\n"
    assert alice.ask("KV.PREFIX.LOOKUP", "n") == b"+MISS\r\n"
    assert alice.ask("ATTEND.PREFIX.LOOKUP", "n", 0) == b"+MISS\r\n"
    assert bob.ask("ATTEND.PREFIX.LOOKUP", "n", 0) == b"+HIT\r\n"


def test_one_connection_is_whoever_it_logged_in_as_last(two_tenants: Any, dial: Any) -> None:
    server = two_tenants("--requirepass", "defaults-s3cret")
    raw = dial(server.port)
    assert raw.ask("GET", "k").startswith(b"-NOAUTH")
    for login in (["alice", "alices-s3cret"], ["bob", "bobs-s3cret"], ["defaults-s3cret"]):
        assert raw.ask("AUTH", *login) == b"+OK\r\n"
        assert raw.ask("DBSIZE") == b":0\r\n"
        assert raw.ask("SET", "k", login[0]) == b"+OK\r\n"
        assert f"user={login[0] if login[1:] else 'default'} ".encode() in raw.ask("CLIENT", "LIST")
        assert b"connected_clients:1\r" in raw.ask("INFO", "clients")
        assert raw.ask("AUTH", "alice", "bobs-s3cret").startswith(b"-WRONGPASS")
        assert raw.ask("GET", "k") == b"$%d\r\n%b\r\n" % (len(login[0]), login[0].encode())
    assert raw.ask("HELLO", "2", "AUTH", "alice", "alices-s3cret").startswith(b"*")
    assert raw.ask("GET", "k") == b"$5\r\nalice\r\n"
    assert raw.ask("RESET") == b"+RESET\r\n"
    assert raw.ask("GET", "k").startswith(b"-NOAUTH")
    assert raw.ask("CLIENT", "LIST").startswith(b"-NOAUTH")


def test_a_write_on_its_way_goes_to_who_sent_it(two_tenants: Any, dial: Any) -> None:
    """Rows that are being converted when the next command on the connection is another's AUTH."""
    server = two_tenants()
    raw, rows = dial(server.port, "alice"), b"\0" * (4 << 20)
    for user, secret in (("bob", "bobs-s3cret"), ("alice", "alices-s3cret")):
        raw.ask("AUTH", user, secret)
        raw.ask("V.CREATE", "s", 1024, "VQUANT", "fp16")
    raw.send("V.STOREBATCH", "s", 0, 0, 1024, rows)
    raw.send("AUTH", "bob", "bobs-s3cret")
    raw.send("V.FETCH", "s", 0, 0)
    assert [raw.reply(), raw.reply()] == [b"+OK\r\n"] * 2
    assert b"row 0 is not stored" in raw.reply()
    assert dial(server.port, "alice").ask("V.FETCH", "s", 0, 0).startswith(b"$4096\r\n")


def test_a_quota_is_of_its_tenant_alone(two_tenants: Any, dial: Any) -> None:
    server = two_tenants("--max-memory", "1mb", alice=":200kb")
    alice, bob = dial(server.port, "alice"), dial(server.port, "bob")
    for number in range(7):
        assert bob.ask("SET", f"b{number}", "x" * 100_000) == b"+OK\r\n"
    for number in range(50):
        assert alice.ask("SET", f"a{number}", "x" * 50_000) == b"+OK\r\n"
    assert 1 <= int(alice.ask("DBSIZE")[1:]) <= 4
    assert bob.ask("DBSIZE") == b":7\r\n"
    assert alice.ask("CONFIG", "GET", "maxmemory").endswith(b"\r\n200000\r\n")
    assert bob.ask("CONFIG", "GET", "maxmemory").endswith(b"\r\n800000\r\n")
    assert alice.ask("SET", "too large", "x" * 201_000).startswith(b"-OOM")
    assert bob.ask("MSET", "b8", "x" * 500_000, "b9", "x" * 400_000).startswith(b"-OOM")


def test_what_one_writes_is_no_visit_of_another(two_tenants: Any, dial: Any) -> None:
    """Or --admission would tell who else has had the same prompt."""
    server = two_tenants("--admission", "2")
    alice, bob = dial(server.port, "alice"), dial(server.port, "bob")
    for raw in (alice, bob):
        for there in (b":0\r\n", b":1\r\n"):
            assert raw.ask("SET", "k", "v") == b"+OK\r\n"
            assert raw.ask("EXISTS", "k") == there


def test_attention_state_has_a_share_for_each_tenant(two_tenants: Any, dial: Any) -> None:
    server = two_tenants("--attend-slots", "2", "--attend-memory", "1000")
    alice, bob = dial(server.port, "alice"), dial(server.port, "bob")

    def states(raw: Any, names: str) -> list[bytes]:
        return [raw.ask("ATTEND.PREFIX.LOOKUP", name, 0)[1:-2] for name in names]

    for name in "xyz":
        assert bob.ask("ATTEND.PREFIX.STORE", name, 0, 1, 1, 4, bytes(16), bytes(16)) == b"+OK\r\n"
    for name in "abc":  # 400 bytes each, of 500
        blob = bytes(200)
        assert alice.ask("ATTEND.PREFIX.STORE", name, 0, 1, 50, 1, blob, blob) == b"+OK\r\n"
    assert states(alice, "abc") == [b"COLD", b"COLD", b"HIT"]
    assert states(bob, "xyz") == [b"COLD", b"HIT", b"HIT"]
    large = alice.ask("ATTEND.PREFIX.STORE", "d", 0, 1, 100, 1, bytes(400), bytes(400))
    assert large.startswith(b"-OOM ")


def test_only_logging_in_knows_of_other_tenants() -> None:
    """A handler gets at its own tenant through its context; the list of all is for AUTH."""
    folder = Path(pion_server.__file__).parent / "commands"
    for path in folder.glob("*.py"):
        named = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
        }
        assert "tenants" not in named or path.name == "connection.py", path


def test_near_misses(two_tenants: Any, dial: Any) -> None:
    raw = dial(two_tenants().port)
    for user in ("", "ALICE", "alice\0", "default", "alice:", "bob"):
        assert raw.ask("AUTH", user, "alices-s3cret").startswith(b"-WRONGPASS")
    assert raw.ask("AUTH", "alices-s3cret").startswith(b"-WRONGPASS")
    assert raw.ask("GET", "k").startswith(b"-NOAUTH")
