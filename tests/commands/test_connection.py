"""Invariant: what a connection says about itself is what it is, and RESET takes all of it back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from pion_server.commands.registry import SUBCOMMANDS, TABLE
from pion_server.errors import NoAuth, PionError, WrongPass
from pion_server.store.keys import KEY_BYTES
from pion_server.wire.values import OK, Status


def fields(line: bytes) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.decode().split())


def test_client_info_shows_what_was_told(session: Any) -> None:
    session("HELLO", "3", "SETNAME", "engine-1")
    session("SELECT", "7")
    session("CLIENT", "SETINFO", "lib-name", "redis-py(x)")
    session("CLIENT", "SETINFO", "LIB-VER", "8.0")
    session("CLIENT", "NO-EVICT", "on")
    shown = fields(session("CLIENT", "INFO"))
    expected = {
        "id": "1",
        "addr": "127.0.0.1:5",
        "laddr": "127.0.0.1:1974",
        "name": "engine-1",
        "db": "7",
        "flags": "e",
        "cmd": "client|info",
        "resp": "3",
        "lib-name": "redis-py(x)",
        "lib-ver": "8.0",
    }
    assert expected.items() <= shown.items()
    assert fields(session("CLIENT", "LIST", "ID", "2", "1", "1"))["cmd"] == "client|list"
    assert session("CLIENT", "LIST", "TYPE", "replica") == b""


def test_reset_forgets_all_of_it(open_session: Callable[..., Any]) -> None:
    session = open_session(requirepass="s3cret")
    session("HELLO", "3", "AUTH", "default", "s3cret", "SETNAME", "me")
    session("SELECT", "7")
    session("CLIENT", "NO-EVICT", "on")
    assert session("RESET") == Status("RESET")
    assert isinstance(session("PING"), NoAuth)
    session("AUTH", "s3cret")
    shown = fields(session("CLIENT", "INFO"))
    assert (shown["name"], shown["db"], shown["resp"], shown["flags"]) == ("", "0", "2", "N")


@pytest.mark.parametrize("value", [b"a b", b"a\n", b"a\r\nid=9", b"\xff", b"\0", b"x" * 5000])
def test_nothing_that_would_break_a_line_is_taken(session: Any, value: bytes) -> None:
    for words in (
        ["CLIENT", "SETNAME", value],
        ["HELLO", "3", "SETNAME", value],
        ["CLIENT", "SETINFO", "lib-name", value],
        ["CLIENT", "SETINFO", "lib-ver", value],
    ):
        assert isinstance(session(*words), PionError)
    assert session("CLIENT", "LIST").count(b"\n") == 1
    assert session("CLIENT", "GETNAME") is None


def test_a_refused_hello_changes_no_protocol(session: Any) -> None:
    for words in (["4"], ["x"], ["3", "AUTH", "nobody", "x"], ["3", "FOO"], ["3", "SETNAME", " "]):
        assert isinstance(session("HELLO", *words), PionError)
    assert session.client.proto == 2


def test_a_failed_login_keeps_the_one_before(open_session: Callable[..., Any]) -> None:
    session = open_session(requirepass="пароль")
    assert isinstance(session("AUTH", "wrong"), WrongPass)
    assert isinstance(session("GET", "k"), NoAuth)
    assert session("AUTH", "пароль") == OK
    assert isinstance(session("AUTH", "wrong"), WrongPass)
    assert session("GET", "k") is None


def test_a_login_is_never_logged(
    open_session: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    session = open_session(requirepass="s3cret")
    with caplog.at_level(logging.DEBUG):
        session("AUTH", "s3cret-guess")
        session("AUTH", "s3cret")
        session("HELLO", "3", "AUTH", "default", "s3cret", "FOO")
    assert "s3cret" not in caplog.text
    assert b"s3cret" not in session("CLIENT", "LIST")


def test_subcommands_are_no_commands(session: Any) -> None:
    assert "unknown command" in str(session("CLIENT|ID", "x"))
    assert session("COMMAND", "COUNT") == len(TABLE)


@pytest.mark.parametrize("container", ["CLIENT", "COMMAND", "CONFIG"])
def test_help_lists_every_subcommand(session: Any, container: str) -> None:
    lines = [line.text for line in session(container, "help")]
    for name in SUBCOMMANDS:
        if name.startswith(f"{container}|"):
            word = name.partition("|")[2]
            assert any(line.startswith(word) for line in lines), name
    assert "unknown subcommand 'SET'. Try CONFIG HELP." in str(session("CONFIG", "SET", "a", "b"))


def headings(text: str) -> list[str]:
    return [line for line in text.split("\r\n") if line.startswith("#")]


def test_info_sections_can_be_chosen(session: Any) -> None:
    said = session("INFO", "REPLICATION")
    assert said == "# Replication\r\nrole:master\r\nconnected_slaves:0\r\n"
    assert session("INFO", "nothing") == ""
    assert headings(session("INFO", "pion", "Keyspace")) == ["# Keyspace", "# Pion"]
    every = headings(session("INFO"))
    assert len(every) == 7
    assert every == headings(session("INFO", "all")) == headings(session("INFO", "default", "pion"))
    session("SET", "k", b"v" * 99)
    assert f"used_memory:{KEY_BYTES + 100}\r\n" in session("INFO", "memory")
    assert "db0:keys=1\r\n" in session("INFO", "keyspace")


def test_config_get_takes_patterns_in_any_case(open_session: Callable[..., Any]) -> None:
    session = open_session(max_memory=12345, host="127.0.0.1")
    assert session("CONFIG", "GET", "MaxMemory") == {"maxmemory": "12345"}
    assert session("CONFIG", "GET", "SAVE", "append*") == {"appendonly": "no", "save": ""}
    assert session("CONFIG", "GET", "nothing") == {}
