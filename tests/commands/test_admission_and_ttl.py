"""Invariant: what --admission turns away is answered as if it were kept and then is a miss for
everybody, wholly and not in part; what is there is always replaced; what must be kept is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pion_server.store import admission
from pion_server.wire.values import OK, Status

MISS, HIT = Status("MISS"), Status("HIT")
ROW = bytes(8)


@pytest.fixture
def picky(open_session: Callable[..., Any]) -> Any:
    """A client of a server that keeps what comes twice."""
    return open_session(admission=2)


def visit(client: Any, ns: str) -> None:
    """What an engine does that has prefilled a prefix which was not there."""
    assert client("KV.PREFIX.LOOKUP", ns) == MISS
    assert client("KV.PREFIX.REGISTER", ns, "2", "fp32", "LAYERS", "1", "TOKENS", "1") == OK
    assert client("V.STOREBATCH", ns + "_pk", "0", "0", "1", ROW) == OK
    assert client("V.STOREBATCH", ns + "_pv", "0", "0", "1", ROW) == OK
    assert client("KV.PREFIX.STORE", ns, "0", "1", "DATA", ROW, ROW) == OK
    assert client("SSM.PREFIX.STORE", ns, "0", b"state") == OK


def test_a_prefix_is_kept_from_the_second_visit_on(picky: Any) -> None:
    visit(picky, "ns")
    store = picky.tenant.store
    assert (store.prefix_count, store.bytes_used, len(store.recency)) == (0, 0, 0)
    assert picky("KV.PREFIX.FETCH", "ns") is None
    assert picky("KV.PREFIX.MATCH", "1", "ns") == 0
    assert picky("SSM.PREFIX.FETCH", "ns", "0") is None
    visit(picky, "ns")
    assert picky("KV.PREFIX.LOOKUP", "ns") == HIT
    assert len(picky("KV.PREFIX.FETCH", "ns")) == 3
    assert picky("SSM.PREFIX.FETCH", "ns", "0") == b"state"


def test_a_prefix_without_a_declaration_is_no_hit_either(picky: Any) -> None:
    assert picky("KV.PREFIX.REGISTER", "ns", "2", "fp32") == OK
    assert picky("KV.PREFIX.LOOKUP", "ns") == MISS


def test_one_that_was_kept_and_evicted_is_kept_again_at_once(picky: Any) -> None:
    for _ in range(2):
        visit(picky, "ns")
    assert picky("KV.PREFIX.DROP", "ns") == 1
    visit(picky, "ns")
    assert picky("KV.PREFIX.LOOKUP", "ns") == HIT


def test_a_session(picky: Any) -> None:
    for expected in ("-ERR", "bytes"):
        assert picky("V.CREATE", "s", "2", "VQUANT", "fp32") == OK
        assert picky("V.STOREBATCH", "s", "0", "0", "1", ROW) == OK
        reply = picky("V.FETCH", "s", "0", "RANGE", "0", "1")
        assert ("-ERR" if isinstance(reply, Exception) else "bytes") == expected


def test_rows_for_a_session_that_nobody_announced_are_refused_as_ever(picky: Any) -> None:
    for words in (
        ("V.STOREBATCH", "s", "0", "0", "1", ROW),
        ("V.STOREBATCH", "ns_pk", "0", "0", "1", ROW),
        ("KV.PREFIX.STORE", "ns", "0", "1", "DATA", ROW, ROW),
    ):
        assert isinstance(picky(*words), Exception)


def test_a_namespace_over_a_session_that_is_there_is_kept(picky: Any) -> None:
    for _ in range(2):
        picky("V.CREATE", "ns_pk", "2")
    picky("KV.PREFIX.REGISTER", "ns", "2", "fp16")
    assert picky.tenant.store.prefix_count == 1


def test_a_key(picky: Any) -> None:
    assert picky("SET", "k", "1") == OK
    assert picky("MGET", "k") == [None]
    assert (picky("EXISTS", "k"), picky("DBSIZE")) == (0, 0)
    assert picky("SET", "k", "2") == OK
    assert picky("GET", "k") == b"2"
    assert picky("SET", "k", "3") == OK
    assert picky("GET", "k") == b"3"


def test_reading_does_not_count(picky: Any) -> None:
    for _ in range(5):
        picky("GET", "k")
        picky("EXISTS", "k")
        picky("KV.PREFIX.LOOKUP", "k")
    picky("SET", "k", "1")
    assert picky("GET", "k") is None


def test_dbs_are_apart(picky: Any) -> None:
    picky("SET", "k", "1")
    picky("SELECT", "1")
    picky("SET", "k", "1")
    assert picky("GET", "k") is None


def test_mset_keeps_those_that_come_again(picky: Any) -> None:
    picky("SET", "a", "1")
    assert picky("MSET", "a", "2", "b", "2") == OK
    assert picky("MGET", "a", "b") == [b"2", None]


def test_what_is_a_promise_is_always_kept(picky: Any) -> None:
    assert picky("SET", "lock", "me", "NX") == OK
    assert picky("SET", "lock", "you", "NX") is None
    assert picky("SET", "lock", "me again", "XX", "GET") == b"me"
    assert picky("GET", "lock") == b"me again"


@pytest.mark.parametrize("lost", ["nothing", "data", "metadata"])
def test_never_half_a_chunk(picky: Any, lost: str) -> None:
    """A stock LMCache takes the metadata for the chunk. Also where one of the two SETs is lost."""
    data, metadata = "m@1@0@ff@bf16kv_bytes", "m@1@0@ff@bf16metadata"
    for round_ in range(4):
        if round_ or lost != "data":
            picky("SET", data, b"rows")
        if round_ or lost != "metadata":
            picky("SET", metadata, b"28 bytes")
        assert picky("EXISTS", metadata) <= picky("EXISTS", data)
    assert picky("EXISTS", data, metadata) == 2


def test_only_so_many_names_are_remembered(picky: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "GHOSTS", 100)
    picky("SET", "first", "1")
    picky("SET", "second", "1")
    for number in range(99):
        picky("SET", f"{number}", "1")
    picky("SET", "second", "2")
    picky("SET", "first", "2")
    assert picky("MGET", "first", "second") == [None, b"2"]
    assert len(picky.tenant.admission._ghosts) == 100


def test_a_third_visit_where_three_are_asked_for(open_session: Callable[..., Any]) -> None:
    session = open_session(admission=3)
    kept = []
    for _ in range(4):
        session("SET", "k", "v")
        kept.append(session("EXISTS", "k"))
    assert kept == [0, 0, 1, 1]
    info = session("KV.PREFIX.INFO")
    assert "admission_rejections:2\r\n" in info


# --default-ttl


def test_a_key_that_is_set_without_saying_goes_after_the_default_ttl(
    open_session: Callable[..., Any],
) -> None:
    session = open_session(default_ttl=100)
    session("SET", "plain", "v")
    session("MSET", "many", "v")
    session("SET", "said", "v", "EX", "5000")
    session("SET", "kept", "v", "PX", "4000000")
    session("SET", "kept", "w", "KEEPTTL")
    session("SET", "new", "w", "KEEPTTL")
    session("SET", "ever", "v")
    session("PERSIST", "ever")
    session("SET", "ever", "w", "KEEPTTL")
    lives = {
        name: session("TTL", name) for name in ("plain", "many", "said", "kept", "new", "ever")
    }
    assert lives == {
        "plain": 100,
        "many": 100,
        "said": 5000,
        "kept": 4000,
        "new": 100,
        "ever": -1,
    }


def test_prefixes_have_no_ttl(open_session: Callable[..., Any]) -> None:
    session = open_session(default_ttl=1)
    session("KV.PREFIX.REGISTER", "ns", "2", "fp32")
    assert session.tenant.store.keys.expired(2**62, 10) == []
