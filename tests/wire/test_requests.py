"""Invariant: the same bytes make the same requests however they are cut, and bytes that are no
requests make a ProtocolError, never anything else.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_server.wire import receive
from pion_server.wire.encode import encode_request
from pion_server.wire.limits import BEFORE_AUTH, BY_REFERENCE, MAX_ARGS, MAX_LINE, Limits
from pion_server.wire.requests import RequestDecoder

from .conftest import Decode, little_reserved, noise, sizes_of_reads

SMALL_RESERVE = BY_REFERENCE + 5_000
small = st.binary(max_size=40)
large = st.tuples(
    st.integers(BY_REFERENCE - 3, 4 * BY_REFERENCE + 3), st.binary(min_size=1, max_size=9)
).map(lambda made: (made[1] * made[0])[: made[0]])
arguments = st.lists(st.one_of(small, small, small, large), min_size=1, max_size=6)
nothing = st.sampled_from([b"\r\n", b"\n", b" \r\n", b"*0\r\n", b"*-1\r\n"])
broken = st.sampled_from(
    [b"", b"*x\r\n", b"*1\r\n:3\r\n", b"*1\r\n$01\r\n", b"*1\r\n$1\r\nabc\r\n"]
)


def framed(request: list[bytes]) -> bytes:
    bulks = [b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in request]
    return b"*%d\r\n" % len(request) + b"".join(bulks)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(arguments, nothing), max_size=6), broken, sizes_of_reads)
def test_every_chunking_decodes_alike(
    requests_of: Decode, items: list[list[bytes] | bytes], end: bytes, sizes: list[int]
) -> None:
    data = b"".join(item if isinstance(item, bytes) else framed(item) for item in items) + end
    expected = [item for item in items if isinstance(item, list)]
    with patch.object(receive, "RESERVE", SMALL_RESERVE):
        whole = requests_of(RequestDecoder(Limits()), data)
        cut = requests_of(RequestDecoder(Limits()), data, sizes)
    assert whole == cut
    assert whole[: len(expected)] == expected
    assert len(whole) == len(expected) + bool(end)


@pytest.mark.parametrize("reads_before", [0, 1])
def test_no_cut_makes_old_bytes_or_payload_pass_for_frames(
    requests_of: Decode, reads_before: int
) -> None:
    request = [b"SET", b"$1\r\na\r\n$1\r\nb\r\n", b"*1\r\n$4\r\nPING\r\n", b"x" * 1_100, b"\r\n"]
    data = framed(request)
    for cut in range(1, len(data)):
        # With a read before, scratch holds the very bytes that are still to come.
        sizes = [len(data)] * reads_before + [cut, len(data) - cut]
        decoded = requests_of(RequestDecoder(Limits()), data * (reads_before + 1), sizes)
        assert decoded == [request] * (reads_before + 1)
        unfinished = data * reads_before + data[:cut]
        assert requests_of(RequestDecoder(Limits()), unfinished, sizes) == [request] * reads_before


tokens = st.sampled_from(
    [bytes((character,)) for character in b"*$\r\n-0139\"'\\ \0"]
    + [b"\r\n", b"PING", b"*2\r\n", b"$4\r\nPING\r\n", b"*1048576\r\n"]
    + [b"$20000\r\n", b"$4000000000\r\n"]
)


@settings(max_examples=400, deadline=None)
@given(
    noise(tokens),
    sizes_of_reads,
    st.sampled_from([Limits(), BEFORE_AUTH]),
)
def test_noise_makes_only_protocol_errors(
    requests_of: Decode, data: bytes, sizes: list[int], limits: Limits
) -> None:
    with little_reserved():
        whole = requests_of(RequestDecoder(limits), data)
        assert requests_of(RequestDecoder(limits), data, sizes) == whole
    for request in whole[:-1]:
        assert isinstance(request, list)
        assert request


@settings(max_examples=100, deadline=None)
@given(st.lists(arguments, max_size=5), sizes_of_reads)
def test_requests_come_back_as_they_were_encoded(
    requests_of: Decode, requests: list[list[bytes]], sizes: list[int]
) -> None:
    data = b"".join(piece for request in requests for piece in encode_request(request))
    assert data == b"".join(map(framed, requests))
    assert requests_of(RequestDecoder(Limits()), data, sizes) == requests


MALFORMED = [
    (b"*x\r\n", "invalid multibulk length"),
    (b"*\r\n", "invalid multibulk length"),
    (b"*+1\r\n", "invalid multibulk length"),
    (b"* 1\r\n", "invalid multibulk length"),
    (b"*01\r\n", "invalid multibulk length"),
    (b"*1_0\r\n", "invalid multibulk length"),
    (b"*%d\r\n" % (MAX_ARGS + 1), "invalid multibulk length"),
    (b"*99999999999999999999\r\n", "invalid multibulk length"),
    (b"*1" + b"1" * (MAX_LINE + 1), "too big mbulk count string"),
    (b"*1\r\nPING\r\n", "expected '$', got 'P'"),
    (b"*1\r\n:1\r\n", "expected '$', got ':'"),
    (b"*1\r\n\r\n", "expected '$', got '\r'"),
    (b"*1\r\n\xe9\r\n", "expected '$', got '\xe9'"),
    (b"*1\r\n$\r\n", "invalid bulk length"),
    (b"*1\r\n$-1\r\n", "invalid bulk length"),
    (b"*1\r\n$x\r\n", "invalid bulk length"),
    (b"*1\r\n$04\r\nPING\r\n", "invalid bulk length"),
    (b"*1\r\n$%d\r\n" % ((4 << 30) + 1), "invalid bulk length"),
    (b"*1\r\n$1" + b"1" * (MAX_LINE + 1), "too big bulk count string"),
    (b"*1\r\n$4\r\nPINGxx", "expected CRLF after a bulk"),
    (b"*1\r\n$20000\r\n" + b"x" * 20_002, "expected CRLF after a bulk"),
    (b"x" * (MAX_LINE + 1), "too big inline request"),
    (b"x" * (MAX_LINE + 1) + b"\r\n", "too big inline request"),
    (b'ECHO "a\r\n', "unbalanced quotes in request"),
]


@pytest.mark.parametrize(("data", "words"), MALFORMED)
@pytest.mark.parametrize("sizes", [(1 << 20,), (3,)])
def test_malformed_input_in_the_words_of_redis(
    requests_of: Decode, data: bytes, words: str, sizes: tuple[int, ...]
) -> None:
    ping = framed([b"PING"])
    decoder = RequestDecoder(Limits())
    assert requests_of(decoder, ping + data + ping, sizes) == [[b"PING"], words]


@pytest.mark.parametrize(
    ("data", "result"),
    [
        (framed([b"x"] * 10), [b"x"] * 10),
        (framed([b"x"] * 11), "unauthenticated multibulk length"),
        (framed([b"x" * 16_384]), [b"x" * 16_384]),
        (framed([b"x" * 16_385]), "unauthenticated bulk length"),
    ],
)
def test_limits_before_auth(requests_of: Decode, data: bytes, result: object) -> None:
    assert requests_of(RequestDecoder(BEFORE_AUTH), data) == [result]
    assert requests_of(RequestDecoder(BEFORE_AUTH), data, (5,)) == [result]


def test_limits_may_change_between_pipelined_requests() -> None:
    decoder = RequestDecoder(BEFORE_AUTH)
    large_request = [b"SET", b"k", b"x" * 16_385]
    data = framed([b"AUTH", b"secret"]) + framed(large_request)
    decoder.get_buffer()[: len(data)] = data
    decoder.buffer_updated(len(data))
    assert decoder.next_request() == [b"AUTH", b"secret"]
    decoder.limits = Limits()
    assert decoder.next_request() == large_request


def test_max_bulk_holds_for_small_arguments_too(requests_of: Decode) -> None:
    decoder = RequestDecoder(Limits(max_bulk=3))
    assert requests_of(decoder, framed([b"abc"]) + framed([b"abcd"])) == [
        [b"abc"],
        "invalid bulk length",
    ]


@pytest.mark.parametrize("sizes", [(1 << 20,), (11,)])
def test_as_many_arguments_as_allowed(requests_of: Decode, sizes: tuple[int, ...]) -> None:
    request = [b"%d" % (n % 997) for n in range(MAX_ARGS if sizes[0] > 11 else 20_000)]
    assert requests_of(RequestDecoder(Limits()), framed(request), sizes) == [request]
