"""Invariant: whatever a server or a network does, a call ends within its deadline with its own
reply or an error, and a connection that may be out of step is never used again.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pion_server.client import (
    Call,
    Client,
    ConnectionFailed,
    DeadlineExceeded,
    OutOfMemory,
    PionError,
    ProtocolError,
    calls,
)

MB = 1 << 20


def answers(peer: Any) -> None:
    """A server that is well: PONG to everything, until the client leaves."""
    peer.greet()
    with contextlib.suppress(EOFError):
        while peer.request():
            peer.send(b"+PONG\r\n")


def hangs_after(*sent: bytes) -> Any:
    """Reads one request, sends so much of a reply, and nothing more."""

    def script(peer: Any) -> None:
        peer.greet()
        peer.request()
        for piece in sent:
            peer.send(piece)
        peer.closed_by_client()

    return script


HANGS = {
    "before the reply": (),
    "in the header": (b"$10",),
    "after the header": (b"$1048576\r\n",),
    "in the middle of a bulk": (b"$1048576\r\n", bytes(MB // 2)),
    "before the last byte": (b"$1048576\r\n", bytes(MB), b"\r"),
    "in an array": (b"*2\r\n$1\r\na\r\n",),
}


@pytest.mark.parametrize("sent", HANGS.values(), ids=HANGS)
def test_a_hanging_server(connect: Any, fake: Any, sent: tuple[bytes, ...]) -> None:
    server = fake(hangs_after(*sent), answers)
    client = connect(server.url)
    with pytest.raises(DeadlineExceeded, match=r"GET to 127.0.0.1:\d+: no complete .* 0.1 s"):
        client.execute(calls.get("k", into=np.empty(MB, np.uint8)), timeout=0.1)
    assert client.ping() == "PONG"
    assert server.accepted == 2


def test_a_server_that_accepts_and_says_nothing(connect: Any, fake: Any) -> None:
    server = fake(lambda peer: peer.closed_by_client())
    with pytest.raises(DeadlineExceeded, match="PING to"):
        connect(server.url, timeout=0.1).ping()


def test_a_server_that_reads_nothing(connect: Any, fake: Any) -> None:
    def deaf(peer: Any) -> None:
        peer.greet()
        held.wait(20)

    held = threading.Event()
    with pytest.raises(DeadlineExceeded, match="SET to"):
        connect(fake(deaf).url).execute(calls.set_("k", bytes(64 * MB)), timeout=0.2)
    held.set()


def test_a_slow_drip_is_fine_until_the_deadline(connect: Any, fake: Any) -> None:
    def drips(peer: Any) -> None:
        peer.greet()
        peer.request()
        for byte in b"$4\r\nslow\r\n":
            peer.send(bytes([byte]))
            time.sleep(0.002)
        peer.request()
        with contextlib.suppress(OSError):
            while True:
                peer.send(b"+")
                time.sleep(0.01)

    client = connect(fake(drips).url)
    assert client.get("k") == b"slow"
    with pytest.raises(DeadlineExceeded):
        client.execute(calls.get("k"), timeout=0.2)


# How a reply begins, and what then comes PIECES times: quicker to send than to read.
FLOODS = {
    "small items": (b"*1000\r\n", b"*10000\r\n" + b":1\r\n" * 10_000),
    "one large item": (b"$4000000000\r\n", bytes(MB)),
}
PIECES = 1000


@pytest.mark.parametrize("lane", ["plain", "tls"])
@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_flood_is_fine_until_the_deadline(
    connect: Any, fake: Any, certificates: Any, lane: str, flood: tuple[bytes, bytes]
) -> None:
    """There is always something to read, and the call ends all the same."""

    def floods(peer: Any) -> None:
        peer.greet()
        for _ in range(2):
            peer.request()
            peer.send(b"+PONG\r\n")
        peer.request()
        with contextlib.suppress(OSError):
            peer.send(header)
            for number in range(PIECES):
                peer.send(piece)
                sent.append(number)

    header, piece = flood
    sent: list[int] = []
    server = fake(floods, tls=certificates.serving() if lane == "tls" else None)
    url = server.url.replace("pion:", "pions:") + f"?ca={certificates.ca}"
    client = connect(url if lane == "tls" else server.url)
    assert [client.ping(), client.ping()] == ["PONG", "PONG"]  # it now expects quick answers
    with pytest.raises(DeadlineExceeded):
        client.execute(calls.get("k"), timeout=0.2)
    assert len(sent) < PIECES


def closes_after(*sent: bytes, reset: bool = False) -> Any:
    """Answers one request, then breaks in the reply to the next."""

    def script(peer: Any) -> None:
        peer.greet()
        peer.request()
        peer.send(b"+PONG\r\n")
        peer.request()
        for piece in sent:
            peer.send(piece)
        if reset:
            peer.reset()

    return script


BREAKS = {
    "closed": closes_after(),
    "reset": closes_after(reset=True),
    "closed in the header": closes_after(b"+PO"),
    "closed in a bulk": closes_after(b"$1048576\r\n", bytes(MB // 2)),
}


@pytest.mark.parametrize("breaks", BREAKS.values(), ids=BREAKS)
def test_a_safe_call_on_a_stale_connection_is_sent_once_more(
    connect: Any, fake: Any, breaks: Any
) -> None:
    server = fake(breaks, answers)
    client = connect(server.url)
    assert [client.ping(), client.ping()] == ["PONG", "PONG"]
    assert server.accepted == 2


@pytest.mark.parametrize("breaks", BREAKS.values(), ids=BREAKS)
def test_an_unsafe_call_is_never_sent_twice(connect: Any, fake: Any, breaks: Any) -> None:
    server = fake(breaks, answers)
    client = connect(server.url)
    client.ping()
    with pytest.raises(ConnectionFailed):
        client.set("k", "v", nx=True)
    assert server.accepted == 1
    assert client.ping() == "PONG"


def test_a_pipeline_with_an_unsafe_call_is_never_sent_twice(connect: Any, fake: Any) -> None:
    server = fake(closes_after(), answers)
    client = connect(server.url)
    client.ping()
    with pytest.raises(ConnectionFailed):
        client.pipeline([calls.ping(), calls.delete("k")])
    assert server.accepted == 1


def test_a_call_is_repeated_once_and_no_more(connect: Any, fake: Any) -> None:
    def closes(peer: Any) -> None:
        peer.greet()
        peer.request()

    server = fake(closes_after(), closes, answers)
    client = connect(server.url)
    client.ping()
    with pytest.raises(ConnectionFailed, match="closed the connection"):
        client.ping()
    assert server.accepted == 2


def test_a_connection_that_never_worked_is_not_tried_again(connect: Any, fake: Any) -> None:
    server = fake(lambda peer: peer.greet(), answers)
    client = connect(server.url)
    with pytest.raises(ConnectionFailed):
        client.ping()
    assert server.accepted == 1


def test_a_repeat_stays_within_the_deadline(connect: Any, fake: Any) -> None:
    server = fake(closes_after(), hangs_after())
    client = connect(server.url)
    client.ping()
    with pytest.raises(DeadlineExceeded):
        client.execute(calls.ping(), timeout=0.2)
    assert server.accepted == 2


def test_even_an_unsafe_call_passes_when_the_idle_connection_is_seen_to_be_closed(
    fake: Any,
) -> None:
    def leaves(peer: Any) -> None:
        peer.greet()
        peer.request()
        peer.send(b"+PONG\r\n")
        peer.sock.close()
        gone.set()

    def deletes(peer: Any) -> None:
        peer.greet()
        assert peer.request() == [b"DEL", b"k"]
        peer.send(b":1\r\n")

    gone = threading.Event()
    server = fake(leaves, deletes)
    with Client(server.url) as client:
        client.ping()
        gone.wait(20)
        assert client.delete("k") == 1
    assert server.accepted == 2


def test_a_repeated_fetch_lands_whole_in_the_callers_buffer(connect: Any, fake: Any) -> None:
    def fetches(peer: Any) -> None:
        peer.greet()
        peer.request()
        peer.send(b"$1048576\r\n" + b"\7" * MB + b"\r\n")
        peer.closed_by_client()

    half = closes_after(b"$1048576\r\n", b"\1" * (MB // 2))
    client = connect(fake(half, fetches).url)
    client.ping()
    into = np.zeros(MB, np.uint8)
    client.get("k", into=into)
    assert (into == 7).all()


GARBAGE = [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$-5\r\n", b"*1\r\n$x\r\n", b"$1\r\nab\r\n"]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_closes_the_connection(connect: Any, fake: Any, garbage: bytes) -> None:
    server = fake(hangs_after(garbage), answers)
    client = connect(server.url)
    with pytest.raises(ProtocolError):
        client.ping()
    assert client.ping() == "PONG"
    assert server.accepted == 2


def test_garbage_instead_of_a_handshake(connect: Any, fake: Any) -> None:
    def talks_http(peer: Any) -> None:
        peer.request()
        peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with pytest.raises(ProtocolError):
        connect(fake(talks_http).url).ping()


def test_push_frames_are_passed_over(connect: Any, fake: Any) -> None:
    pushed = b">2\r\n+message\r\n$3\r\nabc\r\n"
    client = connect(fake(hangs_after(pushed + b"$5\r\nva" + b"lue\r\n" + pushed)).url)
    into = np.zeros(5, np.uint8)
    client.get("k", into=into)
    assert into.tobytes() == b"value"


def test_a_reply_too_many_is_no_reply_to_the_next_call(connect: Any, fake: Any) -> None:
    server = fake(hangs_after(b"$5\r\nfirst\r\n$5\r\nextra\r\n"), answers)
    client = connect(server.url)
    with contextlib.suppress(ProtocolError):  # the blocking client meets it within the call
        assert client.get("k") == b"first"
    assert client.ping() == "PONG"
    assert server.accepted == 2


@pytest.mark.parametrize("ending", ["stays", "closes", "resets"])
def test_a_refusal_during_a_huge_upload_is_heard(connect: Any, fake: Any, ending: str) -> None:
    def refuses(peer: Any) -> None:
        peer.greet()
        peer.sock.recv(1000)
        peer.send(b"-OOM too large for this server\r\n")
        if ending == "stays":
            heard.wait(20)
            peer.closed_by_client()
        elif ending == "closes":  # in order: all that was sent is read, the reply is delivered
            peer.sock.shutdown(socket.SHUT_WR)
            peer.closed_by_client()
        else:
            time.sleep(0.05)  # the reply is there before the RST
            peer.reset()

    heard = threading.Event()
    server = fake(refuses, answers)
    client = connect(server.url)
    with pytest.raises(OutOfMemory, match="too large"):
        client.set("k", bytes(64 * MB))
    heard.set()
    assert client.ping() == "PONG"
    assert server.accepted == 2


def test_a_sink_that_fails_fails_its_call_and_nothing_else(connect: Any, fake: Any) -> None:
    server = fake(hangs_after(b"$5\r\nvalue\r\n"), answers)
    client = connect(server.url)

    def broken(index: int, nbytes: int) -> memoryview:
        raise ZeroDivisionError("of the caller")

    with pytest.raises(ZeroDivisionError, match="of the caller"):
        client.execute(Call(("GET", "k"), lambda reply: reply, sink=broken))
    assert client.ping() == "PONG"
    assert server.accepted == 2


def test_a_port_where_nobody_listens(connect: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(ConnectionFailed, match=f"cannot reach 127.0.0.1:{port}: .*refused"):
        connect(f"pion://127.0.0.1:{port}").ping()


def test_a_host_that_has_no_address(connect: Any, monkeypatch: Any) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConnectionFailed, match=r"cannot find no-such-host:7: .*not known"):
        connect("pion://no-such-host:7").ping()


def test_a_name_server_that_hangs(connect: Any, monkeypatch: Any) -> None:
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(20) and [])
    with pytest.raises(DeadlineExceeded, match="PING to slow-host:7"):
        connect("pion://slow-host:7", timeout=0.1).ping()
    answered.set()


@pytest.fixture(params=["refuses", "swallows"])
def dead_end(request: Any) -> Iterator[tuple[str, int]]:
    """An address that refuses connections, or one that never answers: its backlog is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listener.getsockname()
        if request.param == "refuses":
            listener.close()
        else:
            with contextlib.suppress(TimeoutError):
                while True:
                    stack.enter_context(socket.create_connection(address, timeout=0.1))
        yield address


def test_the_next_address_is_tried(
    connect: Any, fake: Any, monkeypatch: Any, dead_end: tuple[str, int]
) -> None:
    server = fake(answers)
    somebody = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    row = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    found = [(*row, dead_end), (*row, somebody)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert connect("pion://two-addresses", timeout=1.0).ping() == "PONG"


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_timeout_that_is_none(connect: Any, fake: Any, timeout: float) -> None:
    with pytest.raises(PionError, match="seconds above 0"):
        connect(fake().url).execute(calls.ping(), timeout=timeout)


def test_a_closed_client_stays_closed(connect: Any, fake: Any) -> None:
    client = connect(fake(answers).url)
    client.ping()
    client.close()
    client.close()
    with pytest.raises(ConnectionFailed, match="this client is closed"):
        client.ping()
