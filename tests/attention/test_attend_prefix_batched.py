"""Invariant: M queries in one request are M requests of one query, whether K/V is kept or sent
along; and what a client brings as a suffix is seen in causal order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from softmax_oracle import head_maps, normal

BUDGET = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SEEDS = st.integers(0, 2**32 - 1)


def test_one_request_or_many(served: Any, sid: str) -> None:
    keys, values = normal(1, 2, 2, 200, 16)
    queries = normal(2, 4, 9, 16)
    served.client.attend_store(sid, 0, keys, values)
    out, lse = served.client.attend_query(sid, 0, queries)
    served.check(out, lse, queries, keys, values, [0, 0, 1, 1])
    for m in range(9):
        alone = np.ascontiguousarray(queries[:, m : m + 1])
        one, no_lse = served.client.attend_query(sid, 0, alone)
        assert no_lse is None
        np.testing.assert_allclose(one, out[:, m : m + 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_k_and_v_that_are_not_kept(served: Any, heads: int, count: int) -> None:
    """They are fp32 as they are sent, also where what is kept is not."""
    keys, values = normal(1, 2, heads, 50, 8)
    queries = normal(2, heads, count, 8)
    out, lse = served.client.attend_querybatch(queries, keys, values)
    assert (lse is None) == (count == 1)
    served.check(out, lse, queries, keys, values, range(heads), sent_along=50)


def test_the_best_rows_of_what_is_not_kept(served: Any) -> None:
    keys, values = normal(1, 2, 1, 50, 8)
    queries = normal(2, 1, 1, 8)
    out, _ = served.client.attend_querybatch(queries, keys, values, top_k=3)
    best = np.argsort(-(queries @ keys.swapaxes(1, 2)).ravel())[:3]
    seen = np.isin(np.arange(50), best)
    served.check(out, None, queries, keys, values, [0], seen, sent_along=50)


@BUDGET
@given(data=st.data(), seed=SEEDS)
def test_any_suffix_is_seen_in_causal_order(served: Any, data: st.DataObject, seed: int) -> None:
    heads, rows, suffix, dim = (data.draw(st.integers(1, n)) for n in (3, 20, 12, 12))
    count = data.draw(st.integers(1, suffix))
    window = data.draw(st.none() | st.integers(1, rows + suffix + 2))
    head_map = data.draw(head_maps(heads))
    keys, values = normal(seed, 2, heads, rows + suffix, dim)
    queries = normal(seed + 1, head_map.size, count, dim)
    served.client.attend_store("fused", 0, keys[:, :rows], values[:, :rows])
    out = served.client.attend_query_fused(
        "fused", 0, queries, keys[:, rows:], values[:, rows:], head_map, window=window
    )
    position = rows + suffix - count + np.arange(count)[:, None]
    row = np.arange(rows + suffix)
    seen = (row <= position) & (row > position - (window or rows + suffix))
    served.check(out, None, queries, keys, values, head_map, seen, sent_along=suffix)
