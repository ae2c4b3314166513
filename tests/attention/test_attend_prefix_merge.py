"""Invariant: attention over parts of the rows, merged, is attention over all of them; and a query
over a prefix and its suffix sees exactly the positions that causal order and a window let it see.

The mathematics of merging needs no backend: its parts come from the float64 oracle.
"""

from __future__ import annotations

from functools import reduce

import numpy as np
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

from pion_server.attention.base import Partial
from pion_server.attention.merge import dense, fused, merge, together

BUDGET = settings(max_examples=60, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)


@BUDGET
@given(data=st.data(), seed=SEEDS)
def test_any_split_of_the_rows_merges_to_the_whole(data: st.DataObject, seed: int) -> None:
    rows, dim, parts = (data.draw(st.integers(1, most)) for most in (40, 32, 5))
    head_map = data.draw(head_maps(3))
    keys, values = normal(seed, 2, 3, rows, dim)
    queries = normal(seed + 1, head_map.size, 4, dim, scale=data.draw(st.sampled_from([1, 100])))
    part_of = np.array(data.draw(st.lists(st.integers(0, parts - 1), min_size=rows, max_size=rows)))
    pieces = [
        Partial(*(piece.astype(np.float32) for piece in attention(*sides, head_map, part_of == i)))
        for i in data.draw(st.permutations(range(parts)))
        for sides in [(queries, keys, values)]
    ]
    wanted = attention(queries, keys, values, head_map)
    assert_near(reduce(merge, pieces), wanted, queries, keys, values)


@pytest.mark.parametrize("lse", [0.0, 1e4, -1e4, -np.inf])
def test_what_saw_nothing_changes_nothing(lse: float) -> None:
    nothing = Partial(np.zeros((2, 3, 4), np.float32), np.full((2, 3), -np.inf, np.float32))
    something = Partial(normal(1, 2, 3, 4) * np.isfinite(lse), np.full((2, 3), lse, np.float32))
    for merged in (merge(nothing, something), merge(something, nothing)):
        np.testing.assert_array_equal(merged.out, something.out)
        np.testing.assert_array_equal(merged.lse, something.lse)


def test_logits_far_apart_leave_the_greater_part_alone() -> None:
    out, other = normal(2, 1, 1, 8), normal(3, 1, 1, 8)
    high, low = np.full((1, 1), 1e4, np.float32), np.full((1, 1), -1e4, np.float32)
    merged = merge(Partial(out, high), Partial(other, low))
    np.testing.assert_array_equal(merged.out, out)
    np.testing.assert_array_equal(merged.lse, high)


@pytest.mark.parametrize("backend", BACKENDS)
@BUDGET
@given(data=st.data(), seed=SEEDS)
def test_prefix_and_suffix_are_one_causal_sequence(
    backend: str, data: st.DataObject, seed: int
) -> None:
    rows, length = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 20))
    count = data.draw(st.integers(1, length))
    window = data.draw(st.none() | st.integers(1, 60))
    head_map = data.draw(head_maps(2))
    keys, values = normal(seed, 2, 2, rows + length, 16)
    queries = normal(seed + 1, head_map.size, count, 16)
    maker = make(backend)
    prefix = maker.resident(keys[:, :rows], values[:, :rows])
    suffix = maker.transient(keys[:, rows:], values[:, rows:])
    got = fused(prefix, suffix, queries, head_map, window)
    for side in (keys, values):
        side[:, :rows] = as_kept(backend, side[:, :rows])
    row, position = np.arange(rows + length), np.arange(rows + length)[-count:, None]
    seen = (row <= position) & (row > position - (window or rows + length))
    assert_near(got, attention(queries, keys, values, head_map, seen), queries, keys, values)


@pytest.mark.parametrize("window", [1, 3, 9, 10, 11, 10**6, None])
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_suffix_a_window_is_the_last_rows_of_the_prefix(
    backend: str, window: int | None
) -> None:
    keys, values = normal(4, 2, 2, 10, 16)
    queries, head_map = normal(5, 3, 4, 16), np.array([1, 0, 1], np.uint8)
    got = dense(make(backend).resident(keys, values), queries, head_map, window)
    keys, values = as_kept(backend, keys), as_kept(backend, values)
    seen = np.arange(10) >= 10 - (window or 10)
    assert_near(got, attention(queries, keys, values, head_map, seen), queries, keys, values)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_clients_asking_together_get_what_each_would_get_alone(
    backend: str, window: int | None
) -> None:
    keys, values = normal(6, 2, 2, 50, 16)
    head_map = np.array([0, 1, 1], np.uint8)
    asked = [normal(seed, 3, count, 16) for seed, count in enumerate([1, 4, 1, 2])]
    found = together(make(backend).resident(keys, values), asked, head_map, window)
    keys, values = as_kept(backend, keys), as_kept(backend, values)
    seen = np.arange(50) >= 50 - (window or 50)
    for queries, got in zip(asked, found, strict=True):
        wanted = attention(queries, keys, values, head_map, seen)
        assert_near(got, wanted, queries, keys, values)
