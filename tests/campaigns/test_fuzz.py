"""Invariant: no bytes from a peer do more than end their own connection, on either side and lane.

Frames are real ones with damage: a byte changed, cut out, doubled, or the rest cut off. A decoder
gives values or raises ProtocolError; a server goes on serving others; a client gives a value or
raises one of its own errors, and is good for the next call.
"""

from __future__ import annotations

import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest

from pion_server.client import Call, Client
from pion_server.errors import DeadlineExceeded, PionError, ProtocolError
from pion_server.wire.lanes import FAST, RESP, Lane
from pion_server.wire.limits import Limits
from pion_server.wire.replies import Incomplete
from pion_server.wire.values import OK, Reply

REQUESTS: list[list[Any]] = [
    ["PING"],
    ["SET", b"key", b"v" * 300, b"EX", b"100"],
    ["KV.PREFIX.REGISTER", b"ns", b"4", b"fp16", b"LAYERS", b"1", b"TOKENS", b"2"],
    ["KV.PREFIX.STORE", b"ns", b"0", b"2", b"FMT", b"NATIVE", b"DATA", b"k" * 16, b"v" * 16],
    ["KV.PREFIX.FETCH", b"ns", b"FMT", b"NATIVE"],
    ["V.STOREBATCH", b"ns_pk", b"0", b"0", b"2", b"x" * 32],
    ["SSM.PREFIX.STORE", b"ns", b"0", b"s" * 20_000],
]
REPLIES: list[Reply] = [
    OK,
    b"bulk" * 30,
    b"x" * 20_000,
    [1, None, [b"a", True], {"k": 1.5}],
    PionError("no"),
    {"tokens": 2, "keys": ["fmt=fp16,dim=4"]},
]
LANES = pytest.mark.parametrize("lane", [RESP, FAST], ids=["resp", "fast"])
WOUND = b"\r\n$*:+-0123456789%,#_\x00\x01\x5e\xca\xff"
PING: Call[Any] = Call(["PING"], lambda reply: reply)


def damaged(frame: bytes, chance: random.Random) -> bytes:
    """The frame with one to three wounds."""
    data = bytearray(frame)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(data)) if data else 0
        wound = chance.randrange(4)
        if wound == 0 and data:
            data[at] = chance.choice(WOUND)
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


def requests(lane: Lane) -> list[bytes]:
    return [b"".join(map(bytes, lane.encode_request(words))) for words in REQUESTS]


def replies(lane: Lane) -> list[bytes]:
    return [
        b"".join(map(bytes, lane.encode_reply(each, proto))) for each in REPLIES for proto in (2, 3)
    ]


def feed(decoder: Any, data: bytes, take: Callable[[], bool]) -> None:
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


def fuzz_the_servers_decoder(lane: Lane, count: int) -> None:
    for frame in frames(requests(lane), count, seed=1):
        decoder = lane.requests(Limits())
        feed(decoder, frame, lambda decoder=decoder: decoder.next_request() is not None)


def fuzz_the_clients_decoder(lane: Lane, count: int) -> None:
    for frame in frames(replies(lane), count, seed=2):
        decoder = lane.replies(Limits())
        feed(
            decoder,
            frame,
            lambda decoder=decoder: not isinstance(decoder.next_reply(), Incomplete),
        )


def fuzz_server(server: Any, lane: Lane, count: int) -> None:
    """Damaged requests over real sockets, each on a connection of its own, which the server has to
    end once it has made of them what it can."""
    port = server.port if lane is RESP else fast_port(server)
    with Client(server.url) as witness:
        witness.set("witness", b"untouched")
        for number, frame in enumerate(frames(requests(lane), count, seed=3)):
            say(port, frame)
            if number % 500 == 0:
                assert witness.get("witness") == b"untouched"
        assert witness.get("witness") == b"untouched"


def fast_port(server: Any) -> int:
    found = re.search(r"binary lane on port (\d+)", server.log.read_text())
    assert found is not None
    return int(found[1])


def say(port: int, frame: bytes) -> None:
    """Send it, and wait until the server has closed."""
    with socket.create_connection(("127.0.0.1", port), 20) as sock:
        with suppress(ConnectionError):  # it may close with a part unread
            sock.sendall(frame)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
        # Without waiting in the system's tables, where there is room for some 28,000.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


class Liar(threading.Thread):
    """A server whose every reply is damaged; it closes behind each."""

    def __init__(self, lane: Lane, count: int) -> None:
        super().__init__(daemon=True)
        self._frames = frames(replies(lane), count, seed=4)
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self.told = 0

    def run(self) -> None:
        with closing(self._door):
            for frame in self._frames:
                sock, _ = self._door.accept()
                # A client that has seen enough may be gone.
                with sock, suppress(OSError):
                    sock.recv(1 << 16)
                    sock.sendall(frame)
                    sock.shutdown(socket.SHUT_WR)
                self.told += 1


def fuzz_client(lane: Lane, count: int) -> None:
    """Every call ends with a value or a PionError, at once, and so does the next."""
    liar = Liar(lane, count)
    liar.start()
    scheme = "pion+fast" if lane is FAST else "pion"
    with Client(f"{scheme}://127.0.0.1:{liar.port}", timeout=20) as client:
        while liar.is_alive():
            try:
                client.execute(PING)
            except DeadlineExceeded:
                raise  # it waited for what never comes
            except PionError:
                pass
    assert liar.told == count


@LANES
def test_decoders_survive_damaged_frames(lane: Lane) -> None:
    fuzz_the_servers_decoder(lane, 10_000)
    fuzz_the_clients_decoder(lane, 10_000)


@LANES
def test_the_server_survives_damaged_frames(pion_server: Any, lane: Lane) -> None:
    fuzz_server(pion_server, lane, 2_000)


@LANES
def test_the_client_survives_damaged_frames(lane: Lane) -> None:
    fuzz_client(lane, 300)


@pytest.mark.long
@pytest.mark.timeout(3600)
@LANES
def test_a_million_damaged_requests(pion_server: Any, lane: Lane) -> None:
    fuzz_the_servers_decoder(lane, 900_000)
    fuzz_server(pion_server, lane, 100_000)


@pytest.mark.long
@pytest.mark.timeout(3600)
@LANES
def test_a_million_damaged_replies(lane: Lane) -> None:
    fuzz_the_clients_decoder(lane, 990_000)
    fuzz_client(lane, 10_000)
