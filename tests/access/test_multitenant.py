"""Invariant: with --ns-prefix, a name that does not begin with it is refused by every command that
takes a name, in every place of it, and has no effect; with names that do, nothing is different.

The other way to have tenants: a process each, of which each knows one prefix.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from pion_server.commands import load_families
from pion_server.commands.registry import TABLE

PREFIX = b"team-a:"
OUTSIDE = [b"k1", b"team-a", b"team-b:k1", b"Team-a:k1", b" team-a:k1", b"xteam-a:k1", b"\xff\0"]
NAMES = re.compile(r"<(key|ns|sid)>")
REFUSED = b"-ERR names begin with 'team-a:' here (--ns-prefix), got "


@pytest.fixture
def commands(life: list[Any], name_type: type) -> list[tuple[list[Any], list[int]]]:
    """The commands of LIFE up to where it logs off, and in which places they have names."""
    plain = life[: next(at for at, words in enumerate(life) if words == ["RESET"])]
    return [
        (words, [at for at, word in enumerate(words) if isinstance(word, name_type)])
        for words in plain
    ]


def test_the_matrix_has_every_command_that_takes_a_name(commands: Any) -> None:
    load_families()
    with_names = {words[0] for words, places in commands if places}
    assert with_names == {row.name for row in TABLE.values() if NAMES.search(row.syntax)}
    several = {
        row.name for row in TABLE.values() if len(NAMES.findall(row.syntax.split(" | ")[0])) > 1
    }
    assert several <= {words[0] for words, places in commands if len(places) > 1}


def within(words: list[Any], places: list[int]) -> list[Any]:
    return [PREFIX + word if at in places else word for at, word in enumerate(words)]


def test_every_name_in_every_command(start_pion: Any, dial: Any, commands: Any) -> None:
    raw = dial(start_pion("--ns-prefix", PREFIX.decode()).port)
    for words, places in commands:
        for place in places:
            for outside in OUTSIDE:
                bad = within(words, places)
                bad[place] = outside
                before = raw.ask("INFO", "memory", "keyspace"), raw.ask("KV.PREFIX.INFO")
                assert raw.ask(*bad).startswith(REFUSED), bad
                assert (raw.ask("INFO", "memory", "keyspace"), raw.ask("KV.PREFIX.INFO")) == before
        assert not raw.ask(*within(words, places)).startswith(REFUSED)


def test_inside_of_the_prefix_nothing_is_different(
    start_pion: Any, dial: Any, commands: Any
) -> None:
    free, bound = start_pion(), start_pion("--ns-prefix", PREFIX.decode())
    ours, theirs = dial(bound.port), dial(free.port)
    for words, places in commands:
        if words[0] in {"TTL", "PTTL", "INFO", "CLIENT", "CONFIG", "PION.WORKERS"}:
            continue  # goes by the clock and the port
        mine = within(words, places)
        assert theirs.ask(*mine) == ours.ask(*mine) or words[0] == "PION.STATS", words


def test_there_is_nothing_else_to_be_found(start_pion: Any, dial: Any) -> None:
    raw = dial(start_pion("--ns-prefix", PREFIX.decode()).port)
    raw.ask("SET", PREFIX + b"k", "v")
    assert raw.ask("MSET", PREFIX + b"a", "v", "b", "v").startswith(REFUSED)
    assert raw.ask("DEL", PREFIX + b"k", "b").startswith(REFUSED)
    assert raw.ask("KEYS", "*") == b"*1\r\n$8\r\nteam-a:k\r\n"
    assert raw.ask("SCAN", 0) == b"*2\r\n$1\r\n0\r\n*1\r\n$8\r\nteam-a:k\r\n"
