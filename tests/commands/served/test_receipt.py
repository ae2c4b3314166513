"""Invariant: the receipt claims no more than was spared: a time that somebody measured, or else the
specification's estimate, and the two are never mixed.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

FIELDS = (
    b"kvprefix_hits kvprefix_misses kvprefix_tokens_served kvprefix_bytes_served"
    b" prefill_seconds_avoided prefill_seconds_avoided_measured kvprefix_hits_measured"
    b" semantic_hits semantic_misses moe_hits moe_misses vector_queries"
    b" prefill_seconds_avoided_estimated kvprefix_hits_estimated worker uptime_seconds"
).split()
ESTIMATE = 555e-6  # seconds a token
TOKENS = 1000


@pytest.fixture
def fresh(raw: Any) -> Any:
    """The receipt at zero, and a namespace `timed` (2,500 ms) and one `untimed`, TOKENS long."""
    raw.ask("KV.PREFIX.DROP", "timed", "untimed", "empty")
    blob = bytes(TOKENS * 4)
    for ns, option in (("timed", ("PREFILL_MS", "2500")), ("untimed", ())):
        declared = ("LAYERS", 1, "TOKENS", TOKENS)
        raw.ask("KV.PREFIX.REGISTER", ns, 1, "fp32", *declared, *option)
        raw.ask("KV.PREFIX.STORE", ns, 0, TOKENS, "DATA", blob, blob)
    assert raw.ask("PION.STATS", "reset") == "+OK"
    return raw


def receipt(raw: Any) -> dict[str, float]:
    return {name.decode(): float(v) for name, v in raw.map(raw.ask("PION.STATS")).items()}


def changed(raw: Any) -> dict[str, float]:
    """What is not zero in the receipt."""
    held = receipt(raw)
    del held["uptime_seconds"]
    return {name: value for name, value in held.items() if value}


def test_sixteen_fields_in_order(fresh: Any) -> None:
    reply = fresh.ask("PION.STATS")
    assert isinstance(reply, dict if fresh.proto == 3 else list)
    assert list(fresh.map(reply)) == FIELDS
    if fresh.proto == 3:
        kinds = {name: type(value) for name, value in reply.items()}
        assert [name for name, kind in kinds.items() if kind is float] == [
            name for name in FIELDS if b"seconds_avoided" in name
        ]
    assert changed(fresh) == {}


def hit(tokens: int, *, measured: float | None) -> dict[str, float]:
    """The fields of one hit."""
    kind = "estimated" if measured is None else "measured"
    seconds = tokens * ESTIMATE if measured is None else measured
    held = {
        "kvprefix_hits": 1,
        "kvprefix_tokens_served": tokens,
        "prefill_seconds_avoided": round(seconds, 6),
        f"prefill_seconds_avoided_{kind}": round(seconds, 6),
        f"kvprefix_hits_{kind}": 1,
    }
    return {name: value for name, value in held.items() if value}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["timed"], hit(TOKENS, measured=2.5)),
        (["untimed"], hit(TOKENS, measured=None)),
        (["timed", "TOKENS", 1000], hit(TOKENS, measured=2.5)),
        # The registered time is that of the whole prefix, and says nothing of a part or a chain.
        (["timed", "TOKENS", 400], hit(400, measured=None)),
        (["timed", "TOKENS", 9000], hit(9000, measured=None)),
        (["timed", "PREFILL_MS", "1.5"], hit(TOKENS, measured=0.0015)),
        (["untimed", "PREFILL_MS", "1e3"], hit(TOKENS, measured=1.0)),
        (["untimed", "TOKENS", 10, "PREFILL_MS", 20], hit(10, measured=0.02)),
        (["untimed", "PREFILL_MS", 0], hit(TOKENS, measured=0.0)),
        (["untimed", "TOKENS", 0], hit(0, measured=None)),
    ],
    ids=str,
)
def test_a_hit_is_credited_once(fresh: Any, words: list[Any], expected: dict[str, float]) -> None:
    assert fresh.ask("KV.PREFIX.LOOKUP", *words) == "+HIT"
    assert changed(fresh) == pytest.approx(expected)


def test_misses_and_mismatches_are_misses(fresh: Any) -> None:
    assert fresh.ask("KV.PREFIX.LOOKUP", "nobody", "PREFILL_MS", 5000) == "+MISS"
    assert fresh.ask("KV.PREFIX.LOOKUP", "timed", "FINGERPRINT", "aa").startswith("-MISMATCH")
    fresh.ask("KV.PREFIX.REGISTER", "empty", 1, "fp32", "LAYERS", 1, "TOKENS", 5)
    assert fresh.ask("KV.PREFIX.LOOKUP", "empty") == "+MISS"
    assert changed(fresh) == {"kvprefix_misses": 3}


def test_hits_add_up(fresh: Any) -> None:
    for words in (["timed"], ["untimed"], ["timed", "PREFILL_MS", 500], ["untimed", "TOKENS", 1]):
        fresh.ask("KV.PREFIX.LOOKUP", *words)
    held = receipt(fresh)
    assert held["kvprefix_hits"] == 4
    assert (held["kvprefix_hits_measured"], held["kvprefix_hits_estimated"]) == (2, 2)
    assert held["kvprefix_tokens_served"] == 3 * TOKENS + 1
    assert held["prefill_seconds_avoided_measured"] == pytest.approx(3.0)
    assert held["prefill_seconds_avoided_estimated"] == pytest.approx(1001 * ESTIMATE)
    assert held["prefill_seconds_avoided"] == pytest.approx(3.0 + 1001 * ESTIMATE)


def test_fetches_count_the_bytes_that_leave_and_no_hit(fresh: Any) -> None:
    fresh.ask("KV.PREFIX.MATCH", 2, "timed", "untimed")
    assert changed(fresh) == {}
    fresh.ask("KV.PREFIX.FETCH", "timed")
    fresh.ask("KV.PREFIX.FETCH", "timed", "FMT", "BF16", "RANGE", 0, 10)
    fresh.ask("V.FETCH", "timed_pk", 0, 5)
    fresh.ask("KV.PREFIX.FETCH", "nobody")
    fresh.ask("KV.PREFIX.FETCH", "timed", "RANGE", 0, TOKENS + 1)
    assert changed(fresh) == {"kvprefix_bytes_served": 2 * 4 * TOKENS + 2 * 2 * 10 + 4}


def test_no_caller_can_spoil_the_receipt(fresh: Any) -> None:
    for _ in range(3):
        fresh.ask("KV.PREFIX.LOOKUP", "timed", "PREFILL_MS", 10**9, "TOKENS", 2**31)
    held = receipt(fresh)
    assert held["prefill_seconds_avoided"] == 3e6
    assert held["kvprefix_tokens_served"] == 3 * 2**31


def test_info_says_the_same(fresh: Any) -> None:
    for words in (["timed"], ["untimed", "TOKENS", 3], ["nobody"]):
        fresh.ask("KV.PREFIX.LOOKUP", *words)
    head, *lines = fresh.ask("INFO", "pion").decode().split()
    assert head == "#"
    said = dict(line.split(":") for line in lines[1:])
    assert list(said) == [name.decode() for name in FIELDS]
    held = receipt(fresh)
    del held["uptime_seconds"], said["uptime_seconds"]
    assert {name: float(value) for name, value in said.items()} == held


def test_reset_keeps_the_uptime(fresh: Any) -> None:
    fresh.ask("KV.PREFIX.LOOKUP", "timed")
    while not (before := receipt(fresh)["uptime_seconds"]):
        time.sleep(0.05)
    assert fresh.ask("PION.STATS", "RESET") == "+OK"
    assert changed(fresh) == {}
    assert receipt(fresh)["uptime_seconds"] >= before
