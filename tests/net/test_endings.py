"""Invariant: whoever ends a conversation, what was asked for before is answered in full, and what
came after it is not carried out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest

from pion_server.client import calls
from pion_server.wire.encode import encode_request

MB = 1 << 20
LARGE = b"x" * (8 * MB)
PROTOCOL_ERROR = b"-ERR Protocol error: "


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


@pytest.fixture
def large(wire: Any) -> bytes:
    """The reply to GET large: 8 MB."""
    assert wire.ask("SET", "large", LARGE) == b"+OK\r\n"
    return bulk(LARGE)


def test_a_client_that_stops_sending_still_gets_its_replies(wire: Any, large: bytes) -> None:
    wire.write(wire.request("GET", "large") * 5 + wire.request("PING"))
    wire.half_close()
    assert wire.rest() == large * 5 + b"+PONG\r\n"


def test_it_also_gets_the_reply_to_a_write_that_is_being_converted(wire: Any) -> None:
    blob = np.zeros(4 * MB, np.float32).tobytes()
    wire.write(wire.request("V.CREATE", "half", 4096))
    wire.write(wire.request("V.STOREBATCH", "half", 0, 0, 1024, blob) + wire.request("PING"))
    wire.half_close()
    assert wire.rest() == b"+OK\r\n+OK\r\n+PONG\r\n"


def test_half_a_request_at_the_end_is_dropped(wire: Any) -> None:
    whole = wire.request("SET", "cut-off", "v")
    wire.write(wire.request("DEL", "cut-off") + b"PING\r\n" + whole[:-1])
    wire.half_close()
    assert wire.rest() in (b":0\r\n+PONG\r\n", b":1\r\n+PONG\r\n")


def test_quit_is_the_last_command(wire: Any, large: bytes, pion_server: Any, dial: Any) -> None:
    wire.write(
        wire.request("DEL", "behind")
        + wire.request("GET", "large")
        + wire.request("QUIT")
        + wire.request("SET", "behind", "v")
    )
    assert wire.rest()[-len(large) - 5 :] == large + b"+OK\r\n"
    assert dial(pion_server.port).ask("EXISTS", "behind") == b":0\r\n"


@pytest.mark.parametrize(
    ("junk", "error"),
    [
        (b"*x\r\n", b"invalid multibulk length"),
        (b"*1048577\r\n", b"invalid multibulk length"),
        (b"*1\r\n+PING\r\n", b"expected '$', got '+'"),
        (b"*1\r\n$-1\r\n", b"invalid bulk length"),
        (b"*1\r\n$4294967297\r\n", b"invalid bulk length"),
        (b"*1\r\n$4\r\nPINGxx", b"expected CRLF after a bulk"),
        (b"ECHO 'x\r\n", b"unbalanced quotes in request"),
        (b"x" * 70_000, b"too big inline request"),
        (b"*" + b"1" * 70_000, b"too big mbulk count string"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_bytes_that_are_no_request_are_answered_and_end_it(
    wire: Any, large: bytes, pion_server: Any, dial: Any, junk: bytes, error: bytes
) -> None:
    """Behind what is owed, and in front of nothing."""
    behind = b"" if junk.startswith((b"x", b"*1111")) else wire.request("SET", "behind", "v")
    wire.write(wire.request("DEL", "behind") + wire.request("GET", "large") + junk + behind)
    wire.line()
    assert wire.rest() == large + PROTOCOL_ERROR + error + b"\r\n"
    assert dial(pion_server.port).ask("EXISTS", "behind") == b":0\r\n"


def test_a_browser_that_is_made_to_post_here_has_no_command_carried_out(
    wire: Any, pion_server: Any, dial: Any
) -> None:
    """Any page may send such a request to a loopback port, and choose its body."""
    other = dial(pion_server.port)
    other.ask("SET", "precious", "v")
    for verb in (b"POST", b"GET", b"DELETE", b"OPTIONS"):
        http = dial(pion_server.port)
        head = verb + b" / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\n\r\n"
        http.write(head + b"DEL precious\r\n")  # what comes after the close would be a reset
        assert http.rest().endswith(PROTOCOL_ERROR + b"this is HTTP, not RESP\r\n")
    assert other.ask("EXISTS", "precious") == b":1\r\n"


def test_clients_that_are_gone_are_forgotten(
    pion_server: Any, dial: Any, eventually: Callable[..., None]
) -> None:
    other = dial(pion_server.port)

    def clients() -> int:
        other.send("CLIENT", "LIST")
        text = other.take(int(other.line()[1:]) + 2)
        return int(text.count(b"id="))

    before = clients()
    wires = [dial(pion_server.port) for _ in range(30)]
    for wire in wires:
        assert wire.ask("PING") == b"+PONG\r\n"
    assert clients() == before + 30
    for i, wire in enumerate(wires):
        (wire.close, wire.reset, wire.half_close)[i % 3]()
    eventually(lambda: clients() == before)


def test_waiting_for_a_reader_takes_no_cpu(
    pion_server: Any, dial: Any, wire: Any, large: bytes
) -> None:
    """With more replies due than may wait, and requests that came in besides."""
    wire.write(wire.request("GET", "large") * 3000)
    other = dial(pion_server.port)
    assert other.ask("PING") == b"+PONG\r\n"
    time.sleep(0.2)
    before = psutil.Process(pion_server.pid).cpu_times()
    time.sleep(0.5)
    after = psutil.Process(pion_server.pid).cpu_times()
    assert after.user + after.system - before.user - before.system < 0.2
    assert other.ask("PING") == b"+PONG\r\n"
    wire.reset()


@pytest.mark.parametrize("lane", ["plain", "tls"])
def test_what_a_client_that_is_gone_asked_for_ends_quietly(
    start_pion: Any, certificates: Any, dial: Any, lane: str
) -> None:
    """An answer that is late finds nobody, and that is no error (see finish_pion)."""
    encrypted = lane == "tls"
    server = start_pion(*(certificates.options if encrypted else []))
    tls = certificates.trusting() if encrypted else None
    rows = np.ones((8, 4096, 64), np.float32)
    asked = b"".join(encode_request(calls.attend_querybatch(rows[:, :1], rows, rows).args))
    other = dial(server.port, tls)
    for end in ("close", "reset", "half_close") * 3:
        wire = dial(server.port, tls)
        wire.write(asked)
        getattr(wire, end)()
        assert other.ask("PING") == b"+PONG\r\n"
