"""Invariant: a reply comes out of the binary lane as it went in, and as it does out of RESP3,
however its bytes are cut; bytes that are no reply make a ProtocolError, never anything else.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_server.errors import ColdMiss, Mismatch, PionError
from pion_server.wire.encode import encode_reply
from pion_server.wire.fast_encode import encode_fast_reply
from pion_server.wire.fast_replies import FastReplyDecoder
from pion_server.wire.limits import BY_REFERENCE, MAX_DEPTH, Limits
from pion_server.wire.replies import ReplyDecoder
from pion_server.wire.values import OK, Status, Stream

from .conftest import Decode, little_reserved, noise, sizes_of_reads


def value(
    kind: bytes,
    payload: bytes = b"",
    status: int = 0,
    number: int | None = None,
    magic: int = 0xCA5E,
) -> bytes:
    """By the book (docs/FASTLANE.md), but for what is said otherwise."""
    number = len(payload) if number is None else number
    return struct.pack("<HBcQ", magic, status, kind, number) + payload


def encoded(reply: Any) -> bytes:
    return b"".join(encode_fast_reply(reply))


def test_the_frame_is_that_of_the_book() -> None:
    assert encoded(b"ab") == bytes.fromhex("5eca 00 24 0200000000000000") + b"ab"
    assert encoded([1, None]) == (
        value(b"*", number=2) + value(b":", (1).to_bytes(8, "little")) + value(b"_")
    )
    assert encoded({"a": True}) == value(b"%", number=1) + value(b"$", b"a") + value(b"#", b"\1")
    assert encoded(1.5) == value(b",", struct.pack("<d", 1.5))
    assert encoded(OK) == value(b"+", b"OK")
    assert encoded(Mismatch("other")) == value(b"-", b"MISMATCH other", status=1)


def test_a_cold_miss_has_a_status_of_its_own(replies_of: Decode) -> None:
    data = encoded(ColdMiss("warm it"))
    assert data == value(b"-", b"COLDMISS warm it", status=3)
    (error,) = replies_of(FastReplyDecoder(Limits()), data)
    assert isinstance(error, ColdMiss)
    assert str(error) == "warm it"


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.binary(max_size=30),
    st.binary(min_size=1, max_size=3).map(lambda made: made * BY_REFERENCE),
    st.text(st.characters(min_codepoint=32, codec="utf-8"), max_size=10).map(Status),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1).map(PionError),
)
replies = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), inner, max_size=3),
    ),
    max_leaves=12,
)


def plain(reply: Any) -> Any:
    """A reply in a form that can be compared."""
    match reply:
        case PionError():
            return (type(reply), str(reply))
        case memoryview():
            return bytes(reply)
        case list():
            return [plain(each) for each in reply]
        case dict():
            return {key: plain(each) for key, each in reply.items()}
        case _:
            return (type(reply), reply) if isinstance(reply, bool | int | float) else reply


@settings(max_examples=150, deadline=None)
@given(st.lists(replies, max_size=4), sizes_of_reads)
def test_both_lanes_give_back_what_went_in(
    replies_of: Decode, sent: list[Any], sizes: list[int]
) -> None:
    fast = b"".join(map(encoded, sent))
    resp = b"".join(bytes(part) for each in sent for part in encode_reply(each, 3))
    got = [plain(each) for each in replies_of(FastReplyDecoder(Limits()), fast, sizes)]
    assert got == [plain(each) for each in replies_of(ReplyDecoder(Limits()), resp)]
    assert got == [plain(each) for each in replies_of(FastReplyDecoder(Limits()), fast, (3,))]
    assert len(got) == len(sent)


def test_nan_and_infinities(replies_of: Decode) -> None:
    nan, inf = replies_of(FastReplyDecoder(Limits()), encoded(math.nan) + encoded(-math.inf))
    assert math.isnan(nan)
    assert inf == -math.inf


def test_a_stream_is_sent_as_it_is_made(replies_of: Decode) -> None:
    taken = []

    def pieces() -> Any:
        for number in range(3):
            taken.append(number)
            yield memoryview(bytes([number]) * BY_REFERENCE)

    parts = encode_fast_reply([Stream(3 * BY_REFERENCE, pieces()), 5])
    first = next(parts)
    assert taken == [0]
    (reply,) = replies_of(FastReplyDecoder(Limits()), b"".join([first, *parts]))
    assert reply[0] == b"".join(bytes([number]) * BY_REFERENCE for number in range(3))
    assert reply[1] == 5
    with pytest.raises(RuntimeError, match="1 bytes less than it declared"):
        encoded(Stream(2, iter([memoryview(b"x")])))


def test_strings_are_received_where_the_sink_says(replies_of: Decode) -> None:
    big = bytes(range(256)) * (BY_REFERENCE // 128)
    data = encoded([b"small", {"k": b"inner"}, big, None, b""])
    targets = [np.zeros(size, np.uint8) for size in (5, len(big), 0)]
    for sizes in ((1 << 20,), (1_000,), (1,)):
        seen: list[tuple[int, int]] = []

        def sink(index: int, nbytes: int, seen: list[tuple[int, int]] = seen) -> memoryview:
            seen.append((index, nbytes))
            return targets[index].data

        decoder = FastReplyDecoder(Limits())
        decoder.expect(sink)
        (reply,) = replies_of(decoder, data, sizes)
        assert seen == [(0, 5), (1, len(big)), (2, 0)]
        assert targets[0].tobytes() == b"small"
        assert targets[1].tobytes() == big
        assert reply[2].obj is targets[1]
        assert reply[1] == {"k": b"inner"}


MALFORMED = [
    (b"+OK\r\n+OK\r\n+OK\r\n", "no reply of the binary lane begins so"),
    (value(b"+", b"OK", magic=0x5ECA), "no reply of the binary lane begins so"),
    (value(b"+", b"OK", status=1), "status 1 does not go with type b'+'"),
    (value(b"-", b"ERR x"), "status 0 does not go with type b'-'"),
    (value(b"!", b"ERR x", status=1), "status 1 does not go with type b'!'"),
    (value(b"~", number=0), "unknown reply type b'~'"),
    (value(b">", number=0), "unknown reply type b'>'"),
    (value(b":", b"1234"), "a number of 4 bytes"),
    (value(b",", b""), "a number of 0 bytes"),
    (value(b"#", b"\2"), "invalid boolean"),
    (value(b"_", b"\0"), "invalid null"),
    (value(b"$", number=(4 << 30) + 1), "invalid bulk length"),
    (value(b"*", number=(1 << 20) + 1), "invalid multibulk length"),
    (value(b"%", number=1) + value(b"*", number=0) + value(b"_"), "a map key that is no string or "
     "number"),
    (value(b"*", number=1) * (MAX_DEPTH + 1), f"a reply nested deeper than {MAX_DEPTH}"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "words"), MALFORMED)
@pytest.mark.parametrize("sizes", [(1 << 20,), (3,)])
def test_malformed_replies(
    replies_of: Decode, data: bytes, words: str, sizes: tuple[int, ...]
) -> None:
    got = replies_of(FastReplyDecoder(Limits()), encoded(1) + data + encoded(2), sizes)
    assert got == [1, words]


tokens = st.sampled_from(
    [bytes((octet,)) for octet in b"+-:$*%,#_\0\1\x5e\xca"]
    + [value(bytes((kind,)), number=number) for kind in b"+:$*%,#_" for number in (0, 1, 8, 30_000)]
    + [encoded(each) for each in (1, b"a", [b"b"], {"k": None}, PionError("x"))]
    + [value(b"$", number=4_000_000_000), value(b"-", number=5, status=3)]
)


@settings(max_examples=400, deadline=None)
@given(
    noise(tokens),
    sizes_of_reads,
)
def test_noise_makes_only_protocol_errors(
    replies_of: Decode, data: bytes, sizes: list[int]
) -> None:
    with little_reserved():
        whole = replies_of(FastReplyDecoder(Limits()), data)
        cut = replies_of(FastReplyDecoder(Limits()), data, sizes)
    assert repr(cut) == repr(whole)  # by repr, as errors and NaN differ from their equals
