"""Invariant: whatever takes long in any query is in the estimate of it, so that it is no work of
the event loop: products, however small; softmax of scores; copies of queries."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest

from pion_server.attention import numpy_backend
from pion_server.attention.engine import CALL_SECONDS, INLINE_SECONDS
from pion_server.commands.registry import Job
from pion_server.wire.values import OK

from ..commands.conftest import Session


class Shape(NamedTuple):
    """K/V heads, query heads, queries a head, rows, values; and what a query chooses."""

    kv_heads: int = 2
    heads: int = 4
    count: int = 1
    rows: int = 6
    dim: int = 4
    top_k: int = 0


def ones(*shape: int) -> bytes:
    return np.ones(shape, np.float32).tobytes()


def kv(s: Shape) -> bytes:
    return ones(s.kv_heads, s.rows, s.dim)


def asked(s: Shape) -> bytes:
    return ones(s.heads, s.count, s.dim)


def lopsided(s: Shape) -> bytes:
    """Each K/V head is asked, and one of them by all the rest."""
    used = min(s.kv_heads, s.heads)
    return bytes(range(used)) + bytes(s.heads - used)


def plain(s: Shape, name: str) -> list[Any]:
    return [name, "s", 0, s.heads, s.dim, s.top_k, asked(s)]


def batch(s: Shape) -> list[Any]:
    blobs = ones(s.kv_heads, s.count, s.dim), kv(s), kv(s)
    return ["ATTEND.QUERYBATCH", s.kv_heads, s.rows, s.dim, s.top_k, *blobs]


def fused(s: Shape) -> list[Any]:
    own = ones(s.kv_heads, s.count, s.dim)
    sizes = s.heads, s.dim, s.count, s.kv_heads
    return ["ATTEND.PREFIX.QUERY_FUSED", "s", 0, *sizes, asked(s), own, own, lopsided(s)]


def sparse(s: Shape) -> list[Any]:
    most = s.top_k or 1
    ids, counts = np.zeros((s.heads, most), "<u4"), np.full(s.heads, most, "<u4")
    blobs = ones(s.heads, 1, s.dim), ids.tobytes(), counts.tobytes()
    return ["ATTEND.PREFIX.QUERY_SPARSE", "s", 0, s.heads, s.dim, most, *blobs]


def auto(s: Shape) -> list[Any]:
    sizes = s.heads, s.dim, 2, s.top_k or 1, s.kv_heads
    blobs = ones(s.heads, 1, s.dim), lopsided(s)
    return ["ATTEND.PREFIX.QUERY_SPARSE_AUTO", "s", 0, *sizes, *blobs]


def auto_fused(s: Shape) -> list[Any]:
    sizes = s.heads, s.dim, 2, s.top_k or 1, s.kv_heads, s.count
    own = ones(s.kv_heads, s.count, s.dim)
    blobs = ones(s.heads, 1, s.dim), own, own, lopsided(s)
    return ["ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED", "s", 0, *sizes, *blobs]


FORMS = {
    "QUERY": lambda s: plain(s, "ATTEND.PREFIX.QUERY"),
    "INDEX": lambda s: plain(s, "ATTEND.QUERY"),
    "QUERYBATCH": batch,
    "FUSED": fused,
    "SPARSE": sparse,
    "AUTO": auto,
    "AUTO_FUSED": auto_fused,
}
MANY_HEADS = Shape(kv_heads=256, heads=4096, rows=1, dim=1)
EVERY_HEAD = Shape(kv_heads=256, heads=300, rows=1, dim=1)  # a product each
LARGE = [
    *product(("QUERY", "INDEX", "QUERYBATCH"), [Shape(count=200, rows=2, dim=1, top_k=1)]),
    *product(("QUERY", "INDEX", "QUERYBATCH"), [Shape(1, 1, 100_000, 10, 16)]),
    *product(("FUSED",), [Shape(1, 1, 2_000, 10, 16)]),
    *product(("QUERY", "INDEX", "QUERYBATCH"), [Shape(1, 1, 2_000, 2_000, 1)]),  # softmax
    *product(("SPARSE", "AUTO", "AUTO_FUSED"), [MANY_HEADS]),
    *product(("FUSED", "AUTO", "AUTO_FUSED"), [EVERY_HEAD]),
    *product(("SPARSE", "AUTO", "AUTO_FUSED"), [Shape(rows=300, dim=16_384, top_k=300)]),
]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Its backend is there."""
    session = Session()
    at_once(session, "ATTEND.PREFIX.STORE", "first", 0, 1, 1, 1, ones(1), ones(1))
    yield session
    session.tenant.engine.close()


def at_once(session: Session, *words: Any) -> Any:
    made = ask(session, words)
    if not isinstance(made, Job):
        return made
    assert isinstance(made.work, Future)
    return made.finish(made.work.result())


def ask(session: Session, words: Any) -> Any:
    return session(*[word if isinstance(word, bytes) else str(word) for word in words])


def prepare(session: Session, form: str, s: Shape) -> None:
    """State of that shape, which is warm for ATTEND.PREFIX.* and cold for ATTEND.QUERY."""
    store = "ATTEND.STORE" if form == "INDEX" else "ATTEND.PREFIX.STORE"
    at_once(session, "KV.PREFIX.DROP", "s")
    assert at_once(session, store, "s", 0, s.kv_heads, s.rows, s.dim, kv(s), kv(s)) == OK


@pytest.mark.parametrize("form", FORMS)
def test_a_small_query_of_any_form_is_answered_at_once(session: Session, form: str) -> None:
    prepare(session, form, Shape())
    assert isinstance(ask(session, FORMS[form](Shape())), memoryview)


@pytest.mark.parametrize(("form", "shape"), LARGE)
def test_what_takes_long_is_a_job(session: Session, form: str, shape: Shape) -> None:
    prepare(session, form, shape)
    made = ask(session, FORMS[form](shape))
    assert isinstance(made, Job)
    assert isinstance(made.work, Future)
    made.work.result(60)


@pytest.mark.parametrize("form", FORMS)
def test_no_turn_of_the_loop_makes_more_products_than_there_is_time_for(
    session: Session, form: str
) -> None:
    """Of any shape: heads, queries and rows from few to many."""
    sizes = product((1, 16), (1, 3, 20), (1, 10), (2, 40), (0, 1))
    shapes = [Shape(h, h * g, m, n, 2, k) for h, g, m, n, k in sizes]
    here: list[str] = []

    def noting(*args: Any) -> Any:
        here.append(threading.current_thread().name)
        return attend(*args)

    attend, mine = numpy_backend._attend, threading.current_thread().name
    for shape in shapes:
        prepare(session, form, shape)
        here.clear()
        with patch.object(numpy_backend, "_attend", noting):
            made = ask(session, FORMS[form](shape))
            if isinstance(made, Job):
                assert isinstance(made.work, Future)
                made.work.result(60)
        assert not isinstance(made, Exception), made
        assert here.count(mine) * CALL_SECONDS <= INLINE_SECONDS
