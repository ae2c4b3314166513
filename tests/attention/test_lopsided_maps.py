"""Invariant: attention takes memory in proportion to the request, and is right, whatever the head
map: also where many query heads share one of many K/V heads."""

from __future__ import annotations

import tracemalloc
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from softmax_oracle import BACKENDS, as_kept, assert_near, attention, inside, make, normal

from pion_server.attention.base import Floats, Partial, Spans
from pion_server.attention.groups import in_groups
from pion_server.attention.numpy_backend import NumpyBackend

HEADS, QUERY_HEADS = 16, 40
MAPS = {
    "all on the first": [0] * QUERY_HEADS,
    "all on the last": [HEADS - 1] * QUERY_HEADS,
    "all but a few on one": [*range(8), *[3] * (QUERY_HEADS - 8)],
    "one query head": [5],
    "backwards": [*range(HEADS)][::-1],
}


@pytest.mark.parametrize("some", [None, [[0, 9], [4, 9], [3, 3]]], ids=["all rows", "spans"])
@pytest.mark.parametrize("head_map", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_map_is_answered_as_by_the_oracle(backend: str, head_map: list[int], some: Any) -> None:
    groups = np.array(head_map, np.uint8)
    keys, values = normal(1, 2, HEADS, 9, 8)
    queries = normal(2, groups.size, 3, 8)
    spans = None if some is None else np.array(some)
    got = make(backend).resident(keys, values).attend(queries, groups, spans)
    keys, values = as_kept(backend, keys), as_kept(backend, values)
    seen = True if spans is None else inside(spans, 9)
    assert_near(got, attention(queries, keys, values, groups, seen), queries, keys, values)


@pytest.mark.parametrize("stray", [0, 255])
def test_memory_is_in_proportion_to_the_request(stray: int) -> None:
    """256 K/V heads, one of which has all query heads but `stray`: padded, 256 times as much."""
    groups = np.zeros(4096, np.uint8)
    groups[:stray] = np.arange(1, stray + 1)
    keys, values = normal(3, 2, 256, 1, 32)
    queries = normal(4, groups.size, 1, 32)
    kept = NumpyBackend().resident(keys, values)
    tracemalloc.start()
    kept.attend(queries, groups)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * queries.nbytes


@pytest.mark.parametrize("head_map", MAPS.values(), ids=MAPS)
def test_no_backend_is_asked_for_more_than_twice_the_queries(head_map: list[int]) -> None:
    groups, asked = np.array(head_map, np.uint8), 0

    def counting(heads: slice, queries: Floats, seen: Spans | None) -> Partial:
        nonlocal asked
        asked += queries.shape[0] * queries.shape[1]
        return Partial(queries, queries[..., 0])

    queries = normal(6, groups.size, 3, 4)
    found = in_groups(counting, queries, groups, HEADS, None)
    assert (found.out == queries).all()
    assert asked <= 2 * 3 * groups.size


def test_a_head_of_many_rows_does_not_make_the_others_as_long() -> None:
    """On MLX heads are padded to the longest of a tile."""
    from pion_server.attention import mlx_backend

    keys, values = normal(7, 2, 2, 100, 4)
    queries, groups = normal(8, 50, 1, 4), np.arange(50, dtype=np.uint8) % 2
    rows = [np.arange(100) if head == 7 else np.array([head]) for head in range(50)]
    sizes: list[int] = []

    def noting(*args: Any) -> Partial:
        sizes.append(args[0].size)
        return attend(*args)

    attend = mlx_backend._attend
    with patch.multiple(mlx_backend, TILE_VALUES=1000, _attend=noting):
        got = make("mlx").resident(keys, values).attend_rows(queries, groups, rows)
    seen = np.stack([np.isin(np.arange(100), each) for each in rows])[:, None]
    assert_near(got, attention(queries, keys, values, groups, seen), queries, keys, values)
    assert max(sizes) <= 1000
