"""Invariant: no bytes from a peer do more than end their own connection, on either side.

Frames are real ones with damage: a byte changed, cut out, doubled, or the rest cut off. The server
must go on serving others, and the client must raise one of its own errors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pion_server.client import Client
from pion_server.errors import PionError, ProtocolError
from pion_server.wire.encode import encode_reply, encode_request
from pion_server.wire.limits import Limits
from pion_server.wire.replies import Incomplete, ReplyDecoder
from pion_server.wire.requests import RequestDecoder
from pion_server.wire.values import OK, Reply

REQUESTS: list[list[Any]] = [
    [b"PING"],
    [b"SET", b"key", b"v" * 300, b"EX", b"100"],
    [b"KV.PREFIX.REGISTER", b"ns", b"4", b"fp16", b"LAYERS", b"1", b"TOKENS", b"2"],
    [b"KV.PREFIX.STORE", b"ns", b"0", b"2", b"FMT", b"NATIVE", b"DATA", b"k" * 16, b"v" * 16],
    [b"KV.PREFIX.FETCH", b"ns", b"FMT", b"NATIVE"],
    [b"V.STOREBATCH", b"ns_pk", b"0", b"0", b"2", b"x" * 32],
    [b"SSM.PREFIX.STORE", b"ns", b"0", b"s" * 20_000],
]
REPLIES: list[Reply] = [
    OK,
    b"bulk" * 30,
    b"x" * 20_000,
    [1, None, [b"a", True], {"k": 1.5}],
    PionError("no"),
    {"tokens": 2, "keys": ["fmt=fp16,dim=4"]},
]


def damaged(frame: bytes, chance: random.Random) -> bytes:
    """The frame with one to three wounds."""
    data = bytearray(frame)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(data)) if data else 0
        wound = chance.randrange(4)
        if wound == 0 and data:
            data[at] = chance.choice(b"\r\n$*:+-0123456789%,#_\x00\xff")
        elif wound == 1:
            del data[at : at + chance.randint(1, 4)]
        elif wound == 2:
            data[at:at] = data[at : at + chance.randint(1, 20)]
        else:
            del data[at:]
    return bytes(data)


def frames(of: list[bytes], count: int, seed: int) -> Iterator[bytes]:
    chance = random.Random(seed)
    for _ in range(count):
        yield damaged(chance.choice(of), chance)


def requests() -> list[bytes]:
    return [b"".join(map(bytes, encode_request(args))) for args in REQUESTS]


def replies() -> list[bytes]:
    return [b"".join(map(bytes, encode_reply(each, proto))) for each in REPLIES for proto in (2, 3)]


def feed(decoder: RequestDecoder | ReplyDecoder, data: bytes, take: Callable[[], bool]) -> None:
    """All of `data` into a decoder, and out of it what it makes of them."""
    while data:
        room = decoder.get_buffer()
        count = min(len(room), len(data))
        room[:count], data = data[:count], data[count:]
        decoder.buffer_updated(count)
        try:
            while take():
                pass
        except ProtocolError:
            return


def fuzz_decoders(count: int) -> None:
    for frame in frames(requests(), count, seed=1):
        decoder = RequestDecoder(Limits())
        feed(decoder, frame, lambda decoder=decoder: decoder.next_request() is not None)
    for frame in frames(replies(), count, seed=2):
        reader = ReplyDecoder(Limits())
        feed(
            reader,
            frame,
            lambda reader=reader: not isinstance(reader.next_reply(), Incomplete),
        )


def fuzz_server(server: Any, connect: Callable[[], Any], count: int) -> None:
    """Damaged requests over real sockets, some on one connection for as long as that lives."""
    batch: list[bytes] = []
    with Client(server.url) as witness:
        witness.set("witness", b"untouched")
        for number, frame in enumerate(frames(requests(), count, seed=3)):
            batch.append(frame)
            if len(batch) == 20:
                with connect() as sock:
                    sock.sendall(b"".join(batch))
                batch.clear()
            if number % 500 == 0:
                assert witness.get("witness") == b"untouched"
        assert witness.get("witness") == b"untouched"


@pytest.fixture
def connect(pion_server: Any) -> Callable[[], Any]:
    import socket

    return lambda: socket.create_connection((pion_server.host, pion_server.port), 10)


def test_decoders_survive_damaged_frames() -> None:
    fuzz_decoders(10_000)


def test_the_server_survives_damaged_frames(pion_server: Any, connect: Callable[[], Any]) -> None:
    fuzz_server(pion_server, connect, 4_000)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_million_damaged_frames(pion_server: Any, connect: Callable[[], Any]) -> None:
    fuzz_decoders(450_000)
    fuzz_server(pion_server, connect, 100_000)
