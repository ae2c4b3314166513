"""Invariant: over TLS everything is as without it; a TLS port tells nothing to who speaks no TLS;
and a client talks to the server that its authority vouches for, or not at all.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import uvloop
from cryptography.hazmat.primitives import serialization

from pion_server.__main__ import main
from pion_server.client import AsyncClient, Client, ConnectionFailed, DeadlineExceeded, PionError
from pion_server.client.conversation import DOOR
from pion_server.client.tls import RECEIVE_MAX, client_context

LARGE = os.urandom(1 << 20) * 100
LOOPS = {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def tls_port(start_pion: Any, certificates: Any) -> int:
    return int(start_pion(*certificates.options).port)


@pytest.fixture(params=["blocking", *LOOPS])
def call(request: pytest.FixtureRequest) -> Any:
    """call(url, work): `work` with a client of either kind; each step of it is a method's name and
    its arguments."""

    def run(url: str, *steps: tuple[Any, ...], timeout: float = 20) -> list[Any]:
        if request.param == "blocking":
            with Client(url, timeout=timeout) as client:
                return [getattr(client, name)(*args) for name, *args in steps]

        async def awaited() -> list[Any]:
            async with AsyncClient(url, timeout=timeout) as client:
                return [await getattr(client, name)(*args) for name, *args in steps]

        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            return runner.run(awaited())

    return run


def test_large_payloads_come_back_as_they_were(call: Any, tls_port: int, certificates: Any) -> None:
    url = f"pions://127.0.0.1:{tls_port}?ca={certificates.ca}"
    _, got, _, small = call(url, ("set", "k", LARGE), ("get", "k"), ("set", "s", b""), ("get", "s"))
    assert bytes(got) == LARGE
    assert small == b""


def test_a_receiving_call_comes_back_however_much_there_is(
    tls_port: int, certificates: Any
) -> None:
    with Client(f"pions://127.0.0.1:{tls_port}?ca={certificates.ca}") as client:
        client.set("k", LARGE)
    head = b"$%d\r\n" % len(LARGE)
    reply, taken = bytearray(len(head) + len(LARGE) + 2), [0]
    with socket.create_connection(("127.0.0.1", tls_port), 20) as raw:
        context = client_context(str(certificates.ca), None, None)
        with context.wrap_socket(raw, server_hostname="localhost") as sock:
            sock.sendall(b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n")
            while taken[-1] < len(reply):
                taken.append(taken[-1] + sock.recv_into(memoryview(reply)[taken[-1] :]))
    assert reply == head + LARGE + b"\r\n"
    assert max(after - before for before, after in pairwise(taken)) <= RECEIVE_MAX


def test_the_binary_lane_speaks_it_and_a_unix_socket_does_not(
    call: Any, start_pion: Any, certificates: Any
) -> None:
    with tempfile.TemporaryDirectory(prefix="pion-") as folder:
        urls = start_pion(*certificates.options, "--unixsocket", f"{folder}/socket").urls
        fast = urls["fast"].replace("pion+fast", "pions+fast") + f"?ca={certificates.ca}"
        for url in (fast, urls["unix"]):
            _, got = call(url, ("set", "k", LARGE), ("get", "k"))
            assert bytes(got) == LARGE
        with pytest.raises(PionError):
            call(urls["fast"], ("ping",), timeout=2)


def test_redis_clients_too(tls_port: int, certificates: Any) -> None:
    with redis.Redis(port=tls_port, ssl=True, ssl_ca_certs=str(certificates.ca)) as client:
        client.set("k", LARGE)
        assert client.get("k") == LARGE
        pipe = client.pipeline(transaction=False)
        for number in range(5000):
            pipe.set(f"k{number}", number)
        assert pipe.execute() == [True] * 5000
        assert client.dbsize() == 5001


def test_user_and_password_go_with_it(call: Any, two_tenants: Any, certificates: Any) -> None:
    port = two_tenants(*certificates.options).port
    for who in ("alice:alices-s3cret", "bob:bobs-s3cret"):
        url = f"pions://{who}@localhost:{port}/3?ca={certificates.ca}"
        assert call(url, ("dbsize",), ("set", "k", who), ("get", "k"))[::2] == [0, who.encode()]


# -- whom a client believes -----------------------------------------------------------------------


def test_a_server_that_nobody_vouches_for(call: Any, tls_port: int, certificates: Any) -> None:
    for trust in ("", f"?ca={certificates.other_ca}"):
        with pytest.raises(ConnectionFailed, match="certificate is refused"):
            call(f"pions://127.0.0.1:{tls_port}{trust}", ("ping",))


def test_a_certificate_of_another_host(call: Any, start_pion: Any, certificates: Any) -> None:
    theirs = ["--tls-cert", certificates.client_cert, "--tls-key", certificates.client_key]
    port = start_pion(*map(str, theirs)).port
    for host in ("127.0.0.1", "localhost"):
        with pytest.raises(ConnectionFailed, match="mismatch"):
            call(f"pions://{host}:{port}?ca={certificates.ca}", ("ping",))


def test_a_server_without_tls(call: Any, pion_server: Any, certificates: Any) -> None:
    with pytest.raises(ConnectionFailed):
        call(f"pions://127.0.0.1:{pion_server.port}?ca={certificates.ca}", ("ping",))


def test_a_server_that_says_nothing(call: Any, certificates: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"pions://127.0.0.1:{silent.getsockname()[1]}?ca={certificates.ca}"
        with pytest.raises(DeadlineExceeded):
            call(url, ("ping",), timeout=0.3)


def test_a_connection_that_breaks_is_replaced(start_pion: Any, certificates: Any) -> None:
    port = start_pion(*certificates.options).port
    with Client(f"pions://localhost:{port}?ca={certificates.ca}") as client:
        client.set("k", "v")
        for _ in range(3):
            with redis.Redis(port=port, ssl=True, ssl_ca_certs=str(certificates.ca)) as other:
                assert other.info("clients")["connected_clients"] == 2
            client._links[DOOR]._socket.shutdown(socket.SHUT_RDWR)
            assert client.get("k") == b"v"


# -- whom a server believes -----------------------------------------------------------------------


def test_clients_have_to_show_a_certificate(call: Any, start_pion: Any, certificates: Any) -> None:
    port = start_pion(*certificates.options, "--tls-ca", str(certificates.ca)).port
    url = f"pions://localhost:{port}?ca={certificates.ca}"
    mine = f"&cert={certificates.client_cert}&key={certificates.client_key}"
    assert call(url + mine, ("ping",)) == ["PONG"]
    with pytest.raises(ConnectionFailed):
        call(url, ("ping",))


def test_a_plain_client_is_closed_and_told_nothing(tls_port: int, certificates: Any) -> None:
    for said in (b"PING\r\n", b"*1\r\n$4\r\nPING\r\n", b"\0" * 1000, b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", tls_port), 20) as sock:
            sock.sendall(said)
            heard = b""
            try:
                while more := sock.recv(1000):
                    heard += more
            except ConnectionResetError:
                pass
            assert b"PONG" not in heard
            assert len(heard) < 10  # at most an alert
    with pytest.raises(ConnectionFailed):
        Client(f"pion://127.0.0.1:{tls_port}").ping()
    assert Client(f"pions://localhost:{tls_port}?ca={certificates.ca}").ping() == "PONG"


def test_nothing_before_the_handshake_is_a_request(tls_port: int, certificates: Any) -> None:
    """Else someone in between could put commands before those of the client."""
    with socket.create_connection(("127.0.0.1", tls_port), 20) as sock:
        sock.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\nv\r\n")
        with pytest.raises(OSError):  # noqa: PT011 - in whatever way
            certificates.trusting().wrap_socket(sock, server_hostname="localhost")
    assert Client(f"pions://localhost:{tls_port}?ca={certificates.ca}").dbsize() == 0


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_old_versions_are_not_spoken(tls_port: int, certificates: Any) -> None:
    old = certificates.trusting()
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = ssl.TLSVersion.TLSv1
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", tls_port), 20) as sock,
        pytest.raises(ssl.SSLError),
    ):
        old.wrap_socket(sock, server_hostname="localhost")


# -- what it costs --------------------------------------------------------------------------------


def test_slow_readers_cost_no_memory(start_pion: Any, dial: Any, certificates: Any) -> None:
    server = start_pion(*certificates.options)
    tls = certificates.trusting()
    writer = dial(server.port, tls=tls)
    assert writer.ask("SET", "k", LARGE) == b"+OK\r\n"
    process = psutil.Process(server.pid)
    before = process.memory_info().rss
    slow = [dial(server.port, tls=tls) for _ in range(10)]
    for raw in slow:
        raw.send("GET", "k")
        assert raw.socket.recv(1) == b"$"
    assert writer.ask("PING") == b"+PONG\r\n"
    # Each holds what waits for the kernel: about 4 MB, and once more encrypted.
    assert process.memory_info().rss - before < 10 * (16 << 20)
    rest = slow[0]
    size = b"%d\r\n" % len(LARGE)
    assert rest._file.read(len(size)) == size
    assert rest._file.read(len(LARGE)) == LARGE


# -- files ----------------------------------------------------------------------------------------


def test_files_that_cannot_be_used(certificates: Any, tmp_path: Path, capsys: Any) -> None:
    encrypted = tmp_path / "encrypted.pem"
    encrypted.write_bytes(locked_key(certificates.key))
    wrong = {
        "absent": ["--tls-cert", str(tmp_path / "none"), "--tls-key", str(certificates.key)],
        "no pair": [
            "--tls-cert",
            str(certificates.cert),
            "--tls-key",
            str(certificates.client_key),
        ],
        "encrypted": ["--tls-cert", str(certificates.cert), "--tls-key", str(encrypted)],
        "no authority": [*certificates.options, "--tls-ca", str(certificates.key)],
    }
    for case, options in wrong.items():
        assert main(["--port", "0", *options]) == 1, case
        assert "cannot use the files of --tls-cert" in capsys.readouterr().err, case
    for query in ("cert=/none", f"cert={certificates.cert}&key={encrypted}", "ca=/none"):
        with pytest.raises(PionError, match="the URL names a file that is of no use"):
            Client(f"pions://h?{query}")


def locked_key(path: Path) -> bytes:
    """A private key file, encrypted with a password."""
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )
