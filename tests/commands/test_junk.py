"""Invariant: no arguments whatsoever make a defect of any command: each is answered with a reply
or an error of its own, and changes nothing half.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_server.commands import load_families
from pion_server.commands.registry import SUBCOMMANDS, TABLE, Job
from pion_server.errors import PionError

load_families()
ROWS = [*TABLE.values(), *SUBCOMMANDS.values()]
NAMES = [row.name.replace("|", " ").encode().split() for row in ROWS]
# Every word that some command knows, so that junk gets past the first check.
KEYWORDS = sorted({w.encode() for row in ROWS for w in re.findall(r"[A-Z][A-Z0-9_-]+", row.syntax)})
NUMBERS = [b"0", b"1", b"2", b"-1", b"4", b"64", b"9223372036854775807", b"18446744073709551616"]
ODD = [b"", b"\xff", b"ns", b"fp16", b"bf16", b"fmt=fp16,dim=2", b"00ff", b"*", b"[", b"nan"]
WORD = st.sampled_from(KEYWORDS + NUMBERS + ODD) | st.binary(max_size=9)
REQUEST = st.tuples(st.sampled_from(NAMES), st.lists(WORD, max_size=8)).map(lambda r: r[0] + r[1])


def answer(session: Any, words: list[bytes]) -> Any:
    reply = session(*words)
    return reply.finish(reply.work()) if isinstance(reply, Job) else reply


@settings(max_examples=1000, deadline=None)
@given(requests=st.lists(REQUEST, max_size=6), budget=st.sampled_from([0, 0, 200]))
def test_any_words(
    open_session: Callable[..., Any], requests: list[list[bytes]], budget: int
) -> None:
    """Nor is a budget ever exceeded."""
    session = open_session(max_memory=budget)
    for words in requests:
        reply = answer(session, words)
        assert not isinstance(reply, PionError) or "internal error" not in str(reply), words
        assert not budget or session.tenant.store.bytes_used <= budget


@pytest.mark.parametrize("name", sorted(TABLE))
def test_strangers_get_nothing_but_the_door(open_session: Callable[..., Any], name: str) -> None:
    session = open_session(requirepass="s3cret")
    row = TABLE[name]
    reply = session(name, *["x"] * (abs(row.arity) - 1))
    opens = name in {"AUTH", "HELLO", "QUIT", "RESET"}
    assert ("Authentication required." in str(reply)) is not opens
