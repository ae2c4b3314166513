"""Invariant: a whole SCAN returns every key that is there all the while, and exactly once;
patterns choose the keys that a real redis-server chooses.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

ALPHABET = b"ab-]^[\\c*?\n"
NAME = st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=5).map(bytes)
PATTERN = st.lists(st.sampled_from(ALPHABET + b"**[["), max_size=9).map(bytes)


def bulks(reply: bytes) -> list[bytes]:
    """The strings of a flat array of bulks."""
    count, rest = reply[1:].split(b"\r\n", 1)
    found = []
    for _ in range(int(count)):
        nbytes, rest = rest[1:].split(b"\r\n", 1)
        found.append(rest[: int(nbytes)])
        rest = rest[int(nbytes) + 2 :]
    return found


def page(reply: bytes) -> tuple[bytes, list[bytes]]:
    """SCAN's cursor and keys."""
    _, _, cursor, keys = reply.split(b"\r\n", 3)
    return cursor, bulks(keys)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sets(NAME, min_size=1, max_size=30), st.lists(PATTERN, max_size=20))
def test_patterns(both: Any, names: set[bytes], patterns: list[bytes]) -> None:
    said: list[list[list[bytes]]] = []
    with both.clients() as clients:
        for client in clients:
            client.ask(b"FLUSHALL")
            client.ask(b"MSET", *(word for name in names for word in (name, b"")))
            said.append([sorted(bulks(client.ask(b"KEYS", pattern))) for pattern in patterns])
    assert said[0] == said[1]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=60))
def test_a_key_that_stays_is_returned_once(
    both: Any, count: int, changes: list[tuple[bool, int]]
) -> None:
    steady = [b"steady-%d" % number for number in range(80)]
    with both.clients() as (pion, _):
        pion.ask(b"FLUSHALL")
        for number, name in enumerate(steady):
            pion.ask(b"SET", name, b"")
            pion.ask(b"SET", b"%d" % number, b"")
        cursor, seen = page(pion.ask(b"SCAN", b"0", b"COUNT", b"%d" % count))
        while cursor != b"0":
            for _ in range(min(len(changes), 4)):
                made, number = changes.pop()
                pion.ask(*([b"SET", b"%d" % number, b""] if made else [b"DEL", b"%d" % number]))
            pion.ask(b"SET", steady[0], b"changed, but the same key")
            cursor, keys = page(pion.ask(b"SCAN", cursor, b"COUNT", b"%d" % count))
            seen += keys
    assert sorted(key for key in seen if key.startswith(b"steady")) == sorted(steady)


def test_match_and_type_thin_out_pages_and_leave_the_cursor_alone(both: Any) -> None:
    with both.clients() as (pion, _):
        pion.ask(b"FLUSHALL")
        for number in range(100):
            pion.ask(b"SET", b"%d" % number, b"")
        for filters in ([b"MATCH", b"1*"], [b"TYPE", b"hash"], [b"TYPE", b"STRING"]):
            cursor, _ = page(pion.ask(b"SCAN", b"0", b"COUNT", b"30"))
            filtered, keys = page(pion.ask(b"SCAN", b"0", b"COUNT", b"30", *filters))
            assert filtered == cursor
            assert len(keys) == {b"1*": 11, b"hash": 0, b"STRING": 30}[filters[1]]
