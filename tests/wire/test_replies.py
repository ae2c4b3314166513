"""Invariant: a reply's bytes make its value however they are cut, in the caller's memory where the
caller gave some, and bytes that are no reply make a ProtocolError, never anything else.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_server.errors import Mismatch, PionError
from pion_server.wire.limits import BY_REFERENCE, MAX_DEPTH, MAX_LINE, Limits
from pion_server.wire.replies import INCOMPLETE, ReplyDecoder
from pion_server.wire.values import OK, Status

from .conftest import Decode, little_reserved, noise, sizes_of_reads

VALUES: list[tuple[bytes, Any]] = [
    (b"+OK\r\n", OK),
    (b"+caf\xc3\xa9\r\n", Status("caf\xe9")),
    (b":0\r\n", 0),
    (b":-9223372036854775808\r\n", -(2**63)),
    (b"$3\r\nabc\r\n", b"abc"),
    (b"$0\r\n\r\n", b""),
    (b"$2\r\n\r\n\r\n", b"\r\n"),
    (b"$-1\r\n", None),
    (b"*-1\r\n", None),
    (b"_\r\n", None),
    (b"*0\r\n", []),
    (b"*3\r\n:1\r\n*2\r\n$1\r\na\r\n*0\r\n$-1\r\n", [1, [b"a", []], None]),
    (b"%0\r\n", {}),
    (b"%2\r\n$1\r\na\r\n:1\r\n+b\r\n%1\r\n:7\r\n#t\r\n", {"a": 1, "b": {7: True}}),
    (b"%1\r\n$1\r\n\xff\r\n*1\r\n_\r\n", {b"\xff": [None]}),
    (b"~2\r\n:1\r\n:1\r\n", [1, 1]),
    (b",1.5\r\n", 1.5),
    (b",10\r\n", 10.0),
    (b",-1e-07\r\n", -1e-07),
    (b",inf\r\n", math.inf),
    (b",-inf\r\n", -math.inf),
    (b"#t\r\n", True),
    (b"#f\r\n", False),
    (b"(-349289032840923850932485\r\n", -349289032840923850932485),
    (b"=8\r\ntxt:abcd\r\n", b"abcd"),
    (b"=4\r\nmkd:\r\n", b""),
    (b"|1\r\n$3\r\nttl\r\n:3\r\n:5\r\n", 5),
    (b"*2\r\n|1\r\n+k\r\n*1\r\n:1\r\n:5\r\n|0\r\n:6\r\n", [5, 6]),
]


@pytest.mark.parametrize(("data", "value"), VALUES)
@pytest.mark.parametrize("sizes", [(1 << 20,), (1,)])
def test_every_kind_of_reply(
    replies_of: Decode, data: bytes, value: object, sizes: tuple[int, ...]
) -> None:
    replies = replies_of(ReplyDecoder(Limits()), data + b"+END\r\n", sizes)
    assert replies == [value, Status("END")]
    assert type(replies[0]) is type(value)


def test_nan(replies_of: Decode) -> None:
    (value,) = replies_of(ReplyDecoder(Limits()), b",nan\r\n")
    assert math.isnan(value)


@pytest.mark.parametrize("frame", [b"-%b\r\n", b"!%d\r\n%b\r\n"])
def test_errors_are_returned_as_their_class(replies_of: Decode, frame: bytes) -> None:
    def error(text: bytes) -> bytes:
        return frame % ((len(text), text) if frame.startswith(b"!") else text)

    data = b"*3\r\n" + error(b"MISMATCH other model") + error(b"ERR no") + error(b"BUSY a b")
    (errors,) = replies_of(ReplyDecoder(Limits()), data)
    assert [(type(e), str(e)) for e in errors] == [
        (Mismatch, "other model"),
        (PionError, "no"),
        (PionError, "BUSY a b"),
    ]


def test_push_frames_are_collected_apart(replies_of: Decode) -> None:
    decoder = ReplyDecoder(Limits())
    data = b">2\r\n+invalidate\r\n*1\r\n$1\r\nk\r\n:1\r\n>0\r\n>1\r\n_\r\n:2\r\n"
    assert replies_of(decoder, data, (2,)) == [1, 2]
    assert decoder.pushes == [[Status("invalidate"), [b"k"]], [], [None]]


MALFORMED = [
    (b"x\r\n", "unknown reply type b'x'"),
    (b"\r\n", "unknown reply type b''"),
    (b":\r\n", "invalid integer"),
    (b":1x\r\n", "invalid integer"),
    (b":1_0\r\n", "invalid integer"),
    (b"(x\r\n", "invalid big number"),
    (b"(" + b"9" * 4301 + b"\r\n", "invalid big number"),
    (b",1_0\r\n", "invalid double"),
    (b",\r\n", "invalid double"),
    (b"#x\r\n", "invalid boolean"),
    (b"_x\r\n", "invalid null"),
    (b"$-2\r\n", "invalid bulk length"),
    (b"$?\r\n", "invalid bulk length"),
    (b"=-1\r\n", "invalid bulk length"),
    (b"$%d\r\n" % ((4 << 30) + 1), "invalid bulk length"),
    (b"$3\r\nabcd\r\n", "expected CRLF after a bulk"),
    (b"=3\r\ntxt\r\n", "invalid verbatim string"),
    (b"*-2\r\n", "invalid multibulk length"),
    (b"%-1\r\n", "invalid multibulk length"),
    (b"*?\r\n", "invalid multibulk length"),
    (b"*1048577\r\n", "invalid multibulk length"),
    (b"*1\r\n>1\r\n", "a push frame inside a reply"),
    (b"%1\r\n*0\r\n:1\r\n", "a map key that is no string or number"),
    (b"*1\r\n" * (MAX_DEPTH + 1), f"a reply nested deeper than {MAX_DEPTH}"),
    (b"+" + b"x" * (MAX_LINE + 2), "too long a line in a reply"),
]


@pytest.mark.parametrize(("data", "words"), MALFORMED)
@pytest.mark.parametrize("sizes", [(1 << 20,), (3,)])
def test_malformed_replies(
    replies_of: Decode, data: bytes, words: str, sizes: tuple[int, ...]
) -> None:
    decoder = ReplyDecoder(Limits())
    assert replies_of(decoder, b":1\r\n" + data + b":2\r\n", sizes) == [1, words]


def test_the_deepest_reply_allowed(replies_of: Decode) -> None:
    (reply,) = replies_of(ReplyDecoder(Limits()), b"*1\r\n" * MAX_DEPTH + b":5\r\n", (3,))
    for _ in range(MAX_DEPTH):
        (reply,) = reply
    assert reply == 5


tokens = st.sampled_from(
    [bytes((kind,)) for kind in b"+-:$*%~>|,#(_=!?xX01379"]
    + [b"\r\n", b"\r", b"-1", b"inf", b"$1\r\na\r\n", b"$20000\r\n", b"$4000000000\r\n", b"*2\r\n"]
    + [b"%1\r\n", b"|1\r\n", b"*1048576\r\n", b"=5\r\ntxt:\xff\r\n", b"!1\r\nE\r\n", b"#t\r\n"]
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
        whole = replies_of(ReplyDecoder(Limits()), data)
        cut = replies_of(ReplyDecoder(Limits()), data, sizes)
    assert repr(cut) == repr(whole)  # by repr, as errors and NaN differ from their equals


def into_arrays(arrays: dict[int, np.ndarray[Any, Any]], seen: list[tuple[int, int]]) -> Any:
    def sink(index: int, nbytes: int) -> memoryview | None:
        seen.append((index, nbytes))
        return arrays[index].data if index in arrays else None

    return sink


@pytest.mark.parametrize("sizes", [(1 << 20,), (1_000,), (1,)])
def test_strings_are_received_where_the_sink_says(
    replies_of: Decode, sizes: tuple[int, ...]
) -> None:
    large = BY_REFERENCE + 77
    arrays = {1: np.zeros(large, np.uint8), 2: np.zeros(3, np.uint8), 4: np.zeros(0, np.uint8)}
    seen: list[tuple[int, int]] = []
    decoder = ReplyDecoder(Limits())
    decoder.expect(into_arrays(arrays, seen))
    header = b"%1\r\n$4\r\nrows\r\n*1\r\n$1\r\n7\r\n"  # its strings are the decoder's business
    bulk = b"$%d\r\n%b\r\n" % (large, b"L" * large)
    data = b">1\r\n$1\r\np\r\n*7\r\n" + header + b"$2\r\nab\r\n" + bulk
    data += b"$3\r\nxyz\r\n$-1\r\n" + bulk + b"$0\r\n\r\n" + b"$2\r\nzz\r\n"
    reply, after = replies_of(decoder, data, sizes)
    assert seen == [(0, 2), (1, large), (2, 3), (3, large), (4, 0)]
    assert reply[:2] == [{"rows": [b"7"]}, b"ab"]
    for place, index in ((2, 1), (3, 2), (6, 4)):
        assert reply[place].obj is arrays[index]
    assert arrays[1].tobytes() == b"L" * large
    assert arrays[2].tobytes() == b"xyz"
    assert reply[5] == b"L" * large
    assert after == b"zz"  # a sink is for one reply


def test_a_single_string_and_pipelined_sinks() -> None:
    decoder = ReplyDecoder(Limits())
    data = b"$3\r\nabc\r\n$3\r\ndef\r\n"
    decoder.get_buffer()[: len(data)] = data
    decoder.buffer_updated(len(data))
    for expected in (b"abc", b"def"):
        target = bytearray(3)
        decoder.expect(into_arrays({0: np.frombuffer(target, np.uint8)}, []))
        decoder.next_reply()
        assert target == expected
    assert decoder.next_reply() is INCOMPLETE


@pytest.mark.parametrize("nbytes", [5, BY_REFERENCE])
def test_memory_that_does_not_fit_is_refused(nbytes: int) -> None:
    floats = np.zeros(nbytes, np.float32)
    unfit = [
        np.zeros(nbytes - 1, np.uint8).data,
        np.zeros(nbytes + 1, np.uint8).data,
        np.zeros((1, nbytes), np.uint8).data,
        np.zeros(2 * nbytes, np.uint8)[::2].data,
        floats.data,
        memoryview(bytes(nbytes)),
    ]
    for view in unfit:
        decoder = ReplyDecoder(Limits())
        decoder.expect(lambda index, size, view=view: view)
        data = b"$%d\r\nabc" % nbytes
        decoder.get_buffer()[: len(data)] = data
        decoder.buffer_updated(len(data))
        for _ in range(2):  # the place in the stream is lost, so it stays refused
            with pytest.raises(PionError, match=rf"string 0 of the reply has {nbytes} bytes"):
                decoder.next_reply()
    assert not floats.any()
