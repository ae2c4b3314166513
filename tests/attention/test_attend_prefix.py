"""Invariant: a query over K/V that the server keeps is softmax(Q K^T / sqrt(D)) V, whatever the
shape, and what was stored last is what is asked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from softmax_oracle import as_kept, normal

from pion_server.client import PionError

BUDGET = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SEEDS = st.integers(0, 2**32 - 1)


@BUDGET
@given(data=st.data(), seed=SEEDS)
def test_any_shape(served: Any, data: st.DataObject, seed: int) -> None:
    heads, rows, dim, group, count = (data.draw(st.integers(1, n)) for n in (4, 40, 24, 3, 3))
    keys, values = normal(seed, 2, heads, rows, dim)
    scale = data.draw(st.sampled_from([1, 100]))
    queries = normal(seed + 1, heads * group, count, dim, scale=scale)
    window = data.draw(st.none() | st.integers(1, rows + 3))
    served.client.attend_store("any", 3, keys, values)
    assert served.client.attend_lookup("any", 3) == "HIT"
    out, lse = served.client.attend_query("any", 3, queries, window=window)
    seen = np.arange(rows) >= rows - (window or rows)
    served.check(out, lse, queries, keys, values, np.repeat(range(heads), group), seen)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 160, 192, 256, 512])
def test_the_dims_of_models(served: Any, sid: str, dim: int) -> None:
    keys, values = normal(dim, 2, 2, 300, dim)
    queries = normal(dim + 1, 4, 1, dim)
    served.client.attend_store(sid, 0, keys, values)
    out, lse = served.client.attend_query(sid, 0, queries)
    assert lse is None
    served.check(out, None, queries, keys, values, [0, 0, 1, 1])


def test_an_answer_is_nothing_but_its_values(served: Any, sid: str) -> None:
    """The form that clients in the field read: fp32, H * D of them, and no more."""
    keys, values = normal(1, 2, 2, 5, 4)
    served.client.attend_store(sid, 0, keys, values)
    with served.raw() as raw:
        reply = raw.ask("ATTEND.PREFIX.QUERY", sid, 0, 2, 4, 5, normal(2, 2, 4).tobytes())
        assert reply[:5] == b"$32\r\n"
        assert len(reply) == 5 + 32 + 2
        assert raw.ask("ATTEND.PREFIX.LOOKUP", sid, 0) == b"+HIT\r\n"
        assert raw.ask("ATTEND.PREFIX.LOOKUP", sid, 1) == b"+MISS\r\n"
        missing = raw.ask("ATTEND.PREFIX.QUERY", sid, 1, 2, 4, 5, bytes(32))
        assert missing.startswith(b"-ERR session not found")


@BUDGET
@given(data=st.data(), seed=SEEDS)
def test_top_k(served: Any, data: st.DataObject, seed: int) -> None:
    """The rows of the highest scores; none, all or more of them are all."""
    rows = data.draw(st.integers(1, 30))
    top_k = data.draw(st.integers(0, 40))
    keys, values = normal(seed, 2, 2, rows, 8)
    queries = normal(seed + 1, 2, 2, 8)
    served.client.attend_store("top", 0, keys, values)
    out, lse = served.client.attend_query("top", 0, queries, top_k=top_k)
    scores = queries @ as_kept(served.backend, keys).swapaxes(1, 2)
    order = np.argsort(np.argsort(-scores, axis=-1), axis=-1)
    seen = order < (top_k or rows)
    served.check(out, lse, queries, keys, values, [0, 1], seen)


def test_what_is_stored_last_is_asked(served: Any, sid: str) -> None:
    """Also with another shape; other layers and sessions keep theirs."""
    kept = {}
    for layer, rows in [(0, 5), (1, 6), (0, 9), (7, 1), (1, 2)]:
        kept[layer] = normal(rows, 2, 2, rows, 4)
        served.client.attend_store(sid, layer, *kept[layer])
    queries = normal(0, 2, 3, 4)
    for layer, (keys, values) in kept.items():
        out, lse = served.client.attend_query(sid, layer, queries)
        served.check(out, lse, queries, keys, values, [0, 1])
    assert served.client.attend_lookup(sid + "x", 0) == "MISS"
    with pytest.raises(PionError, match="the state has 2 K/V heads"):
        served.client.attend_query(sid, 0, normal(0, 3, 1, 4))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["queries", "keys", "values"])
def test_nan_and_infinity_harm_nobody_else(served: Any, sid: str, where: str, bad: float) -> None:
    """Heads and queries that they do not touch are right, and so is the next request."""
    arrays = {name: normal(7, 2, 6, 4) for name in ("queries", "keys", "values")}
    arrays[where] = arrays[where].copy()
    arrays[where][0, 2, 1] = bad
    served.client.attend_store(sid, 0, arrays["keys"], arrays["values"])
    out, lse = served.client.attend_query(sid, 0, arrays["queries"])
    clean = {name: array[1:] for name, array in arrays.items()}
    served.check(out[1:], lse[1:], *clean.values(), [0])
    assert served.client.ping() == "PONG"


def test_large_queries_come_back_in_order(served: Any, sid: str) -> None:
    """They are computed on another thread, while small ones are answered at once."""
    keys, values = normal(3, 2, 2, 3000, 16)
    small, large = normal(4, 2, 1, 16), normal(5, 4, 400, 16)
    served.client.attend_store(sid, 0, keys, values)
    calls = [
        type(served.client).attend_query(sid, 0, queries)
        for queries in (small, large, small, large, small)
    ]
    for found, queries in zip(
        served.client.pipeline(calls), (small, large, small, large, small), strict=True
    ):
        served.check(*found, queries, keys, values, np.repeat([0, 1], len(queries) // 2))


def test_a_pipeline_sees_its_own_store(served: Any, sid: str) -> None:
    """Which is large enough for another thread where it is converted."""
    keys, values = normal(3, 2, 4, 2000, 64)
    queries = normal(4, 4, 1, 64)
    client = type(served.client)
    calls: list[Any] = [client.attend_store(sid, 0, keys, values)]
    calls += [client.attend_query(sid, 0, queries)]
    stored, found = served.client.pipeline(calls)
    assert stored is None
    served.check(*found, queries, keys, values, range(4))
