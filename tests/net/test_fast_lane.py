"""Invariant: the binary lane is the same server: its passwords, limits, tenants and order hold
there too, bytes that are no frames end their own connection and nothing else, and where its port
is taken the server does without.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_server.client import Call, Client, PionError, WrongPass
from pion_server.errors import NoAuth, OutOfMemory
from pion_server.wire.fast_encode import encode_fast_request
from pion_server.wire.fast_replies import FastReplyDecoder
from pion_server.wire.limits import Limits
from pion_server.wire.replies import Incomplete

PASSWORD = "s3cret-fast"
SECONDS = 20.0


class Wire:
    """A connection to the binary lane; replies are compared as values."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self.socket = socket.create_connection((place.hostname, place.port), SECONDS)
        self._decoder = FastReplyDecoder(Limits())

    def send(self, *words: Any) -> None:
        for part in encode_fast_request(words):
            self.socket.sendall(part)

    def reply(self) -> Any:
        """The next reply. Raises EOFError where the server closes instead."""
        while isinstance(reply := self._decoder.next_reply(), Incomplete):
            nbytes = self.socket.recv_into(self._decoder.get_buffer())
            if not nbytes:
                raise EOFError("closed")
            self._decoder.buffer_updated(nbytes)
        return reply

    def ask(self, *words: Any) -> Any:
        self.send(*words)
        return self.reply()

    def ends_with(self, words: str) -> None:
        """One more reply, an error, and then the end."""
        with pytest.raises(PionError, match=words):
            raise self.reply()
        with pytest.raises(EOFError):
            self.reply()


@pytest.fixture
def fast() -> Iterator[Callable[[Any], Wire]]:
    """Opens connections: fast(server)."""
    wires: list[Wire] = []

    def dial(server: Any) -> Wire:
        wires.append(Wire(server.urls["fast"]))
        return wires[-1]

    yield dial
    for wire in wires:
        wire.socket.close()


def refusal(reply: Any) -> type[PionError]:
    assert isinstance(reply, PionError)
    return type(reply)


def test_replies_come_in_the_order_of_requests(pion_server: Any, fast: Any) -> None:
    wire = fast(pion_server)
    rows = os.urandom(4 * 5_000)
    wire.send("V.CREATE", "fast-order", 4, "VQUANT", "fp16")
    for _ in range(50):  # some take a thread, others do not
        wire.send("V.STOREBATCH", "fast-order", 0, 0, 1_250, rows, "FMT", "FP32")
        wire.send("ECHO", rows)
        wire.send("V.FETCH", "fast-order", 0, "RANGE", 0, 1_250)
        wire.send("PING")
        wire.send("NO.SUCH", "thing")
    assert wire.reply().text == "OK"
    for _ in range(50):
        assert wire.reply().text == "OK"
        assert bytes(wire.reply()) == rows
        assert len(wire.reply()) == len(rows)
        assert wire.reply().text == "PONG"
        assert refusal(wire.reply()) is PionError


def test_before_auth(start_pion: Any, fast: Any) -> None:
    server = start_pion("--requirepass", PASSWORD)
    wire = fast(server)
    assert refusal(wire.ask("PING")) is NoAuth
    assert refusal(wire.ask("V.FETCH", "s", 0, 0)) is NoAuth
    assert refusal(wire.ask("AUTH", "wrong")) is WrongPass
    wire.send("AUTH", *["x"] * 11)
    wire.ends_with("unauthenticated count of arguments")
    wire = fast(server)
    wire.send("SET", "k", "x" * (16 * 1024 + 1))
    wire.ends_with("unauthenticated length of an argument")
    wire = fast(server)
    wire.send("AUTH", PASSWORD)
    wire.send("SET", "k", "x" * 100_000)  # in the same pipeline
    assert [wire.reply().text, wire.reply().text] == ["OK", "OK"]
    with Client(server.urls["fast"].replace("://", f"://:{PASSWORD}@")) as client:
        assert len(client.get("k")) == 100_000
    with Client(server.urls["fast"]) as client, pytest.raises(NoAuth):
        client.ping()


def test_tenants_and_quotas(start_pion: Any) -> None:
    server = start_pion("--tenant", "ann:anns-secret:1mb", "--tenant", "bob:bobs-secret:1mb")
    urls = [server.urls["fast"].replace("://", f"://{login}@") for login in
            ("ann:anns-secret", "bob:bobs-secret")]  # fmt: skip
    with Client(urls[0]) as ann, Client(urls[1]) as bob:
        ann.set("k", b"hers")
        assert bob.get("k") is None
        with pytest.raises(OutOfMemory):
            bob.set("large", bytes(2_000_000))
        assert ann.get("k") == b"hers"


def header(
    magic: int = 0xCA5E, version: int = 1, number: int = 1, count: int = 0, body: int = 0
) -> bytes:
    return struct.pack("<HBBIQ", magic, version, number, count, body)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"*1\r\n$4\r\nPING\r\n**", "no frame of the binary lane"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "no frame of the binary lane"),
        (header(magic=0x5ECA), "no frame of the binary lane"),
        (header(version=9), "version 9 of the binary lane"),
        (header(number=0), "a request without a name"),
        (header(count=1, body=8) + struct.pack("<Q", 1), "do not add up"),
        (header(count=1 << 31), "invalid count of arguments"),
    ],
)  # fmt: skip
def test_what_is_no_frame_is_told_so(pion_server: Any, fast: Any, data: bytes, words: str) -> None:
    wire = fast(pion_server)
    wire.send("PING")
    wire.socket.sendall(data)
    assert wire.reply().text == "PONG"
    wire.ends_with(words)
    assert fast(pion_server).ask("PING").text == "PONG"


def test_an_unknown_number_leaves_the_connection(pion_server: Any, fast: Any) -> None:
    wire = fast(pion_server)
    wire.socket.sendall(header(number=0xEE))
    error = wire.reply()
    assert refusal(error) is PionError
    assert "unknown command '0xEE'" in str(error)
    assert wire.ask("PING").text == "PONG"


def test_a_declared_length_takes_no_memory(pion_server: Any, fast: Any, resident: Any) -> None:
    before = resident(pion_server.pid)
    lengths = struct.pack("<2Q", 1, 3 << 30)
    for _ in range(20):
        wire = fast(pion_server)
        wire.socket.sendall(header(0xCA5E, 1, 0, 2, len(lengths) + (3 << 30) + 1) + lengths + b"x")
    assert fast(pion_server).ask("PING").text == "PONG"
    assert resident(pion_server.pid) - before < 64 << 20


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_noise_ends_its_own_connection_alone(pion_server: Any, noise: bytes, framed: bool) -> None:
    wire = Wire(pion_server.urls["fast"])
    with wire.socket:
        wire.socket.sendall(header(number=0, count=2, body=len(noise)) * framed + noise)
        wire.socket.shutdown(socket.SHUT_WR)
        with contextlib.suppress(EOFError):
            for _ in range(100):
                wire.reply()
            pytest.fail("the server did not close")
    with Client(pion_server.urls["fast"]) as client:
        assert client.ping() == "PONG"


# -- its port -------------------------------------------------------------------------------------


def two_ports() -> int:
    """The first of two, both free a moment ago."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            first: int = probe.getsockname()[1]
        try:
            for port in (first, first + 1):
                socket.create_server(("127.0.0.1", port)).close()
        except (OSError, OverflowError):
            continue
        return first


def test_it_is_on_the_next_port_and_found_by_asking(start_pion: Any) -> None:
    first = two_ports()
    server = start_pion("--port", str(first))
    with Client(f"pion+fast://127.0.0.1:{first + 1}") as client:
        assert client.info("server")["fast_port"] == str(first + 1)
        (only,) = client.pion_workers()
    assert (only.port, only.fast_port, only.unixsocket) == (first, first + 1, "")
    assert server.urls["fast"].endswith(f":{first + 1}")


def test_a_taken_port_is_a_warning_and_no_lane(start_pion: Any) -> None:
    first = two_ports()
    with socket.create_server(("127.0.0.1", first + 1)):
        server = start_pion("--port", str(first))
        with Client(server.url) as client:
            assert client.pion_workers()[0].fast_port == 0
    warnings = re.findall(r"WARNING (.*)", server.log.read_text())
    (about,) = [each for each in warnings if "binary lane" in each]
    taken = f"there is no binary lane: cannot listen on 127.0.0.1:{first + 1}: Address already in"
    assert about.startswith(taken)


def test_it_can_be_switched_off(start_pion: Any, tmp_path: Path) -> None:
    server = start_pion("--no-fast-lane")
    assert "binary lane" not in server.log.read_text()
    with Client(server.url) as client:
        assert client.execute(Call(("PION.WORKERS",), lambda reply: reply[0]["fast_port"])) == 0
