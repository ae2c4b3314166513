"""Invariant: the best blocks of the prefix and all of the suffix are one softmax."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from softmax_oracle import as_kept, head_maps, normal

from .test_attend_sparse_auto import in_best_blocks

BUDGET = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@BUDGET
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_any_shape(served: Any, data: st.DataObject, seed: int) -> None:
    heads, rows, suffix, block = (data.draw(st.integers(1, n)) for n in (3, 60, 9, 12))
    count = data.draw(st.integers(1, rows // block + 2))
    head_map = data.draw(head_maps(heads))
    keys, values = normal(seed, 2, heads, rows + suffix, 8)
    queries = normal(seed + 1, head_map.size, 1, 8)
    served.client.attend_store("blocks", 1, keys[:, :rows], values[:, :rows])
    out = served.client.attend_query_sparse_auto_fused(
        *("blocks", 1, queries, keys[:, rows:], values[:, rows:], head_map),
        block=block,
        top_blocks=count,
    )
    kept = as_kept(served.backend, keys[:, :rows])
    of_prefix = in_best_blocks(queries, kept, head_map, block, count)
    of_suffix = np.ones((head_map.size, 1, suffix), bool)
    seen = np.concatenate([of_prefix, of_suffix], axis=-1)
    served.check(out, None, queries, keys, values, head_map, seen, sent_along=suffix)


def test_all_blocks_are_the_dense_query(served: Any, sid: str) -> None:
    keys, values = normal(1, 2, 2, 110, 8)
    queries, groups = normal(2, 4, 1, 8), [0, 0, 1, 1]
    suffix = [side[:, 100:] for side in (keys, values)]
    served.client.attend_store(sid, 0, keys[:, :100], values[:, :100])
    for window in (None, 5, 60):
        dense = served.client.attend_query_fused(sid, 0, queries, *suffix, groups, window=window)
        sparse = served.client.attend_query_sparse_auto_fused(
            sid, 0, queries, *suffix, groups, block=7, top_blocks=15, window=window
        )
        np.testing.assert_allclose(sparse, dense, rtol=1e-4, atol=1e-5)
