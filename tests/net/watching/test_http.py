"""Invariant: whatever comes in over HTTP, it is answered or dropped within its limits, the server
serves on, and nobody but this machine is told anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psutil
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pion_server.net import http
from pion_server.net.http import Answer, HttpEndpoint
from pion_server.net.watching import POLICY, RECEIPT

PATHS = ("/", "/stats.json", "/metrics", "/health")
LONG = 4 << 20


def send(port: int, data: bytes) -> bytes:
    """Everything that comes back, up to the end of the connection."""
    parts = []
    with socket.create_connection(("127.0.0.1", port), 60) as sock:
        with contextlib.suppress(OSError):  # it may be dropped before all is sent
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while part := sock.recv(1 << 16):
                parts.append(part)
    return b"".join(parts)


def status(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1])


@pytest.fixture(autouse=True)
def _it_serves_afterwards(watched: Any) -> Iterator[None]:
    yield
    assert watched.client().ping()
    assert watched.get("/health").status == 200


@pytest.mark.parametrize("path", PATHS)
def test_get_and_head(watched: Any, path: str) -> None:
    got, head = watched.get(path), watched.get(f"{path}?x=1", "HEAD")
    assert got.status == head.status == 200
    assert len(got.text) > 10
    assert head.text == ""
    for reply in (got, head):
        assert reply.headers["Connection"] == "close"
        assert reply.headers["Cache-Control"] == "no-store"
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in reply.headers


def test_the_page_is_pinned(watched: Any) -> None:
    reply = watched.get("/")
    assert reply.text == RECEIPT
    assert reply.headers["Content-Security-Policy"] == POLICY
    assert "default-src 'none'" in POLICY
    assert "unsafe" not in POLICY


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (b"GET /nope HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET http://localhost/health HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /../health HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /%68ealth HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nhi", 405),
        (b"DELETE / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"GET /health HTTP/1.0\r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health\r\n\r\n", 400),
        (b"GET  /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"*1\r\n$4\r\nPING\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (b"x" * LONG), 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: %b\r\n\r\n" % (b"x" * LONG), 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 100_000, 431),
    ],
    ids=lambda value: str(value[:40]) if isinstance(value, bytes) else str(value),
)
def test_odd_requests(watched: Any, request_bytes: bytes, expected: int) -> None:
    reply = send(watched.web_port, request_bytes)
    # Whoever goes on sending what nobody reads may be cut off before the answer.
    assert (reply == b"" and len(request_bytes) > http.MAX_HEAD) or status(reply) == expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", 200),
        ("LOCALHOST:9", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example:80", 421),
        ("evil.example@localhost.evil.example", 421),
        ("10.0.0.1", 421),
        ("0.0.0.0", 421),
        ("", 421),
        ("[", 421),
        (":", 421),
    ],
)
def test_other_names_of_this_machine_are_refused(watched: Any, host: str, expected: int) -> None:
    """A browser that was told that evil.example is 127.0.0.1 would let its pages read ours."""
    for path in PATHS:
        reply = watched.get(path, Host=host)
        assert reply.status == expected
        assert expected == 200 or reply.text == "ask for localhost or 127.0.0.1\n"


def listeners(pid: int) -> set[tuple[str, int]]:
    found = psutil.Process(pid).net_connections("tcp")
    return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}


def test_it_is_off_by_default_and_on_loopback_whatever_the_host(
    start_pion: Any, watch: Any
) -> None:
    alone = start_pion("--no-fast-lane")
    assert listeners(alone.pid) == {("127.0.0.1", alone.port)}
    watched = watch("--no-fast-lane", "--host", "0.0.0.0", "--requirepass", "secret-word")
    assert listeners(watched.server.pid) == {
        ("0.0.0.0", watched.server.port),
        ("127.0.0.1", watched.web_port),
    }


def test_a_port_that_is_taken_is_a_refusal_to_start(watched: Any) -> None:
    command = [sys.executable, "-m", "pion_server", "--port", "0"]
    port = str(watched.web_port)
    ended = subprocess.run(
        [*command, "--metrics-port", port], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port} for metrics" in ended.stderr


def test_what_the_server_is_told_is_in_no_page(watch: Any) -> None:
    """Names of tenants are; passwords and names of prefixes and keys are not."""
    watched = watch("--tenant", "ann:secret-of-ann", "--requirepass", "secret-of-all")
    client = watched.client("ann", "secret-of-ann")
    client.execute_command("KV.PREFIX.REGISTER", "name-of-a-prefix", 1, "fp32")
    client.set("name-of-a-key", "value-of-a-key")
    told = "".join(watched.get(path).text for path in PATHS)
    assert "ann" in told
    assert not [word for word in ("secret-of", "name-of", "value-of") if word in told]


LINES = (
    b"GET |HEAD |/metrics| HTTP/1.1| HTTP/9.9|\r\n|\n|\r|Host:|:| localhost|0|Expect: 100-continue"
    b"|Content-Length: 99999999999999999999|Transfer-Encoding: chunked|Upgrade: h2c|\0|\xff\xfe"
)
PIECES = st.sampled_from([*LINES.split(b"|"), b"A" * 9000])
JUNK = st.lists(st.one_of(PIECES, st.binary(max_size=40)), max_size=30).map(b"".join)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(junk=JUNK)
def test_junk(watched: Any, junk: bytes) -> None:
    """An answer or the end of the connection; the fixture looks at the server afterwards."""
    reply = send(watched.web_port, junk)
    assert reply == b"" or reply.startswith(b"HTTP/1.1 ")
    assert reply == b"" or status(reply) in {200, 400, 404, 405, 421, 431, 501}


# -- the endpoint by itself, so that its patience can be short -----------------------------------

BODY = b"x" * (16 << 20)


@pytest_asyncio.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """An endpoint with a small page, a large one and one that fails."""

    async def small(accept: str) -> Answer:
        return Answer(accept.encode())

    async def large(accept: str) -> Answer:
        return Answer(BODY)

    async def broken(accept: str) -> Answer:
        raise ZeroDivisionError

    monkeypatch.setattr(http, "SECONDS", 0.3)
    endpoint = HttpEndpoint({"/small": small, "/large": large, "/broken": broken})
    yield await endpoint.listen(0)
    endpoint.close()


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: this\r\n\r\n".encode()


async def ask(port: int, request_bytes: bytes) -> bytes:
    return await asyncio.to_thread(send, port, request_bytes)


async def test_who_says_nothing_is_dropped(port: int) -> None:
    for beginning in (b"", b"GET /small HTTP/1.1\r\nHost: loc"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(beginning)
        assert await reader.read() == b""
        writer.close()


async def test_who_reads_nothing_is_dropped(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
    writer.write(get("/large"))
    await asyncio.sleep(3 * http.SECONDS)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
        await reader.readexactly(len(BODY))
    writer.close()


async def test_a_large_page_arrives_whole(port: int) -> None:
    assert (await ask(port, get("/large"))).endswith(b"\r\n\r\n" + BODY)


async def test_connections_are_bounded(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than there may be is dropped; once the others are gone, there is room again."""
    monkeypatch.setattr(http, "SECONDS", 60)
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(http.MAX_CONNECTIONS)]
    assert await ask(port, get("/small")) == b""
    for reader, writer in idle:
        writer.write(get("/small"))
        assert (await reader.read()).endswith(b"\r\n\r\nthis")
        writer.close()
    assert status(await ask(port, get("/small"))) == 200


async def test_a_page_that_fails_is_logged(port: int, caplog: pytest.LogCaptureFixture) -> None:
    assert await ask(port, get("/broken")) == b""
    assert "ZeroDivisionError" in caplog.text
    assert status(await ask(port, get("/small"))) == 200
