"""Invariant: with a password, who may do what, and the words of every refusal, are those of a real
redis-server, in whatever order AUTH, HELLO, RESET and others come; and the password is never said.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

Words: TypeAlias = list[bytes]
RIGHT = b"s3cret-w0rd"  # PASSWORD of tests/conftest.py

COMMANDS = [
    [b"AUTH", RIGHT],
    [b"AUTH", b"default", RIGHT],
    [b"AUTH", b"wrong"],
    [b"AUTH", b""],
    [b"AUTH", b"default", RIGHT[:-1]],
    [b"AUTH", b"default", RIGHT + b"\0"],
    [b"AUTH", b"Default", RIGHT],
    [b"AUTH", b"", RIGHT],
    [b"AUTH", b"\xff", b"\xff"],
    [b"AUTH"],
    [b"AUTH", b"default", RIGHT, b"x"],
    [b"HELLO"],
    [b"HELLO", b"3"],
    [b"HELLO", b"3", b"AUTH", b"default", RIGHT],
    [b"HELLO", b"2", b"AUTH", b"default", RIGHT, b"SETNAME", b"me"],
    [b"HELLO", b"3", b"SETNAME", b"me", b"AUTH", b"default", b"wrong"],
    [b"HELLO", b"3", b"SETNAME", b"me"],
    [b"HELLO", b"3", b"AUTH", b"default"],
    [b"HELLO", b"4", b"AUTH", b"default", RIGHT],
    [b"RESET"],
    [b"RESET", b"x"],
    [b"PING"],
    [b"GET", b"a"],
    [b"GET"],
    [b"SET", b"a", b"v"],
    [b"CLIENT", b"GETNAME"],
    [b"FOO", b"x"],
]
SEQUENCE = st.lists(st.sampled_from(COMMANDS), min_size=1, max_size=12)


def answers(client: Any, commands: list[Words]) -> list[bytes]:
    """Replies without what differs: HELLO's id and version."""
    client.send(b"".join(map(client.request, commands)))
    replies = [client.reply() for _ in commands]
    return [re.sub(rb"(\$2\r\nid\r\n):\d+|\d+\.\d+\.\d+", rb"\1", reply) for reply in replies]


def check(locked: Any, commands: list[Words]) -> None:
    with locked.clients() as (pion, redis):
        got, expected = answers(pion, commands), answers(redis, commands)
    for words, ours, theirs in zip(commands, got, expected, strict=True):
        assert ours == theirs, words
        assert RIGHT not in ours


@settings(max_examples=300, deadline=None, derandomize=True)
@given(SEQUENCE)
def test_random_sequences(locked: Any, commands: list[Words]) -> None:
    check(locked, commands)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=20_000, deadline=None)
@given(SEQUENCE)
def test_many_random_sequences(locked: Any, commands: list[Words]) -> None:
    check(locked, commands)


@pytest.mark.parametrize("login", [[], [[b"AUTH", RIGHT]]], ids=["stranger", "user"])
def test_quit_closes_behind_its_reply(locked: Any, login: list[Words]) -> None:
    commands = [*login, [b"QUIT", b"now"], [b"PING"]]
    with locked.clients() as both:
        said = []
        for client in both:
            client.send(b"".join(map(client.request, commands)))
            said.append(client.rest())
    assert said[0] == said[1] == b"+OK\r\n" * (len(login) + 1)


def test_nothing_that_can_be_asked_for_shows_the_password(locked: Any) -> None:
    with locked.clients() as (pion, _):
        pion.ask(b"AUTH", RIGHT)
        asked = [
            [b"CONFIG", b"GET", b"*"],
            [b"CONFIG", b"GET", b"requirepass"],
            [b"INFO"],
            [b"CLIENT", b"LIST"],
            [b"COMMAND", b"DOCS"],
            [b"PION.STATS"],
        ]
        for words in asked:
            reply = pion.ask(*words)
            assert not reply.startswith(b"-")
            assert RIGHT not in reply
