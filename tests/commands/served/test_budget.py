"""Invariant: --max-memory and --max-sessions are never exceeded, what goes is whole, children
before parents and else what was used longest ago, and a write that cannot fit is -OOM and costs
nobody anything.
"""

from __future__ import annotations

from typing import Any

import pytest

from pion_server.commands import reference
from pion_server.commands.registry import TABLE
from pion_server.store.keys import KEY_BYTES
from pion_server.store.session import SESSION_BYTES

LIMIT = 1 << 20
ROWS = 1 << 14  # of 4 bytes on each side: 128 KB a namespace, so seven fit and eight do not
BLOB = bytes(ROWS * 4)

reference.load_families()


@pytest.fixture(scope="module")
def proto() -> int:
    """One is enough here."""
    return 3


@pytest.fixture
def small(start_pion: Any, connect: Any) -> Any:
    """A connection to an empty server of LIMIT bytes."""
    return connect(start_pion("--max-memory", str(LIMIT)).port)


def put(raw: Any, ns: str, *options: str) -> None:
    declared = ("LAYERS", 1, "TOKENS", ROWS)
    assert raw.ask("KV.PREFIX.REGISTER", ns, 1, "fp32", *declared, *options) == "+OK"
    assert raw.ask("KV.PREFIX.STORE", ns, 0, ROWS, "DATA", BLOB, BLOB) == "+OK"
    assert used(raw) <= LIMIT


def used(raw: Any) -> int:
    """INFO's figure: rows, block tables, values and names."""
    line = next(x for x in raw.ask("INFO", "memory").splitlines() if x.startswith(b"used_memory:"))
    return int(line.split(b":")[1])


def held(raw: Any, names: str) -> str:
    return "".join(ns for ns in names if raw.ask("KV.PREFIX.MATCH", 1, ns))


def test_the_least_recently_used_prefix_goes_first(small: Any) -> None:
    for ns in "abcdefg":
        put(small, ns)
    assert small.ask("KV.PREFIX.LOOKUP", "a") == "+HIT"
    assert len(small.ask("KV.PREFIX.FETCH", "b", "FMT", "NATIVE")) == 3
    put(small, "h")
    assert small.ask("V.FETCH", "d_pk", 0, 0) == bytes(4)
    put(small, "i")
    assert held(small, "abcdefghi") == "abdfghi"
    assert used(small) <= LIMIT


def test_plain_keys_and_sessions_go_as_well(small: Any) -> None:
    small.ask("SET", "key", bytes(300_000))
    small.ask("V.CREATE", "session", 1, "VQUANT", "fp32")
    small.ask("V.STOREBATCH", "session", 0, 0, 75_000, bytes(300_000))
    for ns in "abcdefg":
        put(small, ns)
    assert small.ask("GET", "key") is None
    assert small.ask("V.FETCH", "session", 0, 0).startswith("-ERR unknown session")
    assert held(small, "abcdefg") == "abcdefg"
    assert b"evicted_keys:2\r\n" in small.ask("INFO", "stats")


HUGE = bytes(2 * LIMIT)
HASHES = LIMIT // 8
TOO_LARGE: dict[str, list[Any]] = {
    "V.CREATE": [],  # only where names alone fill the budget: see below
    "V.STOREBATCH": ["a_pk", 0, 0, LIMIT // 2, HUGE],
    "KV.PREFIX.STORE": ["a", 0, LIMIT // 4, "DATA", HUGE[:LIMIT], HUGE[:LIMIT]],
    "KV.PREFIX.REGISTER": ["new", 1, "fp32", "BLOCKS", 1, HASHES, bytes(8 * HASHES)],
    "KV.PREFIX.REGISTER.SCHEMA": [
        *["new", "K", 1, "fmt=fp32,dim=1", "V", 1, "fmt=fp32,dim=1"],
        *["BLOCKS", 1, HASHES, bytes(8 * HASHES)],
    ],
    "SET": ["key", HUGE],
    "MSET": ["x", b"1", "key", HUGE],
    "SSM.PREFIX.STORE": ["a", 0, HUGE],
    "ATTEND.PREFIX.STORE": ["a", 0, 1, LIMIT // 4, 1, HUGE[:LIMIT], HUGE[:LIMIT]],
    "KV.STORE": ["new", 0, 0, LIMIT // 4, HUGE[:LIMIT], HUGE[:LIMIT]],
    "ATTEND.STORE": ["new", 0, 1, LIMIT // 4, 1, HUGE[:LIMIT], HUGE[:LIMIT]],
    "ATTEND.QUERY": [],  # as the next one
    "KV.PREFIX.WARM": [],  # its copy is larger than the rows only where these are not fp32
}


def test_what_can_never_fit_is_refused_and_nothing_goes_for_it(small: Any) -> None:
    for ns in "abcdefg":
        put(small, ns)
    for name, args in TOO_LARGE.items():
        if args:
            assert small.ask(name, *args).startswith("-OOM ")
            assert small.ask("DBSIZE") == 0
            assert held(small, "abcdefg") == "abcdefg"
    before = used(small)
    assert small.ask("KV.PREFIX.LOOKUP", "b") == "+HIT"
    assert used(small) == before


def test_names_alone_can_fill_the_budget(start_pion: Any, connect: Any) -> None:
    raw = connect(start_pion("--max-memory", str(2 * SESSION_BYTES + 100)).port)
    assert raw.ask("V.CREATE", "x" * (SESSION_BYTES + 101), 1).startswith("-OOM ")
    assert raw.ask("KV.PREFIX.REGISTER", "x" * 50, 1, "fp32").startswith("-OOM ")
    assert raw.ask("KV.PREFIX.REGISTER", "x" * 47, 1, "fp32") == "+OK"


def test_sessions_without_a_row_go_as_well(small: Any) -> None:
    for i in range(600):
        assert small.ask("V.CREATE", f"{i:04000}", 1) == "+OK"
    assert used(small) <= LIMIT
    assert b"evicted_keys:0\r\n" not in small.ask("INFO", "stats")
    assert small.ask("V.STOREBATCH", f"{599:04000}", 0, 0, 1, bytes(4)) == "+OK"


def test_every_command_that_may_say_oom_is_tried_here() -> None:
    assert {name for name, row in TABLE.items() if "-OOM" in row.errors} == set(TOO_LARGE)


def test_overwriting_costs_nothing(small: Any) -> None:
    for ns in "abcdefg":
        put(small, ns)
    before = used(small)
    for _ in range(20):
        put(small, "a")
    assert used(small) == before
    assert held(small, "abcdefg") == "abcdefg"


def test_a_chain_goes_from_its_end(small: Any) -> None:
    """Its root is the oldest of all, and yet would be the last of the chain to go."""
    put(small, "a")
    for ns, parent in ("ba", "cb", "dc"):
        put(small, ns, "PARENT", parent)
    for ns in "xyz12":
        put(small, ns)
    assert held(small, "abcdxyz12") == "abxyz12"


def test_what_was_looked_up_is_still_there_when_it_is_fetched(small: Any) -> None:
    """LOOKUP, MATCH and EXISTS hold on to what they found, while others store."""
    for ns in "abcd":
        put(small, ns)
    small.ask("SET", "key", bytes(10))
    assert small.ask("KV.PREFIX.LOOKUP", "a") == "+HIT"
    assert small.ask("KV.PREFIX.MATCH", 2, "b", "c") == 2
    assert small.ask("EXISTS", "key") == 1
    for number in range(30):
        put(small, f"flood-{number}")
    assert held(small, "abcd") == "abc"
    assert small.ask("GET", "key") == bytes(10)


def test_the_two_keys_of_a_chunk_go_together(small: Any) -> None:
    def chunk(number: int) -> tuple[str, str]:
        return f"m@1@0@{number}@bf16kv_bytes", f"m@1@0@{number}@bf16metadata"

    for number in range(60):
        for name, size in zip(chunk(number), (40_000, 28), strict=True):
            assert small.ask("SET", name, bytes(size)) == "+OK"
            assert used(small) <= LIMIT
    sizes = [tuple(small.ask("STRLEN", name) for name in chunk(number)) for number in range(60)]
    assert set(sizes) == {(0, 0), (40_000, 28)}
    assert sizes.count((40_000, 28)) == LIMIT // (40_000 + 28 + 2 * (KEY_BYTES + 24))


def test_max_sessions(start_pion: Any, connect: Any) -> None:
    raw = connect(start_pion("--max-sessions", "4").port)
    raw.ask("SET", "key", "value")
    for ns in "abc":
        assert raw.ask("KV.PREFIX.REGISTER", ns, 1, "fp32") == "+OK"
    assert held(raw, "abc") == "bc"
    assert raw.ask("V.CREATE", "s", 1) == "+OK"
    assert held(raw, "bc") == "c"
    assert raw.ask("GET", "key") == b"value"
    info = raw.ask("KV.PREFIX.INFO")
    assert b"vstore_sessions:3\r\n" in info
    assert b"sessions_limit:4\r\n" in info
    assert b"evictions:2\r\n" in info


def test_recurrent_states_count_and_go_with_their_namespace(small: Any) -> None:
    put(small, "a")
    before = used(small)
    assert small.ask("SSM.PREFIX.STORE", "a", 0, bytes(100_000)) == "+OK"
    assert small.ask("SSM.PREFIX.STORE", "alone", 3, bytes(200_000)) == "+OK"
    assert used(small) >= before + 300_000
    assert b"ssm_states:2\r\nssm_bytes:300000\r\n" in small.ask("KV.PREFIX.INFO")
    for ns in "bcdefgh":
        put(small, ns)
    assert held(small, "a") == ""
    assert small.ask("SSM.PREFIX.FETCH", "a", 0) is None
    assert small.ask("SSM.PREFIX.FETCH", "alone", 3) is None
    assert b"ssm_states:0\r\nssm_bytes:0\r\n" in small.ask("KV.PREFIX.INFO")
