"""Invariant: before AUTH a stranger can do nothing but log in, and can make the server hold nothing
but a few short arguments; after it the limits are everybody's.
"""

from __future__ import annotations

from typing import Any

import pytest

PASSWORD = "correct horse"
NOAUTH = b"-NOAUTH Authentication required.\r\n"
TOO_MUCH = b"-ERR Protocol error: unauthenticated"
LONG = b"x" * (16 * 1024)


@pytest.fixture
def locked(start_pion: Any, dial: Any) -> Any:
    """Connections to a server with a password: locked()."""
    server = start_pion("--requirepass", PASSWORD)
    return lambda: dial(server.port)


def test_before_auth(locked: Any) -> None:
    wire = locked()
    for words in (["PING"], ["GET", "k"], ["SET", LONG, LONG], ["SET", *"k" * 9], ["PION.STATS"]):
        wire.send(*words)
        wire.expect(NOAUTH)
    wire.send("AUTH", "wrong")
    wire.expect(b"-WRONGPASS invalid username-password pair or user is disabled.\r\n")
    wire.send("HELLO", 3)
    assert wire.line().startswith(b"-NOAUTH HELLO must be called")


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        (b"*11\r\n", b" multibulk length\r\n"),
        (b"*2\r\n$4\r\nAUTH\r\n$16385\r\n", b" bulk length\r\n"),
    ],
)
def test_too_much_before_auth_ends_it(locked: Any, request_: bytes, what: bytes) -> None:
    wire = locked()
    wire.write(request_)
    assert wire.rest() == TOO_MUCH + what


def test_auth_lifts_the_limits_for_what_is_already_in_the_pipeline(locked: Any) -> None:
    wire = locked()
    wire.write(
        wire.request("GET", "k")
        + wire.request("AUTH", PASSWORD)
        + wire.request("SET", "k", LONG + b"y")
        + wire.request("EXISTS", *["k"] * 100)
    )
    wire.expect(NOAUTH + b"+OK\r\n+OK\r\n:100\r\n")


def test_reset_brings_them_back(locked: Any) -> None:
    wire = locked()
    wire.write(
        wire.request("AUTH", "default", PASSWORD)
        + wire.request("PING")
        + wire.request("RESET")
        + wire.request("PING")
        + wire.request("EXISTS", *["k"] * 100)
    )
    assert (
        wire.rest() == b"+OK\r\n+PONG\r\n+RESET\r\n" + NOAUTH + TOO_MUCH + b" multibulk length\r\n"
    )


def test_hello_logs_in_as_well(locked: Any) -> None:
    wire = locked()
    wire.send("HELLO", 3, "AUTH", "default", PASSWORD)
    assert wire.line() == b"%7\r\n"


def test_one_connection_logs_in_for_itself_alone(locked: Any) -> None:
    one, other = locked(), locked()
    assert one.ask("AUTH", PASSWORD) == b"+OK\r\n"
    assert one.ask("PING") == b"+PONG\r\n"
    assert other.ask("PING") == NOAUTH
