"""The storing thread runs every job once and in order; it lets an engine's first token go first,
and hurries for whoever waits."""

from __future__ import annotations

import threading

import pytest
from pion_vllm_mlx import background
from pion_vllm_mlx.background import MAX_PENDING_BYTES, Background, Job

LONG = 30.0


def test_it_runs_in_order_and_knows_what_is_pending() -> None:
    worker, gate, ran = Background(), threading.Event(), list[str]()
    half = MAX_PENDING_BYTES // 2
    assert worker.submit(Job("a", half, lambda: (gate.wait(), ran.append("a"))[-1]))
    assert worker.submit(Job("b", half, lambda: ran.append("b")))
    assert worker.has_room(0)
    assert not worker.has_room(1)
    assert not worker.submit(Job("c", 1, lambda: ran.append("c")))
    assert worker.wait(0.01, "c")
    assert not worker.wait(0.01, "a")
    assert not worker.wait(0.01, "b")
    assert not worker.wait(0.01)
    gate.set()
    assert worker.close(LONG)
    assert ran == ["a", "b"]
    assert not worker.submit(Job("d", 0, lambda: ran.append("d")))


def test_one_job_alone_may_have_any_size() -> None:
    worker, ran = Background(), list[str]()
    assert worker.submit(Job("a", 2 * MAX_PENDING_BYTES, lambda: ran.append("a")))
    assert worker.close(LONG)
    assert ran == ["a"]


def test_it_begins_by_itself() -> None:
    worker, ran = Background(), threading.Event()
    for _ in range(2):
        ran.clear()
        assert worker.submit(Job("a", 0, ran.set))
        assert ran.wait(LONG)
    assert worker.close(LONG)


@pytest.fixture
def for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was idle pauses until the end of time."""
    monkeypatch.setattr(background, "PAUSE_S", 1e6)


def test_it_hurries_for_whoever_waits(for_ever: None) -> None:
    worker, ran = Background(), list[str]()
    for name in "ab":  # the thread's first job, and one after it was idle
        assert worker.submit(Job(name, 0, lambda name=name: ran.append(name)))
        assert worker.wait(LONG, name)
    assert ran == ["a", "b"]


def test_it_hurries_for_close(for_ever: None) -> None:
    worker, ran = Background(), list[str]()
    assert worker.submit(Job("a", 0, lambda: ran.append("a")))
    assert worker.close(LONG)
    assert ran == ["a"]


def test_what_queues_behind_a_running_job_does_not_pause(for_ever: None) -> None:
    worker, alone, ran = Background(), threading.Event(), threading.Event()

    def first() -> None:
        worker.submit(Job("second", 0, second))

    def second() -> None:
        alone.wait()
        worker.submit(Job("third", 0, ran.set))

    assert worker.submit(Job("first", 0, first))
    assert worker.wait(LONG, "first")
    alone.set()  # from here on nobody waits
    assert ran.wait(LONG)
    assert worker.close(LONG)


def test_it_lets_the_engine_go_first(for_ever: None) -> None:
    worker, ran = Background(), threading.Event()
    assert worker.submit(Job("a", 0, ran.set))
    assert not ran.wait(0.05)
    assert worker.close(LONG)
    assert ran.is_set()
