"""Invariant: values travel by reference, an expired key is absent before anything takes it away,
and a write that is refused leaves everything as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from pion_server.commands.keys import SWEEP_KEYS, sweep
from pion_server.errors import OutOfMemory
from pion_server.store.keys import KEY_BYTES
from pion_server.wire.values import OK, Status

LONG_AGO = "1"  # a PXAT of 1970


def test_a_large_value_is_never_copied(session: Any) -> None:
    buffer = bytearray(b"x" * 1_000_000)
    assert session("SET", "k", memoryview(buffer)) == OK
    assert session("MSET", "m", memoryview(buffer)) == OK
    values = [session("GET", "k"), *session("MGET", "k", "m"), session("SET", "k", "", "GET")]
    buffer[0] = ord("y")
    assert [bytes(value[:2]) for value in values] == [b"yx"] * 4


def test_keys_are_plain_bytes_however_they_arrive(session: Any) -> None:
    session("SET", memoryview(b"k"), b"1")
    session("MSET", memoryview(b"l"), b"2")
    assert session("MGET", "k", memoryview(b"l")) == [b"1", b"2"]
    assert [type(name) for name in session("KEYS", "*")] == [bytes, bytes]
    assert session("DEL", memoryview(b"k"), "k") == 1


@pytest.mark.parametrize(
    ("words", "reply"),
    [
        (["GET", "k"], None),
        (["MGET", "k"], [None]),
        (["EXISTS", "k"], 0),
        (["STRLEN", "k"], 0),
        (["TYPE", "k"], Status("none")),
        (["TTL", "k"], -2),
        (["PTTL", "k"], -2),
        (["PERSIST", "k"], 0),
        (["EXPIRE", "k", "10"], 0),
        (["DEL", "k"], 0),
        (["UNLINK", "k"], 0),
        (["KEYS", "*"], []),
        (["SCAN", "0"], ["0", []]),
        (["DBSIZE"], 0),
        (["SET", "k", "v", "XX"], None),
        (["SET", "k", "v", "NX"], OK),
        (["SET", "k", "v", "GET"], None),
    ],
)
def test_an_expired_key_that_is_still_held_is_absent(
    session: Any, words: list[str], reply: Any
) -> None:
    session("SET", "k", "old", "PXAT", LONG_AGO)
    assert session.tenant.store.keys.count(0) == 1
    assert session(*words) == reply


def test_keepttl_does_not_keep_a_deadline_that_passed(session: Any) -> None:
    session("SET", "k", "old", "PXAT", LONG_AGO)
    session("SET", "k", "new", "KEEPTTL")
    assert session("PTTL", "k") == -1


def test_a_sweep_is_bounded_and_counts(session: Any) -> None:
    many = SWEEP_KEYS + 50
    for number in range(many):
        session("SET", f"{number}", "v", "PXAT", LONG_AGO)
    session("SET", "stays", "v", "EX", "100")
    assert sweep(session.tenant) == SWEEP_KEYS
    assert sweep(session.tenant) == 50
    assert sweep(session.tenant) == 0
    assert session.tenant.stats.expired == many
    assert session("KEYS", "*") == [b"stays"]


def test_dbsize_counts_no_expired_key_however_many(session: Any) -> None:
    for number in range(SWEEP_KEYS + 50):
        session("SET", f"{number}", "v", "PXAT", LONG_AGO)
    assert session("DBSIZE") == 0


def test_hits_and_misses_count_keys_that_were_asked_for(session: Any) -> None:
    session("SET", "k", "v")
    session("MGET", "k", "none", "k")
    session("GET", "none")
    session("EXISTS", "k")
    assert (session.tenant.stats.key_hits, session.tenant.stats.key_misses) == (2, 2)


def test_mset_that_does_not_fit_sets_nothing_and_evicts_nothing(
    open_session: Callable[..., Any],
) -> None:
    session = open_session(max_memory=1000 + 2 * KEY_BYTES)
    session("SET", "old", b"v" * 100)
    refusal = session("MSET", "a", b"v" * 600, "b", b"v" * 600)
    assert isinstance(refusal, OutOfMemory)
    assert session("KEYS", "*") == [b"old"]
    # The last of a name counts alone.
    assert session("MSET", "a", b"v" * 600, "a", b"v" * 601) == OK
    assert session("STRLEN", "a") == 601


def test_set_that_does_not_fit_keeps_the_old_value(open_session: Callable[..., Any]) -> None:
    session = open_session(max_memory=1000 + KEY_BYTES)
    session("SET", "k", "old")
    assert isinstance(session("SET", "k", b"v" * 1001), OutOfMemory)
    assert isinstance(session("SET", "k", b"v" * 1001, "GET"), OutOfMemory)
    assert session("GET", "k") == b"old"


def test_the_least_recently_used_key_goes_first(open_session: Callable[..., Any]) -> None:
    session = open_session(max_memory=1000 + 3 * KEY_BYTES)
    for name in ("a", "b", "c"):
        session("SET", name, b"v" * 300)
    session("GET", "a")
    session("SET", "d", b"v" * 300)
    assert sorted(session("KEYS", "*")) == [b"a", b"c", b"d"]
    assert session.tenant.stats.evicted == 1


def test_the_first_key_of_a_chunk_waits_for_the_second(
    open_session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stock LMCache SETs one after the other; however much others write in between, it is never
    the metadata alone that is left, which is a hit."""
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)
    session = open_session(max_memory=100_000)
    data, metadata = "m@1@0@ff@bf16kv_bytes", "m@1@0@ff@bf16metadata"
    session("SET", data, bytes(10_000))
    for number in range(50):
        assert session("SET", f"flood {number}", bytes(10_000)) == OK
    session("SET", metadata, b"28 bytes")
    assert session("EXISTS", data, metadata) == 2
