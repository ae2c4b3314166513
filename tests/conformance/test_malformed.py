"""Invariant: bytes that are no proper request get the error text of a real redis-server, and close
the connection where it does, however they are cut into pieces.

Each input is followed by a PING of its own: where its answer is missing, the connection was closed
or the input had swallowed it; both must be as with Redis.
"""

from __future__ import annotations

import re
import time
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

PING = b"*1\r\n$4\r\nPING\r\n"
# Long enough for the server to read the first piece before the second one comes; if it does not,
# the two arrive as one, which is a case of its own.
GAP = 0.001

INPUTS = {
    "no array": b"$4\r\nPING\r\n",
    "array length missing": b"*\r\n",
    "array length a word": b"*abc\r\n",
    "array length with a sign": b"*+1\r\n$4\r\nPING\r\n",
    "array length with a zero": b"*01\r\n$4\r\nPING\r\n",
    "array length with a blank": b"* 1\r\n$4\r\nPING\r\n",
    "array length with a point": b"*1.0\r\n$4\r\nPING\r\n",
    "array length negative": b"*-1\r\n",
    "array length very negative": b"*-9223372036854775808\r\n",
    "array length zero": b"*0\r\n",
    "bulk without a dollar": b"*1\r\nPING\r\n",
    "bulk as integer": b"*1\r\n:4\r\nPING\r\n",
    "bulk as nothing": b"*1\r\n\r\n",
    "second bulk without a dollar": b"*2\r\n$3\r\nGET\r\n*1\r\n",
    "bulk length missing": b"*1\r\n$\r\n\r\n",
    "bulk length a word": b"*1\r\n$x\r\nPING\r\n",
    "bulk length with a sign": b"*1\r\n$+4\r\nPING\r\n",
    "bulk length with a zero": b"*1\r\n$04\r\nPING\r\n",
    "bulk length negative": b"*1\r\n$-1\r\n",
    "empty name": b"*1\r\n$0\r\n\r\n",
    "line feed only in a length": b"*1\n$4\nPING\n",
    "inline": b"PING\r\n",
    "inline, line feed only": b"PING\n",
    "inline, blank": b"   \r\n",
    "inline, nothing": b"\r\n",
    "inline with blanks around": b"  PING   hello \r\n",
    "inline in double quotes": b'ECHO "a\\x41\\n\\"b"\r\n',
    "inline in single quotes": b"ECHO 'a\\'b\\n'\r\n",
    "inline with an open double quote": b'ECHO "a\r\n',
    "inline with an open single quote": b"ECHO 'a\r\n",
    "inline with a quote inside a word": b'ECHO a"b"\r\n',
    "inline with text behind a quote": b'ECHO "a"b\r\n',
    "inline with an odd escape": b'ECHO "\\x4g\\q"\r\n',
    "inline with a carriage return": b"ECHO a\rb\r\n",
    "inline, unknown": b"GIBBERISH and more\r\n",
    "a web browser": b"GET / HTTP/1.1\r\n",
    "inline, then an array": b"PING\r\n*1\r\n$4\r\nPING\r\n",
    "good, then bad": b"*1\r\n$4\r\nPING\r\n*x\r\n",
    "bytes above 127": "tést\r\n".encode(),
    "a closed array of nothing, thrice": b"*0\r\n*-5\r\n*0\r\n",
}
# Redis counts a line once it has read it, 16 KB at a time; these are too long however it reads.
TOO_MUCH = {
    "array of 31 bits": b"*2147483648\r\n",
    "array beyond 32 bits": b"*4294967297\r\n",
    "array beyond 64 bits": b"*18446744073709551617\r\n",
    "bulk of five gigabytes": b"*1\r\n$5368709120\r\n",
    "bulk beyond 64 bits": b"*1\r\n$18446744073709551620\r\nPING\r\n",
    "inline": b"ECHO " + b"a" * 200_000 + b"\r\n",
    "inline without an end": b"a" * 200_000,
    "array length": b"*" + b"1" * 200_000,
    "bulk length": b"*1\r\n$" + b"1" * 200_000,
}
# What Redis lets pass, and guesses where the next request begins: a sender that miscounted would
# have its rows stored cut or shifted, and its payload read as commands.
STRICTER_INPUTS = {
    "stars behind an empty bulk": b"*1\r\n$0\r\n**",
    "bulk longer than it says": b"*1\r\n$4\r\nPINGPING\r\n",
    "bulk without its end": b"*1\r\n$4\r\nPINGXX",
    "a million arguments": b"*1048577\r\n",
}
# Before AUTH a stranger gets 10 arguments of 16 KB.
STRANGER_INPUTS = {
    "ten arguments": b"*10\r\n" + b"$1\r\na\r\n" * 10,
    "eleven arguments": b"*11\r\n",
    "16 KB": b"*2\r\n$4\r\nAUTH\r\n$16384\r\n" + b"a" * 16384 + b"\r\n",
    "a byte more than 16 KB": b"*2\r\n$4\r\nAUTH\r\n$16385\r\n",
    "many arguments": b"*1048577\r\n",
    "a huge argument": b"*1\r\n$100000000\r\n",
}


def ending(client: Any, *pieces: bytes) -> bytes:
    """All the server says until it closes: after the pieces nothing more is sent."""
    with closing(client):
        for number, piece in enumerate(pieces):
            if number:
                time.sleep(GAP)
            client.send(piece)
        return client.rest()


def check(both: Any, data: bytes) -> None:
    assert ending(both.pion(), data) == ending(both.redis(), data)


LOST = b"-ERR Protocol error: expected CRLF after a bulk\r\n"
REQUEST = re.compile(rb"\*([1-9][0-9]*)\r\n")
BULK = re.compile(rb"\$(0|[1-9][0-9]*)\r\n")


def lost_frame(data: bytes) -> int | None:
    """Where the first request begins that has a bulk which two other bytes than CRLF follow; None
    where there is none."""
    at = 0
    while at < len(data):
        start = at
        if (header := REQUEST.match(data, at)) is None:
            _, newline, rest = data[at:].partition(b"\n")  # inline, or an array of nothing
            at = len(data) - len(rest) if newline else len(data)
            continue
        at = header.end()
        for _ in range(int(header[1])):
            if (bulk := BULK.match(data, at)) is None:
                return None  # cut off, or a protocol error for both
            behind = bulk.end() + int(bulk[1])
            at = behind + 2
            if len(data) >= at and data[behind:at] != b"\r\n":
                return start
    return None


def check_but_for_lost_frames(both: Any, data: bytes) -> None:
    """Both say the same, but where Redis passes over two bytes behind a bulk that are no CRLF, and
    takes up the stream somewhere: pion ends it there, unless both have ended it before."""
    start = lost_frame(data)
    if start is None:
        check(both, data)
        return
    before = ending(both.redis(), data[:start])
    ended = b"-ERR Protocol error" in before
    assert ending(both.pion(), data) == (before if ended else before + LOST)


@pytest.mark.parametrize("data", INPUTS.values(), ids=INPUTS)
def test_every_split_is_answered_as_redis_answers_the_whole(both: Any, data: bytes) -> None:
    for whole in (data, data + PING):
        expected = ending(both.redis(), whole)
        for cut in range(len(whole)):
            assert ending(both.pion(), *filter(None, (whole[:cut], whole[cut:]))) == expected, cut


@pytest.mark.parametrize("data", TOO_MUCH.values(), ids=TOO_MUCH)
def test_too_much_is_refused(both: Any, data: bytes) -> None:
    check(both, data)
    check(both, data + PING)


@pytest.mark.parametrize("data", STRICTER_INPUTS.values(), ids=STRICTER_INPUTS)
def test_a_lost_frame_ends_the_connection(both: Any, data: bytes) -> None:
    said = ending(both.pion(), data + PING)
    assert said.startswith(b"-ERR Protocol error: ")
    assert said.count(b"\r\n") == 1


@pytest.mark.parametrize(
    "data", [*STRANGER_INPUTS.values(), *INPUTS.values()], ids=[*STRANGER_INPUTS, *INPUTS]
)
def test_strangers_get_no_more_than_redis_gives_them(locked: Any, data: bytes) -> None:
    check(locked, data)
    check(locked, data + PING)


# What a confused or hostile client may send: pieces of the protocol in any order.
SIGNS = rb"* $ : + - \ ' 0 1 2 3 4 -1 PING ECHO a".split()
FRAGMENTS = [*SIGNS, b'"', b"\r\n", b" ", b"$4\r\nPING\r\n", b"*1\r\n", PING]
STREAM = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map(b"".join)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(STREAM)
def test_fragments(both: Any, data: bytes) -> None:
    check_but_for_lost_frames(both, data)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=50_000, deadline=None)
@given(STREAM)
def test_many_fragments(both: Any, data: bytes) -> None:
    check_but_for_lost_frames(both, data)
