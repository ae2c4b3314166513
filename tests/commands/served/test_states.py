"""Invariant: a recurrent state comes back byte for byte as it was last stored, whatever its size,
until it or its namespace is dropped; on its way out it outlives that, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

NewName = Callable[[], bytes]
LARGE = 80 << 20  # more than the specification's server could send


@pytest.fixture
def sid(new_name: NewName) -> bytes:
    return new_name()


@pytest.mark.parametrize("size", [0, 1, 4095, 65_536, LARGE])
def test_a_state_comes_back(raw: Any, sid: bytes, size: int) -> None:
    blob = random.Random(size).randbytes(size)
    assert raw.ask("SSM.PREFIX.STORE", sid, 7, blob) == "+OK"
    assert raw.ask("SSM.PREFIX.FETCH", sid, 7) == blob
    assert raw.ask("SSM.PREFIX.DROP", sid) == "+OK"


def test_what_is_not_there_is_null(raw: Any, sid: bytes) -> None:
    assert raw.ask("SSM.PREFIX.FETCH", sid, 0) is None
    raw.ask("SSM.PREFIX.STORE", sid, 0, b"state")
    assert raw.ask("SSM.PREFIX.FETCH", sid, 1) is None
    assert raw.ask("SSM.PREFIX.DROP", sid, 1) == "+OK"
    assert raw.ask("SSM.PREFIX.FETCH", sid, 0) == b"state"


def test_random_stores_and_drops_equal_a_dict(raw: Any, new_name: NewName) -> None:
    dice = random.Random(7)
    sids = [new_name() for _ in range(3)]
    model: dict[tuple[bytes, int], bytes] = {}
    for _ in range(400):
        sid, layer = dice.choice(sids), dice.choice([0, 1, 4095])
        match dice.randrange(4):
            case 0:
                assert raw.ask("SSM.PREFIX.DROP", sid, layer) == "+OK"
                model.pop((sid, layer), None)
            case 1 if dice.random() < 0.3:
                assert raw.ask("SSM.PREFIX.DROP", sid) == "+OK"
                model = {at: blob for at, blob in model.items() if at[0] != sid}
            case _:
                blob = dice.randbytes(dice.choice([0, 10, 10_000]))
                assert raw.ask("SSM.PREFIX.STORE", sid, layer, blob) == "+OK"
                model[sid, layer] = blob
        assert raw.ask("SSM.PREFIX.FETCH", sid, layer) == model.get((sid, layer))


@pytest.mark.parametrize("first", ["state", "namespace"])
def test_dropping_a_namespace_drops_its_states(raw: Any, sid: bytes, first: str) -> None:
    steps = [
        ("SSM.PREFIX.STORE", sid, 2, b"state"),
        ("KV.PREFIX.REGISTER", sid, 2, "fp32"),
    ]
    for words in steps if first == "state" else reversed(steps):
        assert raw.ask(*words) == "+OK"
    assert raw.ask("KV.PREFIX.DROP", sid) == 1
    assert raw.ask("SSM.PREFIX.FETCH", sid, 2) is None


def test_dropping_states_leaves_their_namespace(raw: Any, sid: bytes) -> None:
    raw.ask("KV.PREFIX.REGISTER", sid, 2, "fp32")
    raw.ask("SSM.PREFIX.STORE", sid, 2, b"state")
    assert raw.ask("SSM.PREFIX.DROP", sid) == "+OK"
    assert raw.ask("SSM.PREFIX.FETCH", sid, 2) is None
    assert raw.ask("KV.PREFIX.LOOKUP", sid) == "+HIT"


def test_a_state_on_its_way_outlives_its_replacement(raw: Any, sid: bytes) -> None:
    blob = random.Random(1).randbytes(LARGE)
    assert raw.ask("SSM.PREFIX.STORE", sid, 0, blob) == "+OK"
    raw.send("SSM.PREFIX.FETCH", sid, 0)  # more than the socket's buffers take
    raw.send("SSM.PREFIX.STORE", sid, 0, b"new")
    raw.send("SSM.PREFIX.DROP", sid)
    assert [raw.reply() for _ in range(3)] == [blob, "+OK", "+OK"]


def test_a_state_is_no_session_and_no_key(raw: Any, sid: bytes) -> None:
    raw.ask("SSM.PREFIX.STORE", sid, 0, b"state")
    assert raw.ask("V.FETCH", sid, 0, 0).startswith("-ERR unknown session")
    assert raw.ask("GET", sid) is None
    assert raw.ask("KV.PREFIX.LOOKUP", sid) == "+MISS"
