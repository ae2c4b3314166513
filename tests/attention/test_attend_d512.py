"""Invariant: every head_dim that models have is exact, 512 included (Gemma 4's full-attention
layers), for one query and for many, with and without grouped heads."""

from __future__ import annotations

import numpy as np
import pytest
from softmax_oracle import BACKENDS, as_kept, assert_near, attention, make, normal

HEAD_DIMS = [32, 64, 96, 128, 160, 192, 256, 512]


@pytest.mark.parametrize("query_heads", [2, 6])
@pytest.mark.parametrize("count", [1, 17])
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_head_dim_is_exact(backend: str, dim: int, count: int, query_heads: int) -> None:
    keys, values = normal(dim, 2, 2, 300, dim)
    queries = normal(dim + 1, query_heads, count, dim)
    head_map = np.repeat(np.arange(2, dtype=np.uint8), query_heads // 2)
    got = make(backend).resident(keys, values).attend(queries, head_map)
    keys, values = as_kept(backend, keys), as_kept(backend, values)
    assert_near(got, attention(queries, keys, values, head_map), queries, keys, values)
