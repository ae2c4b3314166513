"""Invariant: what is encoded decodes to itself in RESP2 and RESP3, lazily and without copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_server.errors import Mismatch, NoAuth, PionError, ProtocolError
from pion_server.wire import receive
from pion_server.wire.encode import JOIN, as_bytes, encode_reply, encode_request
from pion_server.wire.limits import BY_REFERENCE, Limits
from pion_server.wire.replies import ReplyDecoder
from pion_server.wire.values import OK, Reply, Status, Stream

Decode = Callable[..., list[Any]]

line = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=20)
large = st.tuples(st.integers(BY_REFERENCE - 2, 3 * BY_REFERENCE), st.binary(min_size=1)).map(
    lambda made: (made[1] * made[0])[: made[0]]
)
strings = st.one_of(st.binary(max_size=60), large)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(max_size=20),
    strings,
    strings.map(memoryview),
    strings.map(lambda data: Stream(len(data), [memoryview(data)[:9], memoryview(data)[9:]])),
    line.map(Status),
    st.builds(lambda cls, text: cls(text), st.sampled_from([PionError, NoAuth, Mismatch]), line),
)
replies = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=8), inner, max_size=4),
    ),
    max_leaves=12,
)


def received(reply: Any, proto: int) -> Any:
    """What the other side is to see of a reply; errors as (class, text), NaN as the word."""
    match reply:
        case bool():
            return reply if proto == 3 else int(reply)
        case float() if proto == 2:
            return repr(reply).encode()
        case float() if math.isnan(reply):
            return "nan"
        case str():
            return reply.encode()
        case memoryview():
            return bytes(reply)
        case Stream():
            return b"".join(reply.pieces)
        case PionError():
            return type(reply), reply.wire()
        case Mapping() if proto == 3:
            return {key: received(value, proto) for key, value in reply.items()}
        case Mapping():
            pairs = ((key.encode(), received(value, proto)) for key, value in reply.items())
            return [item for pair in pairs for item in pair]
        case list() | tuple():
            return [received(item, proto) for item in reply]
    return reply


def seen(value: Any) -> Any:
    """A decoded value in the terms of received()."""
    match value:
        case float() if math.isnan(value):
            return "nan"
        case memoryview():
            return bytes(value)
        case PionError():
            return type(value), value.wire()
        case dict():
            return {key: seen(item) for key, item in value.items()}
        case list():
            return [seen(item) for item in value]
    return value


@settings(max_examples=200, deadline=None)
@given(
    st.lists(replies, max_size=3),
    st.sampled_from([2, 3]),
    st.lists(st.sampled_from([1, 7, 4_000, 30_000, 200_000])).map(lambda sizes: [*sizes, 5_003]),
)
def test_replies_come_back_as_they_were_encoded(
    replies_of: Decode, sent: list[Reply], proto: int, sizes: list[int]
) -> None:
    data = b"".join(piece for reply in sent for piece in encode_reply(reply, proto))
    expected = [received(reply, proto) for reply in sent]
    with patch.multiple(receive, RESERVE=BY_REFERENCE + 100, MAPPED_FROM=BY_REFERENCE + 100):
        assert [seen(value) for value in replies_of(ReplyDecoder(Limits()), data)] == expected
        cut = replies_of(ReplyDecoder(Limits()), data, sizes)
    assert repr([seen(value) for value in cut]) == repr(expected)  # 1, 1.0 and True apart


@pytest.mark.parametrize(
    ("reply", "resp2", "resp3"),
    [
        (None, b"$-1\r\n", b"_\r\n"),
        (True, b":1\r\n", b"#t\r\n"),
        (False, b":0\r\n", b"#f\r\n"),
        (1.5, b"$3\r\n1.5\r\n", b",1.5\r\n"),
        (np.float64(0.1), b"$3\r\n0.1\r\n", b",0.1\r\n"),
        ({"a": [1]}, b"*2\r\n$1\r\na\r\n*1\r\n:1\r\n", b"%1\r\n$1\r\na\r\n*1\r\n:1\r\n"),
        (OK, b"+OK\r\n", b"+OK\r\n"),
        (Mismatch("a\r\nb"), b"-MISMATCH a b\r\n", b"-MISMATCH a b\r\n"),
        (PionError("\ud800"), b"-ERR \\ud800\r\n", b"-ERR \\ud800\r\n"),
        (
            ProtocolError("expected '$', got '\n'"),
            b"-ERR Protocol error: expected '$', got ' '\r\n",
            b"-ERR Protocol error: expected '$', got ' '\r\n",
        ),
    ],
)
def test_wire_forms(reply: Reply, resp2: bytes, resp3: bytes) -> None:
    assert b"".join(encode_reply(reply, 2)) == resp2
    assert b"".join(encode_reply(reply, 3)) == resp3


def test_large_payloads_leave_as_the_very_object() -> None:
    view = memoryview(bytearray(BY_REFERENCE))
    text = b"x" * BY_REFERENCE
    pieces = list(encode_reply([1, view, b"small", text], 2))
    assert pieces[0] == b"*4\r\n:1\r\n$%d\r\n" % BY_REFERENCE
    assert pieces[1] is view
    assert pieces[2] == b"\r\n$5\r\nsmall\r\n$%d\r\n" % BY_REFERENCE
    assert pieces[3] is text
    request = encode_request([b"SET", b"k", view])
    assert request[0] == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % BY_REFERENCE
    assert request[1] is view
    assert request[2:] == [b"\r\n"]


def test_small_parts_are_joined_but_not_without_end() -> None:
    assert list(encode_reply([OK, 1, b"a", {"b": None}], 2)) == [
        b"*4\r\n+OK\r\n:1\r\n$1\r\na\r\n*2\r\n$1\r\nb\r\n$-1\r\n"
    ]
    pieces = list(encode_reply([b"x" * 1000] * 1000, 2))
    assert all(JOIN <= len(piece) < JOIN + BY_REFERENCE for piece in pieces[:-1])
    assert len(pieces) == math.ceil(1000 * 1009 / (JOIN + 1009))


def test_a_stream_is_asked_only_as_its_pieces_leave() -> None:
    made = 0

    def rows() -> Iterator[memoryview]:
        nonlocal made
        for _ in range(4):
            made += 1
            yield memoryview(bytes(BY_REFERENCE))

    pieces = encode_reply([Stream(4 * BY_REFERENCE, rows()), 5], 3)
    counts = [made for _ in pieces]
    assert counts == [1, 1, 2, 3, 4, 4]  # the header leaves once it is known not to be joined
    assert all(later - earlier <= 1 for earlier, later in pairwise(counts))


@pytest.mark.parametrize("yielded", [0, 9, 11, 40_000])
def test_a_stream_of_another_length_than_declared_is_an_error(yielded: int) -> None:
    stream = Stream(10, [memoryview(bytes(yielded))])
    with pytest.raises(RuntimeError, match="stream of 10 bytes"):
        list(encode_reply(stream, 2))


def test_an_endless_stream_is_stopped_at_once() -> None:
    def endless() -> Iterator[memoryview]:
        while True:
            yield memoryview(b"x")

    with pytest.raises(RuntimeError, match="more than it declared"):
        list(encode_reply(Stream(10, endless()), 2))


def test_numbers_and_text_in_a_request() -> None:
    arguments = ["\xe9", 5, -(2**70), 0.1, math.inf, np.float64(1e-7), b"\0", memoryview(b"")]
    assert b"".join(encode_request(arguments)) == (
        b"*8\r\n$2\r\n\xc3\xa9\r\n$1\r\n5\r\n$23\r\n-1180591620717411303424\r\n$3\r\n0.1\r\n"
        b"$3\r\ninf\r\n$5\r\n1e-07\r\n$1\r\n\0\r\n$0\r\n\r\n"
    )


@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f8", "<i8", "u1", "?", "c8", [("a", "<f4")]])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4), (200, 300)])
def test_a_view_of_any_format_goes_as_its_bytes(dtype: Any, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    nbytes = np.dtype(dtype).itemsize * math.prod(shape)
    array = rng.integers(0, 256, nbytes, np.uint8).view(dtype).reshape(shape)
    view = as_bytes(memoryview(array))
    assert (view.format, view.shape) == ("B", (nbytes,))
    assert np.shares_memory(np.frombuffer(view, np.uint8), array) or nbytes == 0
    assert b"".join(encode_request([memoryview(array)])).endswith(array.tobytes() + b"\r\n")


@pytest.mark.parametrize(
    "array",
    [np.zeros(10, np.uint8)[::2], np.zeros((3, 4), np.float32).T, np.zeros((3, 4), "u1")[:, :2]],
)
def test_a_view_with_gaps_is_refused(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(PionError, match="C-contiguous"):
        encode_request([b"SET", b"k", memoryview(array)])
    with pytest.raises(PionError, match="C-contiguous"):
        list(encode_reply([memoryview(array)], 2))


def test_what_is_no_reply_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="object is no reply"):
        list(encode_reply(object(), 2))  # type: ignore[arg-type]
