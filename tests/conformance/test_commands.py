"""Invariant: any sequence of plain commands, right or wrong, gets byte for byte the replies of a
real redis-server, in RESP2 and RESP3, one at a time and pipelined.

Only what must differ is evened out: remaining times, ids, the order of keys, CLIENT's fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

Words: TypeAlias = list[bytes]

# -- what is sent -------------------------------------------------------------------------------

KEYS = [b"a", b"b", b"c", b"", b"k\x00\xff\r\n", b"a key", b"x" * 300]
VALUES = [b"", b"v", b"17", b"\x00\xff\r\n", b"y" * 20_000]
INTEGERS = (
    b"0 100000 5000000 9223372036854775807 9223372036854775808 -9223372036854775808 -1 "
    b"-9223372036854775809 9223372036854775 9223372036854776 -9223372036854775 "
    b"-9223372036854776 99999999999999999999 15 16"
).split()
NOT_INTEGERS = [*b"+1 -0 01 1e3 1.0 0x10 abc 1_0".split(), b"", b" 1", b"1 ", b"1\n", b"\xb2"]
NUMBERS = INTEGERS + NOT_INTEGERS
# A time that ends while a test runs would make a race; test_expiry.py sees to those.
PERIODS = [n for n in NUMBERS if n not in (b"15", b"16")]
MOMENTS = [n for n in PERIODS if len(n) > 15 or n in NOT_INTEGERS or n == b"0"]
# Not `**`: in Redis that is the one pattern of stars that does not match an empty key.
PATTERNS = [*b"* **a** a* *a ?* [a-c] [^a] [ [^] \\a* a\\ *[k*] x*x*x [c-a] [a".split(), b""]
ODD_WORDS = [b"", b"FOO", b"NX", b"\xc3\xa9", b"GET", b"EX", b"0", b"z" * 100]


def words(*parts: Any) -> st.SearchStrategy[Words]:
    """The parts in a row: constants, lists to choose a word from, strategies of words."""
    return st.tuples(*map(_strategy, parts)).map(_flat)


def some(*choices: Any) -> st.SearchStrategy[Words]:
    """Up to three of the choices, in any order, repeated or not."""
    return st.lists(st.one_of(*map(_strategy, choices)), max_size=3).map(_flat)


def _strategy(part: Any) -> st.SearchStrategy[Any]:
    if isinstance(part, bytes):
        return st.just(part)
    return st.sampled_from(part) if isinstance(part, list) else part


def _flat(parts: Any) -> Words:
    return [word for part in parts for word in ([part] if isinstance(part, bytes) else part)]


VALUE = st.sampled_from(VALUES) | st.binary(max_size=9)
SET_OPTIONS = some(
    [b"NX", b"XX", b"GET", b"KEEPTTL"],
    words([b"EX", b"PX"], PERIODS),
    words([b"EXAT", b"PXAT"], MOMENTS),
)
SCAN_OPTIONS = some(
    words(b"MATCH", PATTERNS), words(b"COUNT", NUMBERS), words(b"TYPE", [b"string", b"hash", b""])
)
NAME = [b"", b"me", b"two words", b"\xff", b"~!"]

WELL_FORMED = st.one_of(
    words(b"SET", KEYS, VALUE, SET_OPTIONS),
    words(b"SET", KEYS, VALUE),
    words(b"GET", KEYS),
    words(b"MGET", KEYS, some(KEYS)),
    words(b"MSET", KEYS, VALUE, some(words(KEYS, VALUE))),
    words([b"STRLEN", b"TYPE", b"TTL", b"PTTL", b"PERSIST"], KEYS),
    words([b"EXISTS", b"DEL", b"UNLINK"], KEYS, some(KEYS)),
    words([b"EXPIRE", b"PEXPIRE"], KEYS, PERIODS, some([b"NX", b"XX", b"GT", b"LT"])),
    words([b"DBSIZE", b"RESET"]),
    words(b"KEYS", PATTERNS),
    words(b"SCAN", b"0", b"COUNT", b"1000", some(words(b"MATCH", PATTERNS))),
    words(b"SCAN", [b"x", b"0 ", b" 0", b"1e1", b"99999999999999999999"]),
    words(b"SCAN", b"0", SCAN_OPTIONS),
    words([b"FLUSHDB", b"FLUSHALL"], some([b"ASYNC", b"SYNC"])),
    words(b"SELECT", [b"0", b"1", *NUMBERS]),
    words(b"PING", some(VALUE)),
    words(b"ECHO", VALUE),
    words(b"AUTH", some([b"default", b"x"])),
    words(b"HELLO", [b"2", b"3", b"4", *NUMBERS]),
    words(b"HELLO", [b"2", b"3"], some(words(b"SETNAME", NAME), words(b"AUTH", b"default", b"x"))),
    words(b"HELLO", b"2", b"AUTH", b"nobody", b"x"),
    words(b"CLIENT", b"SETNAME", NAME),
    words(b"CLIENT", [b"GETNAME", b"ID", b"INFO", b"FOO", b"\xc3\xa9"]),
    words(b"CLIENT", b"NO-EVICT", [b"on", b"OFF", b"x"]),
    words(b"CLIENT", b"LIST", some([b"TYPE", b"normal", b"master", b"ID", b"0", b"x"])),
    words(b"COMMAND", [b"FOO", b""]),
    words(b"CONFIG", b"GET", [b"save", b"appendonly", b"databases", b"timeout", b"nothing"]),
    words(b"CONFIG", [b"FOO", b"GET"]),
    words([b"FOO", b"", b"GETT", b"G ET"], some([b"", b"x", b"two words", b"y" * 200])),
)


@st.composite
def command(draw: Callable[..., Any]) -> Words:
    """Mostly well-formed; sometimes a word too many, one too few, or in another case."""
    made: Words = draw(WELL_FORMED)
    match draw(st.integers(0, 7)):
        case 0:
            return [*made, draw(st.sampled_from(ODD_WORDS))]
        case 1:
            return made[:-1] or made
        case 2:
            return [word.swapcase() for word in made]
        case _:
            return made


# -- what comes back ----------------------------------------------------------------------------

TOLERANCE = 5000  # milliseconds, or seconds: the two servers are asked one after the other


def comparable(words: Words, reply: bytes) -> object:
    """A reply without what must differ between the servers."""
    if reply.startswith(b"-"):
        return reply
    name, *rest = [word.upper() for word in words]
    match name, rest[:1]:
        case b"TTL" | b"PTTL", _:
            return int(reply[1:])
        case b"KEYS", _:
            return sorted(reply.split(b"\r\n"))
        case b"SCAN", _:
            # A page is as long as the server likes; COUNT 1000 always takes in all our keys.
            return sorted(reply.split(b"\r\n")) if b"1000" in rest else reply[:1]
        case b"HELLO", _:
            return re.sub(rb"(\$2\r\nid\r\n):\d+|\d+\.\d+\.\d+", rb"\1", reply)
        case (b"COMMAND", []) | (b"CLIENT", [b"ID"]):
            return reply[:1]
        case b"CONFIG", [b"GET"]:
            return reply.lower()  # names come as they are spelled, not as they were asked for
        case b"CLIENT", [b"LIST" | b"INFO"]:
            return b"id=" in reply
    return reply


def answers(client: Any, commands: list[Words], proto: bytes, pipelined: bool) -> list[bytes]:
    client.ask(b"HELLO", proto)
    client.ask(b"FLUSHALL")
    if pipelined:
        client.send(b"".join(map(client.request, commands)))
        return [client.reply() for _ in commands]
    return [client.ask(*words) for words in commands]


def check(both: Any, commands: list[Words], proto: bytes, pipelined: bool) -> None:
    final_state = [[b"SELECT", b"0"], [b"DBSIZE"], [b"MGET", *KEYS]]
    commands = commands + final_state + [[b"PTTL", key] for key in KEYS]
    with both.clients() as (pion, redis):
        got = answers(pion, commands, proto, pipelined)
        expected = answers(redis, commands, proto, pipelined)
    for words, ours, theirs in zip(commands, got, expected, strict=True):
        assert close(comparable(words, ours), comparable(words, theirs)), (words, ours, theirs)


def close(ours: object, theirs: object) -> bool:
    if isinstance(ours, int) and isinstance(theirs, int):
        # -1 and -2 are words, and a time that is left is never close to them.
        return abs(ours - theirs) < TOLERANCE if min(ours, theirs) > 0 else ours == theirs
    return ours == theirs


SEQUENCE = st.lists(command(), min_size=1, max_size=25)
PROTO = st.sampled_from([b"2", b"3"])


@settings(max_examples=250, deadline=None, derandomize=True)
@given(SEQUENCE, PROTO, st.booleans())
def test_random_sequences(both: Any, commands: list[Words], proto: bytes, pipelined: bool) -> None:
    check(both, commands, proto, pipelined)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=20_000, deadline=None)
@given(SEQUENCE, PROTO, st.booleans())
def test_many_random_sequences(
    both: Any, commands: list[Words], proto: bytes, pipelined: bool
) -> None:
    check(both, commands, proto, pipelined)
