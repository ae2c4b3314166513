"""Invariant: the binary lane makes the same requests as RESP however its bytes are cut, holds to
the same limits, and bytes that are no frames make a ProtocolError, never anything else.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_server.commands import load_families
from pion_server.commands.registry import TABLE
from pion_server.errors import PionError
from pion_server.wire import receive
from pion_server.wire.fast import COMMANDS, NUMBERS
from pion_server.wire.fast_encode import encode_fast_request
from pion_server.wire.fast_requests import FastRequestDecoder
from pion_server.wire.limits import BEFORE_AUTH, BY_REFERENCE, MAX_ARGS, Limits

from .conftest import Decode, little_reserved, noise, sizes_of_reads

small = st.binary(max_size=40)
large = st.tuples(
    st.integers(BY_REFERENCE - 3, 4 * BY_REFERENCE + 3), st.binary(min_size=1, max_size=9)
).map(lambda made: (made[1] * made[0])[: made[0]])
names = st.sampled_from(["PING", "ATTEND.PREFIX.QUERY_FUSED", "SET", "no such command"])
requests = st.tuples(names, st.lists(st.one_of(small, small, small, large), max_size=6)).map(
    lambda made: [made[0], *made[1]]
)


def frame(
    *arguments: bytes,
    magic: int = 0xCA5E,
    version: int = 1,
    number: int = 0,
    count: int | None = None,
    lengths: Sequence[int] | None = None,
    body: int | None = None,
) -> bytes:
    """By the book (docs/FASTLANE.md), but for what is said otherwise."""
    sizes = [len(each) for each in arguments] if lengths is None else lengths
    table = struct.pack(f"<{len(sizes)}Q", *sizes)
    count = len(sizes) if count is None else count
    body = len(table) + sum(sizes) if body is None else body
    header = magic.to_bytes(2, "little") + bytes((version, number))
    header += count.to_bytes(4, "little") + body.to_bytes(8, "little")
    return header + table + b"".join(arguments)


def test_the_frame_is_that_of_the_book(requests_of: Decode) -> None:
    assert frame(b"a", number=0x24) == bytes.fromhex(
        "5eca 01 24 01000000 0900000000000000 0100000000000000 61"
    )
    sent = b"".join(encode_fast_request(("ATTEND.PREFIX.QUERY_FUSED", b"a")))
    assert sent == frame(b"a", number=0x24)
    assert b"".join(encode_fast_request((b"ping", 12, 1.5))) == frame(b"ping", b"12", b"1.5")
    data = frame(b"a", number=0x24) + frame(b"GET", b"k") + frame(number=0x01)
    expected = [[b"ATTEND.PREFIX.QUERY_FUSED", b"a"], [b"GET", b"k"], [b"PING"]]
    assert requests_of(FastRequestDecoder(Limits()), data) == expected


def test_arguments_go_out_and_come_in_by_reference() -> None:
    rows = np.arange(3 * BY_REFERENCE, dtype="<f4").reshape(3, -1)
    head, payload = encode_fast_request(("V.STOREBATCH", b"s", memoryview(rows)))
    assert isinstance(payload, memoryview)
    assert payload.obj is not None
    assert np.shares_memory(np.frombuffer(payload, np.uint8), rows)
    with pytest.raises(PionError, match="C-contiguous"):
        encode_fast_request(("V.STOREBATCH", memoryview(rows[:, ::2])))
    decoder = FastRequestDecoder(Limits())
    decoder.get_buffer()[: len(head)] = head
    decoder.buffer_updated(len(head))
    assert decoder.next_request() is None
    room = decoder.get_buffer()
    assert len(room) == rows.nbytes  # the payload's own memory, and nothing else
    room[:] = payload
    decoder.buffer_updated(len(room))
    (_, _, received) = decoder.next_request() or ()
    assert np.shares_memory(np.frombuffer(received, np.uint8), np.frombuffer(room, np.uint8))
    assert received == payload


def test_every_command_of_ours_has_a_number() -> None:
    """Those of Redis go by name, unless a client of the lane always sends them."""
    load_families()
    ours = {name for name, row in TABLE.items() if "." in name}
    assert ours - NUMBERS.keys() == set(), "give it the next free number in wire/fast.py"
    assert len(NUMBERS) == len(COMMANDS)
    assert NUMBERS["ATTEND.PREFIX.QUERY_FUSED"] == 0x24
    assert all(0 < number < 256 for number in COMMANDS)


broken = st.sampled_from(
    [b"", frame(b"PING", magic=0xCA5F), frame(b"PING", version=2), frame(), frame(b"a", body=8)]
)


@settings(max_examples=100, deadline=None)
@given(st.lists(requests, max_size=6), broken, sizes_of_reads)
def test_every_chunking_decodes_alike(
    requests_of: Decode, items: list[list[str | bytes]], end: bytes, sizes: list[int]
) -> None:
    data = b"".join(bytes(part) for item in items for part in encode_fast_request(item)) + end
    expected = [[str(item[0]).encode(), *item[1:]] for item in items]
    with patch.multiple(receive, RESERVE=BY_REFERENCE + 5_000, MAPPED_FROM=BY_REFERENCE + 5_000):
        whole = requests_of(FastRequestDecoder(Limits()), data)
        cut = requests_of(FastRequestDecoder(Limits()), data, sizes)
    assert whole == cut
    assert whole[: len(expected)] == expected
    assert len(whole) == len(expected) + bool(end)


@pytest.mark.parametrize("reads_before", [0, 1])
def test_no_cut_makes_old_bytes_or_payload_pass_for_frames(
    requests_of: Decode, reads_before: int
) -> None:
    request = [b"SET", frame(b"PING"), b"", b"x" * 300, b"\x5e\xca\x01\x01"]
    data = frame(*request)
    for cut in range(1, len(data)):
        # With a read before, scratch holds the very bytes that are still to come.
        sizes = [len(data)] * reads_before + [cut, len(data) - cut]
        decoded = requests_of(FastRequestDecoder(Limits()), data * (reads_before + 1), sizes)
        assert decoded == [request] * (reads_before + 1)
        unfinished = data * reads_before + data[:cut]
        got = requests_of(FastRequestDecoder(Limits()), unfinished, sizes)
        assert got == [request] * reads_before


def test_many_arguments(requests_of: Decode) -> None:
    request = [b"MSET", *(b"%d" % number for number in range(40_000))]
    for sizes in ((1 << 20,), (1_000,)):
        assert requests_of(FastRequestDecoder(Limits()), frame(*request), sizes) == [request]


def test_a_number_that_stands_for_nothing_is_left_to_the_dispatcher(requests_of: Decode) -> None:
    data = frame(b"x", number=0xEE) + frame(number=0x01)
    assert requests_of(FastRequestDecoder(Limits()), data) == [[b"0xEE", b"x"], [b"PING"]]


MALFORMED = [
    (b"*1\r\n$4\r\nPING\r\n\0\0", "no frame of the binary lane begins so; is this RESP?"),
    (b"POST / HTTP/1.1\r\n", "no frame of the binary lane begins so; is this RESP?"),
    (frame(b"PING", magic=0x5ECA), "no frame of the binary lane begins so; is this RESP?"),
    (frame(b"PING", version=0), "version 0 of the binary lane; 1 is spoken here"),
    (frame(), "a request without a name"),
    (frame(b"PING", body=11), "lengths of arguments that do not add up to the frame's"),
    (frame(b"PING", body=13), "lengths of arguments that do not add up to the frame's"),
    (frame(lengths=[2**64 - 1, 1], body=16), "lengths of arguments that do not add up to "
     "the frame's"),
    (frame(number=1, body=1), "lengths of arguments that do not add up to the frame's"),
    (frame(b"PING", count=MAX_ARGS + 1), "invalid count of arguments"),
    (frame(lengths=[(4 << 30) + 1]), "invalid length of an argument"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "words"), MALFORMED)
@pytest.mark.parametrize("sizes", [(1 << 20,), (3,)])
def test_malformed_requests(
    requests_of: Decode, data: bytes, words: str, sizes: tuple[int, ...]
) -> None:
    decoder = FastRequestDecoder(Limits())
    got = requests_of(decoder, frame(b"PING") + data + frame(b"PING"), sizes)
    assert got == [[b"PING"], words]
    with pytest.raises(PionError, match=r"^" + words[:10]):
        decoder.next_request()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (frame(*[b"x"] * 11), "unauthenticated count of arguments"),
        (frame(b"AUTH", lengths=[4, 16 * 1024 + 1]), "unauthenticated length of an argument"),
    ],
)
def test_a_stranger_is_held_to_tight_limits(requests_of: Decode, data: bytes, words: str) -> None:
    assert requests_of(FastRequestDecoder(BEFORE_AUTH), data) == [words]
    allowed = [b"x" * (16 * 1024)] * 10
    decoded = requests_of(FastRequestDecoder(BEFORE_AUTH), frame(*allowed))
    assert decoded == [allowed]


tokens = st.sampled_from(
    [bytes((octet,)) for octet in (0, 1, 2, 5, 0x24, 0x5E, 0xCA, 0xFF)]
    + [frame(b"PING"), frame(number=1), frame(b"a", b"b" * 20, number=0x24)]
    + [b"\x5e\xca", b"\x5e\xca\x01", frame(count=1), frame(lengths=[20_000])]
    + [frame(lengths=[4_000_000_000]), frame(lengths=[0] * 3_000)[:200]]
)


@settings(max_examples=400, deadline=None)
@given(
    noise(tokens),
    sizes_of_reads,
)
def test_noise_makes_only_protocol_errors(
    requests_of: Decode, data: bytes, sizes: list[int]
) -> None:
    with little_reserved():
        whole = requests_of(FastRequestDecoder(Limits()), data)
        cut = requests_of(FastRequestDecoder(Limits()), data, sizes)
    assert cut == whole
