"""Invariant: a sparse query sees exactly the rows that are named, or those blocks whose mean K has
the highest scores with it, head by head; with enough blocks it is the dense query.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from softmax_oracle import as_kept, head_maps, normal

from pion_server.client import PionError

BUDGET = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SEEDS = st.integers(0, 2**32 - 1)


def in_best_blocks(queries: Any, keys: Any, head_map: Any, block: int, count: int) -> Any:
    """Which rows of which head these are: bool (H_q, 1, N)."""
    starts = range(0, keys.shape[1], block)
    means = np.stack([keys[:, s : s + block].mean(axis=1) for s in starts], axis=1)
    scores = np.einsum("hd,hbd->hb", queries[:, 0], means[head_map])
    rank = np.argsort(np.argsort(-scores, axis=-1), axis=-1)
    return np.repeat(rank < count, block, axis=1)[:, None, : keys.shape[1]]


@BUDGET
@given(data=st.data(), seed=SEEDS)
def test_the_best_blocks(served: Any, data: st.DataObject, seed: int) -> None:
    heads, rows, dim, block = (data.draw(st.integers(1, n)) for n in (3, 60, 12, 12))
    count = data.draw(st.integers(1, rows // block + 2))
    head_map = data.draw(head_maps(heads))
    keys, values = normal(seed, 2, heads, rows, dim)
    queries = normal(seed + 1, head_map.size, 1, dim)
    served.client.attend_store("blocks", 0, keys, values)
    out = served.client.attend_query_sparse_auto(
        "blocks", 0, queries, head_map, heads, block=block, top_blocks=count
    )
    seen = in_best_blocks(queries, as_kept(served.backend, keys), head_map, block, count)
    served.check(out, None, queries, keys, values, head_map, seen)


def test_a_needle_is_found(served: Any, sid: str) -> None:
    """Among 64 blocks the one that fits the query, and the answer is its row alone."""
    keys, values = normal(1, 2, 2, 4096, 32)
    queries = normal(2, 4, 1, 32)
    keys[:, 1000] = 60 * queries[[0, 2], 0] / np.linalg.norm(queries[[0, 2], 0], axis=-1)[:, None]
    served.client.attend_store(sid, 0, keys, values)
    out = served.client.attend_query_sparse_auto(
        sid, 0, queries, [0, 0, 1, 1], 2, block=64, top_blocks=4
    )
    for head, kv_head in ((0, 0), (2, 1)):
        np.testing.assert_allclose(out[head, 0], values[kv_head, 1000], rtol=2e-2, atol=2e-2)


def test_all_blocks_are_the_dense_query(served: Any, sid: str) -> None:
    keys, values = normal(1, 2, 2, 100, 8)
    queries = normal(2, 2, 1, 8)
    served.client.attend_store(sid, 0, keys, values)
    dense, _ = served.client.attend_query(sid, 0, queries, window=30)
    for block, count in ((7, 15), (100, 1), (1000, 9), (1, 100)):
        out = served.client.attend_query_sparse_auto(
            sid, 0, queries, [0, 1], 2, block=block, top_blocks=count, window=30
        )
        np.testing.assert_allclose(out, dense, rtol=1e-4, atol=1e-5)


@BUDGET
@given(data=st.data(), seed=SEEDS)
def test_rows_that_the_client_names(served: Any, data: st.DataObject, seed: int) -> None:
    rows = data.draw(st.integers(1, 30))
    window = data.draw(st.none() | st.integers(1, rows))
    named = [
        data.draw(st.lists(st.integers(0, rows - 1), unique=True, max_size=rows)) for _ in range(4)
    ]
    keys, values = normal(seed, 2, 2, rows, 8)
    queries = normal(seed + 1, 4, 1, 8)
    served.client.attend_store("named", 0, keys, values)
    out = served.client.attend_query_sparse("named", 0, queries, named, window=window)
    row = np.arange(rows)
    seen = np.stack([np.isin(row, each) & (row >= rows - (window or rows)) for each in named])
    served.check(out, None, queries, keys, values, [0, 0, 1, 1], seen[:, None])


def test_rows_that_are_not_there(served: Any, sid: str) -> None:
    served.client.attend_store(sid, 0, *normal(1, 2, 2, 5, 4))
    with pytest.raises(PionError, match="indices names row 5, and there are 5"):
        served.client.attend_query_sparse(sid, 0, normal(2, 2, 1, 4), [[0], [5, 1]])
