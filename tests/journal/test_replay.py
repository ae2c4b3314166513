"""Invariant: what recovery loses it loses as a whole, and until the log says that it is gone.

Each test says in which record a payload was damaged, and what is left in the end.
"""

from __future__ import annotations

import pytest
from driver import state_after, state_of
from stories import NARROW, block, prefix_rows, register

from pion_server.errors import PionError
from pion_server.journal.replay import Replay
from pion_server.store import mutations as m

KV, META = b"chunk-kv_bytes", b"chunk-metadata"


def replayed(log: list[m.Mutation], *damaged: int, forgotten_after: int | None = None) -> Replay:
    """The log, with the payload of some records damaged, or with a gap after one."""
    replay = Replay()
    for i, mutation in enumerate(log):
        if i in damaged:
            replay.lose(mutation)
        else:
            replay.apply(mutation)
        if i == forgotten_after:
            replay.forget()
    return replay


def left(replay: Replay) -> set[tuple[object, ...]]:
    return set(state_of(replay.store)["units"])


def session(sid: bytes) -> tuple[object, ...]:
    return ("session", sid)


def test_a_namespace_goes_with_any_of_its_rows() -> None:
    log = [register(b"a"), prefix_rows(b"a", 1), register(b"b"), prefix_rows(b"b", 2)]
    for damaged in (0, 1):
        replay = replayed(log, damaged)
        assert left(replay) == {("prefix", b"b"), session(b"b_pk"), session(b"b_pv")}


def test_rows_of_several_sessions_go_each_their_way() -> None:
    both = m.StoreRows(
        (block(b"a_pk", 0, 0, 1, 8, 1), block(b"s", 0, 0, 1, 8, 2), block(b"t", 0, 0, 1, 8, 3))
    )
    log = [
        register(b"a"),
        m.CreateSession(b"s", NARROW),
        m.CreateSession(b"t", NARROW),
        m.StoreRows((block(b"s", 0, 5, 1, 8, 4),)),
        both,
    ]
    assert left(replayed(log, 4)) == set()
    replay = replayed(log, 3)  # only `s` is lost before
    assert left(replay) == {("prefix", b"a"), session(b"a_pk"), session(b"a_pv"), session(b"t")}
    assert replay.store.sessions[b"t"].layer(0).rows == 1


@pytest.mark.parametrize("again", [register(b"a"), prefix_rows(b"a", 5), m.StoreRows(())])
def test_what_is_lost_stays_lost_whatever_is_written_to_it(again: m.Mutation) -> None:
    log = [register(b"a"), prefix_rows(b"a", 1), again, prefix_rows(b"a", 2)]
    assert left(replayed(log, 1)) == set()


def test_what_is_lost_is_known_again_once_it_is_dropped() -> None:
    anew = [register(b"a"), prefix_rows(b"a", 7)]
    log = [register(b"a"), prefix_rows(b"a", 1), m.DropPrefix(b"a"), *anew]
    assert state_of(replayed(log, 1).store) == state_after(anew)
    alone = [m.CreateSession(b"s", NARROW), m.StoreRows((block(b"s", 0, 0, 1, 8, 1),))]
    log = [*alone, m.DropSession(b"s"), *alone]
    assert state_of(replayed(log, 1).store) == state_after(alone)


def test_dropping_something_else_does_not_bring_it_back() -> None:
    log = [
        m.CreateSession(b"a_pk", NARROW),
        m.StoreRows((block(b"a_pk", 0, 0, 1, 8, 1),)),
        m.DropPrefix(b"a"),  # no namespace yet, so the session stays
        m.StoreRows((block(b"a_pk", 0, 1, 1, 8, 2),)),
        m.CreateSession(b"a_pk", NARROW),
    ]
    assert left(replayed(log, 1)) == set()


def test_a_namespace_that_takes_a_lost_session_in_is_lost_as_well() -> None:
    log = [
        m.CreateSession(b"a_pk", NARROW),
        m.CreateSession(b"a_pv", NARROW),
        m.StoreRows((block(b"a_pk", 0, 0, 1, 8, 1),)),
        register(b"a", tokens=None),
        prefix_rows(b"a", 5, start=4),
    ]
    assert left(replayed(log, 2)) == set()
    assert left(replayed([*log, m.DropPrefix(b"a"), register(b"a")], 2)) == {
        ("prefix", b"a"),
        session(b"a_pk"),
        session(b"a_pv"),
    }


def test_states_of_a_lost_namespace_go_when_it_is_dropped() -> None:
    log = [
        register(b"a"),
        prefix_rows(b"a", 1),
        m.StoreState(b"a", 0, b"later"),
    ]
    assert left(replayed(log, 1)) == {("state", b"a", 0)}
    assert left(replayed([*log, m.DropPrefix(b"a")], 1)) == set()
    assert left(replayed([*log, m.DropPrefix(b"a")], forgotten_after=1)) == set()


def test_a_damaged_state_is_back_when_it_is_stored_again() -> None:
    log = [m.StoreState(b"x", 0, b"1"), m.StoreState(b"x", 1, b"1"), m.StoreState(b"x", 0, b"2")]
    assert left(replayed(log, 0)) == {("state", b"x", 0), ("state", b"x", 1)}
    assert left(replayed(log, 2)) == {("state", b"x", 1)}


def test_a_damaged_key_is_back_when_it_is_set_again() -> None:
    log = [m.SetKey(0, b"k", b"1"), m.SetKey(0, b"k", b"2"), m.SetExpiry(0, b"k", 5)]
    assert left(replayed(log, 1)) == set()
    assert state_of(replayed(log, 0).store) == state_after(log)


@pytest.mark.parametrize("damaged", [0, 1])
@pytest.mark.parametrize("order", [(KV, META), (META, KV)])
def test_half_a_chunk_is_never_left(damaged: int, order: tuple[bytes, bytes]) -> None:
    """Stock LMCache takes one half for a hit, and reads garbage."""
    chunk = [m.SetKey(0, name, b"x") for name in order]
    assert left(replayed(chunk, damaged)) == set()
    assert left(replayed([*chunk, *chunk], damaged)) == set()
    half_gone = [*chunk, m.DeleteKeys(0, (order[0],)), *chunk]
    assert left(replayed(half_gone, damaged)) == set()
    for gone in (m.DeleteKeys(0, order), m.FlushDb(0), m.FlushDb(None)):
        assert len(left(replayed([*chunk, gone, *chunk], damaged))) == 2
    elsewhere = m.FlushDb(1)
    assert left(replayed([*chunk, elsewhere, *chunk], damaged)) == set()


def test_after_a_gap_only_what_is_set_as_a_whole_is_known() -> None:
    log = [
        register(b"a"),
        m.CreateSession(b"s", NARROW),
        m.SetKey(0, b"before", b"1"),
        register(b"b"),
        prefix_rows(b"a", 1),
        m.CreateSession(b"t", NARROW),
        m.SetKey(0, b"after", b"1"),
        m.SetKey(0, KV, b"1"),
        m.SetKey(0, META, b"1"),
        m.StoreState(b"a", 0, b"1"),
        m.SetExpiry(0, b"before", 5),
    ]
    assert left(replayed(log, forgotten_after=2)) == {
        ("key", 0, b"after"),
        ("state", b"a", 0),
    }


def test_what_does_not_fit_is_told_and_changes_nothing() -> None:
    replay = replayed([register(b"a")])
    before = state_of(replay.store)
    with pytest.raises(PionError, match="unknown session"):
        replay.apply(prefix_rows(b"b", 1))
    assert state_of(replay.store) == before
