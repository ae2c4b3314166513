"""Invariant: a sparse query is the dense query over the rows that were chosen, and chosen are the
blocks whose mean key scores highest with the query, head by head."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from softmax_oracle import (
    BACKENDS,
    as_kept,
    assert_near,
    attention,
    head_maps,
    make,
    normal,
)

from pion_server.attention.base import Floats, Heads
from pion_server.attention.sparse import over_blocks, over_blocks_fused, over_rows

BUDGET = settings(max_examples=60, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)
WINDOWS = st.none() | st.integers(1, 80)

Mask = npt.NDArray[np.bool_]


def best_blocks(
    queries: Floats, keys: Floats, head_map: Heads, block: int, count: int, shown: Mask
) -> Mask:
    """(H_q, M, N): the rows of the best blocks among those of which `shown` (M, N) shows a row."""
    rows = keys.shape[1]
    block_of = np.arange(rows) // block
    chosen = np.zeros((*queries.shape[:2], rows), bool)
    for head, m in np.ndindex(queries.shape[:2]):
        blocks = np.unique(block_of[shown[m]])
        means = [keys[head_map[head], block_of == i].mean(axis=0) for i in blocks]
        scores = np.array([mean.astype(np.float64) @ queries[head, m] for mean in means])
        best = blocks[np.argsort(-scores)[:count]]
        chosen[head, m] = np.isin(block_of, best) & shown[m]
    return chosen


@pytest.mark.parametrize("backend", BACKENDS)
@BUDGET
@given(data=st.data(), seed=SEEDS)
def test_blocks_are_chosen_by_their_mean_key_for_each_head(
    backend: str, data: st.DataObject, seed: int
) -> None:
    rows, block, count, asked = (data.draw(st.integers(1, most)) for most in (60, 20, 8, 3))
    window = data.draw(WINDOWS)
    head_map = data.draw(head_maps(2))
    keys, values = normal(seed, 2, 2, rows, 16)
    queries = normal(seed + 1, head_map.size, asked, 16)
    kept = make(backend).resident(keys, values)
    got = over_blocks(kept, queries, head_map, block, count, window)
    keys, values = as_kept(backend, keys), as_kept(backend, values)
    shown = np.tile(np.arange(rows) >= rows - (window or rows), (asked, 1))
    seen = best_blocks(queries, keys, head_map, block, count, shown)
    assert_near(got, attention(queries, keys, values, head_map, seen), queries, keys, values)


@pytest.mark.parametrize("backend", BACKENDS)
@BUDGET
@given(data=st.data(), seed=SEEDS)
def test_chosen_blocks_and_the_whole_suffix_in_causal_order(
    backend: str, data: st.DataObject, seed: int
) -> None:
    rows, block, count, length = (data.draw(st.integers(1, most)) for most in (40, 12, 5, 12))
    asked = data.draw(st.integers(1, length))
    window = data.draw(WINDOWS)
    head_map = data.draw(head_maps(2))
    keys, values = normal(seed, 2, 2, rows + length, 16)
    queries = normal(seed + 1, head_map.size, asked, 16)
    maker = make(backend)
    prefix = maker.resident(keys[:, :rows], values[:, :rows])
    suffix = maker.transient(keys[:, rows:], values[:, rows:])
    got = over_blocks_fused(prefix, suffix, queries, head_map, block, count, window)
    for side in (keys, values):
        side[:, :rows] = as_kept(backend, side[:, :rows])
    row, position = np.arange(rows + length), np.arange(rows + length)[-asked:, None]
    shown = (row <= position) & (row > position - (window or rows + length))
    chosen = best_blocks(queries, keys[:, :rows], head_map, block, count, shown[:, :rows])
    seen = np.concatenate([chosen, np.tile(shown[:, rows:], (head_map.size, 1, 1))], axis=2)
    assert_near(got, attention(queries, keys, values, head_map, seen), queries, keys, values)


@pytest.mark.parametrize("window", [None, 10, 29])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_the_caller_names_are_cut_by_the_window(backend: str, window: int | None) -> None:
    keys, values = normal(1, 2, 2, 40, 16)
    queries, head_map = normal(2, 3, 1, 16), np.array([1, 0, 1], np.uint8)
    named = [np.array([39, 3, 20, 31]), np.array([0, 1]), np.arange(40)]
    got = over_rows(make(backend).resident(keys, values), queries, head_map, named, window)
    keys, values = as_kept(backend, keys), as_kept(backend, values)
    shown = np.arange(40) >= 40 - (window or 40)
    seen = np.stack([np.isin(np.arange(40), rows) & shown for rows in named])[:, None]
    assert_near(got, attention(queries, keys, values, head_map, seen), queries, keys, values)


@pytest.mark.parametrize("count", [4, 5, 1000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_as_many_blocks_as_there_are_is_dense(backend: str, count: int) -> None:
    keys, values = normal(3, 2, 2, 50, 16)  # 4 blocks of 16, the last of 2 rows
    queries, head_map = normal(4, 2, 3, 16), np.array([1, 0], np.uint8)
    kept = make(backend).resident(keys, values)
    got, wanted = over_blocks(kept, queries, head_map, 16, count), kept.attend(queries, head_map)
    np.testing.assert_array_equal(got.out, wanted.out)
    np.testing.assert_array_equal(got.lse, wanted.lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_needle_is_found_among_sixty_four_thousand_rows(backend: str) -> None:
    keys, values = normal(5, 2, 1, 65_536, 32)
    needle, queries = 45_678, normal(6, 1, 1, 32)
    keys[0, needle - 3 : needle + 3] = 20 * queries[0, 0]
    values[0, needle - 3 : needle + 3] = 7
    kept = make(backend).resident(keys, values)
    got = over_blocks(kept, queries, np.zeros(1, np.uint8), 64, 8)
    np.testing.assert_allclose(got.out, 7, rtol=1e-3)
