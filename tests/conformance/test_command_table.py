"""Invariant: of every command that Redis has too, COMMAND tells the arity and the places of the
keys as a real redis-server does, so that clients that route by keys find them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

# Flags that mean something to clients; Redis has more, about scripts, memory and scheduling.
FLAGS = {"write", "no_auth"}


@pytest.fixture(scope="module")
def servers(both: Any) -> Iterator[tuple[redis.Redis, redis.Redis]]:
    """redis-py on pion-server and on redis-server."""
    with redis.Redis(port=both.pion_port) as pion, redis.Redis(port=both.redis_port) as real:
        yield pion, real


def as_text(docs: Any) -> Any:
    """Maps of bytes as maps of str."""
    if isinstance(docs, dict):
        return {key.decode(): as_text(value) for key, value in docs.items()}
    return docs.decode() if isinstance(docs, bytes) else docs


def test_shared_commands_are_described_alike(servers: Any) -> None:
    ours, theirs = (server.command() for server in servers)
    shared = ours.keys() & theirs.keys()
    assert shared >= {"get", "set", "mset", "del", "scan", "client", "command", "hello"}
    for name in sorted(shared):
        mine, real = ours[name], theirs[name]
        for field in ("arity", "first_key_pos", "last_key_pos", "step_count"):
            assert mine[field] == real[field], (name, field)
        assert FLAGS & set(mine["flags"]) == FLAGS & set(real["flags"]), name


def test_shared_subcommands_are_described_alike(servers: Any) -> None:
    names = ["client|setname", "client|list", "client|no-evict", "config|get", "command|docs"]
    names_and_arities = [
        [(as_text(row[0]), row[1]) for row in server.execute_command("COMMAND INFO", *names)]
        for server in servers
    ]
    assert names_and_arities[0] == names_and_arities[1]
    assert [name for name, _ in names_and_arities[0]] == names


def test_count_docs_and_info_agree(servers: Any) -> None:
    server, _ = servers
    names = set(server.command())
    assert server.command_count() == len(names)
    docs = as_text(server.execute_command("COMMAND DOCS"))
    assert docs.keys() == names
    for name, text in docs.items():
        assert text["syntax"].upper().startswith(name.upper()), name
        assert text["summary"], name
        assert text["reply"], name
    assert set(docs["client"]["subcommands"]) >= {"client|setname", "client|id"}
