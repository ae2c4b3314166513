"""Invariant: nothing that takes long is done on the event loop or keeps it waiting, MLX is used by
one thread, and what changes while work is under way is noticed when it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from softmax_oracle import assert_near, attention, normal

from pion_server.attention.base import AttentionBackend, Partial, Resident
from pion_server.attention.engine import BYTES, INLINE_SECONDS, Cost, Engine
from pion_server.attention.numpy_backend import NumpyBackend
from pion_server.commands.registry import Job
from pion_server.config import Config
from pion_server.errors import Misconf, PionError
from pion_server.tenants import Tenant
from pion_server.wire.values import OK, Status

from ..commands.conftest import Session

SMALL, LARGE = Cost(), Cost(nbytes=1e12)
KV = normal(1, 2, 1, 3, 4)
BLOBS = [side.tobytes() for side in KV]
ROW = bytes(16)
QUERY = ["ATTEND.PREFIX.QUERY", "s", "0", "1", "4", "0", ROW]


def ready(name: str = "numpy") -> Engine:
    """Its backend is there."""
    engine = Engine(name)
    assert finished(engine.do(lambda backend: backend.name, SMALL)) == name
    return engine


def finished(made: Any) -> Any:
    if isinstance(made, Future):
        return made.result()
    return made() if callable(made) else made


def thread(backend: AttentionBackend) -> str:
    return threading.current_thread().name


def test_the_first_use_of_any_backend_is_on_another_thread() -> None:
    """It may have to be imported."""
    assert finished(Engine().do(thread, SMALL)).startswith("pion-attention")


def test_small_work_is_done_at_once_and_large_work_elsewhere() -> None:
    engine = ready()
    assert engine.do(thread, SMALL) == threading.current_thread().name
    made = engine.do(thread, LARGE)
    assert isinstance(made, Future)
    assert made.result().startswith("pion-attention")


def test_mlx_is_always_on_the_same_thread() -> None:
    engine = ready("mlx")
    threads = {finished(engine.do(thread, cost)) for cost in (SMALL, LARGE, SMALL)}
    assert len(threads) == 1
    assert threads != {threading.current_thread().name}


def test_long_work_holds_up_no_short_work(busy: tuple[Engine, threading.Event]) -> None:
    engine, go = busy
    assert engine.do(thread, SMALL) == threading.current_thread().name
    behind = engine.do(thread, LARGE)
    assert isinstance(behind, Future)
    assert not behind.done()
    go.set()
    assert behind.result().startswith("pion-attention")


def test_a_turn_of_the_loop_has_room_for_so_much() -> None:
    engine, turns = ready(), []
    engine.take_turns(turns.append)
    most = Cost(nbytes=0.6 * INLINE_SECONDS * BYTES)
    here = threading.current_thread().name
    assert engine.do(thread, most) == here
    assert isinstance(second := engine.do(thread, most), Future)
    assert second.result() != here
    assert engine.do(thread, Cost(nbytes=most.nbytes / 2)) == here
    assert len(turns) == 1
    turns.pop()()
    assert engine.do(thread, most) == here


class Counted:
    """A resident that knows how often it was asked, and for how many queries."""

    def __init__(self, kept: Resident) -> None:
        self.kept = kept
        self.shape, self.nbytes = kept.shape, kept.nbytes
        self.asked: list[int] = []

    def attend(self, queries: Any, head_map: Any, spans: Any = None) -> Partial:
        self.asked.append(queries.shape[1])
        return self.kept.attend(queries, head_map, spans)


@pytest.fixture
def busy() -> Iterator[tuple[Engine, threading.Event]]:
    """An engine at work, until it may go on."""
    engine, began, go = ready(), threading.Event(), threading.Event()
    engine.do(lambda backend: (began.set(), go.wait(20)), LARGE)
    assert began.wait(20)
    yield engine, go
    go.set()


def itself(backend: AttentionBackend, found: Partial) -> Partial:
    return found


def test_queries_that_wait_for_the_same_state_are_one_product(busy: Any) -> None:
    engine, go = busy
    keys, values = normal(3, 2, 2, 30, 8)
    one, other = (Counted(NumpyBackend().resident(keys, values)) for _ in range(2))
    maps = [np.array(each, np.uint8) for each in ([0, 1, 1], [1, 0, 1])]
    questions = [
        *[(one, normal(n, 3, 1 + n % 3, 8), maps[0]) for n in range(8)],  # 15 queries a head
        (one, normal(8, 3, 2, 8), maps[0]),  # for which there is no room
        (one, normal(9, 3, 2, 8), maps[1]),
        (other, normal(10, 3, 2, 8), maps[1]),
        (other, normal(11, 3, 2, 8), maps[1]),
        (other, normal(12, 3, 400, 8), maps[1]),
    ]
    made = [engine.attend(kept, asked, m, itself, LARGE) for kept, asked, m in questions]
    assert not any(each.done() for each in made)
    go.set()
    for found, (_, asked, head_map) in zip(made, questions, strict=True):
        wanted = attention(asked, keys, values, head_map)
        assert_near(found.result(20), wanted, asked, keys, values)
    assert one.asked == [15, 2, 2]
    assert other.asked == [4, 400]


def test_what_fails_for_one_of_them_fails_for_no_other(busy: Any) -> None:
    engine, go = busy
    kept = NumpyBackend().resident(*KV)
    asked, groups = normal(1, 1, 1, 4), np.zeros(1, np.uint8)

    def fail(backend: AttentionBackend, found: Partial) -> None:
        raise PionError("no")

    first, second, third = (
        engine.attend(kept, asked, groups, t, LARGE) for t in (itself, fail, itself)
    )
    go.set()
    with pytest.raises(PionError, match="no"):
        second.result(20)
    assert (first.result(20).out == third.result(20).out).all()


@pytest.mark.parametrize("dim", [4, 3], ids=["afterwards", "in the product"])
def test_an_error_keeps_nothing_of_its_batch(busy: Any, dim: int) -> None:
    """No frame of the engine, which has the queries of all."""
    engine, go = busy
    kept, groups = NumpyBackend().resident(*KV), np.zeros(1, np.uint8)

    def fail(backend: AttentionBackend, found: Partial) -> None:
        raise PionError("no")

    made = engine.attend(kept, normal(1, 1, 1, dim), groups, fail, LARGE)
    assert isinstance(made, Future)
    go.set()
    error = made.exception(20)
    assert isinstance(error, PionError if dim == 4 else ValueError)
    assert error.__traceback__ is None


def test_a_backend_that_cannot_be_made_fails_what_waits_for_it() -> None:
    kept, asked = NumpyBackend().resident(*KV), normal(1, 1, 1, 4)
    with patch("pion_server.attention.engine.choose", side_effect=PionError("none such")):
        made = Engine().attend(kept, asked, np.zeros(1, np.uint8), itself, SMALL)
        with pytest.raises(PionError, match="none such"):
            made.result(20)


def test_an_error_ends_nothing_else() -> None:
    engine = ready()

    def fail(backend: AttentionBackend) -> None:
        raise PionError("no")

    for cost in (SMALL, LARGE):
        with pytest.raises(PionError, match="no"):
            finished(engine.do(fail, cost))
        assert engine.do(thread, SMALL) == threading.current_thread().name


def test_a_closed_engine_drops_what_waits() -> None:
    engine, go = ready(), threading.Event()
    engine.do(lambda backend: go.wait(20), LARGE)
    behind = engine.do(thread, LARGE)
    engine.close()
    go.set()
    assert isinstance(behind, Future)
    assert behind.cancelled()


@pytest.mark.parametrize(
    ("kept", "queries", "inline"),
    [
        ((8, 2048, 64), (8, 1, 64), True),  # a decode step of a model of 1 B
        ((8, 512, 128), (32, 1, 128), True),
        ((8, 32_768, 128), (32, 1, 128), False),
        ((8, 2048, 128), (32, 16, 128), False),
    ],
)
def test_what_counts_as_small(kept: Any, queries: Any, inline: bool) -> None:
    groups = np.repeat(np.arange(kept[0], dtype=np.uint8), queries[0] // kept[0])
    assert (Cost.of_attention(kept, queries, groups).seconds <= INLINE_SECONDS) is inline


def at_once(session: Session, *words: Any) -> Any:
    """A reply, whether it takes a job or not."""
    made = session(*words)
    return made.finish(finished(made.work)) if isinstance(made, Job) else made


@pytest.fixture
def session() -> Session:
    """A namespace `ns` of one layer, whose backend has not been used."""
    session = Session()
    at_once(session, "KV.PREFIX.REGISTER", "ns", "4", "fp32", "LAYERS", "1", "TOKENS", "3")
    at_once(session, "KV.PREFIX.STORE", "ns", "0", "3", "DATA", *BLOBS)
    return session


CHANGES = {
    "overwritten": [["KV.PREFIX.STORE", "ns", "0", "1", "DATA", ROW, ROW]],
    "one side": [["V.STOREBATCH", "ns_pv", "0", "2", "1", ROW]],
    "another layer": [["KV.PREFIX.STORE", "ns", "0", "1", "LAYERS", "1", "2", "DATA", ROW, ROW]],
    "dropped": [["KV.PREFIX.DROP", "ns"]],
    "replaced": [
        ["KV.PREFIX.DROP", "ns"],
        ["KV.PREFIX.REGISTER", "ns", "4", "fp32"],
        ["KV.PREFIX.STORE", "ns", "0", "3", "DATA", *BLOBS],
    ],
}


@pytest.mark.parametrize("change", CHANGES)
def test_rows_that_change_while_they_get_warm(session: Session, change: str) -> None:
    job = session("KV.PREFIX.WARM", "ns", "1", "4")
    assert isinstance(job, Job)
    items = finished(job.work)
    for words in CHANGES[change]:
        assert not isinstance(at_once(session, *words), PionError)
    lookup = ["ATTEND.PREFIX.LOOKUP", "ns", "0"]
    if change == "another layer":
        assert job.finish(items) == Status("1")
        assert session(*lookup) == Status("HIT")
    else:
        assert "changed while it was getting warm; nothing is kept" in str(job.finish(items))
        assert session(*lookup) == Status("MISS")


@pytest.mark.parametrize("change", CHANGES)
def test_a_query_under_way_keeps_its_state(session: Session, change: str) -> None:
    assert at_once(session, "ATTEND.PREFIX.STORE", "s", "0", "1", "3", "4", *BLOBS) == OK
    wanted = bytes(at_once(session, *QUERY))
    session.tenant.engine._backend = None  # so that it is not done at once
    job = session(*QUERY)
    assert isinstance(job, Job)
    for words in (["KV.PREFIX.DROP", "s"], *CHANGES[change]):
        at_once(session, *words)
    assert bytes(job.finish(finished(job.work))) == wanted
    assert "session not found" in str(session(*QUERY))


def test_a_backend_that_is_not_installed_is_refused_at_the_start() -> None:
    with (
        patch("pion_server.config.find_spec", return_value=None),
        pytest.raises(ValueError, match=r"needs the package mlx: pip install"),
    ):
        Config(attention="mlx")


def test_a_full_disk_does_not_matter(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of attention state is there."""

    def refuse(tenant: Tenant) -> None:
        raise Misconf("the disk is full")

    monkeypatch.setattr(Tenant, "refuse_lost_writes", refuse)
    assert isinstance(session("ATTEND.STORE", "x", "0", "1", "3", "4", *BLOBS), Misconf)
    assert at_once(session, "ATTEND.PREFIX.STORE", "s", "0", "1", "3", "4", *BLOBS) == OK
    assert at_once(session, "KV.PREFIX.WARM", "ns", "1", "4") == Status("1")
    assert len(at_once(session, *QUERY)) == 16


def test_numbers_do_not_warn() -> None:
    """Overflow and NaN are answers, not accidents: nothing of them is in the server's log."""
    session = Session()
    bad = np.array([[np.nan, np.inf, -np.inf, 3e38]] * 3, np.float32).tobytes()
    at_once(session, "ATTEND.PREFIX.STORE", "s", "0", "1", "3", "4", bad, bad)
    with np.errstate(all="raise"):
        assert len(at_once(session, *QUERY[:-1], bad[:16])) == 16
