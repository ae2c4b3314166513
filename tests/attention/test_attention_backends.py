"""Invariant: every backend computes softmax(Q K^T / sqrt(D)) V and its log-sum-exp, whatever the
shapes, the head map, the rows that a query sees and the size of the logits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from unittest.mock import patch

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
    inside,
    make,
    normal,
    spans,
)

from pion_server.attention.base import AttentionBackend, Partial
from pion_server.attention.merge import fused

BUDGET = settings(max_examples=40, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)
ONE_EACH = np.arange(2, dtype=np.uint8)


@pytest.fixture(params=BACKENDS, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def backend(name: str) -> AttentionBackend:
    return make(name)


@pytest.fixture(params=["as it is", "in small tiles"], scope="module")
def tiling(request: pytest.FixtureRequest, name: str) -> Iterator[None]:
    """Small shapes fit one tile of everything; with these limits they take many."""
    if request.param == "as it is":
        yield
        return
    module = f"pion_server.attention.{name.split()[0]}_backend"
    numpy_tiles = {"PRODUCT": 50, "TILE_ROWS": 5, "WIDENED": 70, "SCORES": 90, "TILE_QUERIES": 3}
    tiles = numpy_tiles if "numpy" in module else {"TILE_VALUES": 200, "TILE_SCORES": 50}
    with patch.multiple(module, **tiles):
        yield


@pytest.mark.usefixtures("tiling")
@BUDGET
@given(data=st.data(), seed=SEEDS)
def test_attention_of_any_shape_is_that_of_the_oracle(
    name: str, backend: AttentionBackend, data: st.DataObject, seed: int
) -> None:
    heads, rows, dim = (data.draw(st.integers(1, most)) for most in (4, 60, 40))
    count = data.draw(st.integers(1, 12))
    head_map = data.draw(head_maps(heads))
    some = data.draw(st.none() | spans(count, rows))
    scale = data.draw(st.sampled_from([1e-4, 1.0, 100.0]))
    keys, values = normal(seed, 2, heads, rows, dim)
    queries = normal(seed + 1, head_map.size, count, dim, scale=scale)
    got = backend.resident(keys, values).attend(queries, head_map, some)
    keys, values = as_kept(name, keys), as_kept(name, values)
    seen = True if some is None else inside(some, rows)
    wanted = attention(queries, keys, values, head_map, seen)
    assert_near(got, wanted, queries, keys, values)


@pytest.mark.usefixtures("tiling")
@BUDGET
@given(data=st.data(), seed=SEEDS)
def test_each_head_sees_the_rows_named_for_it_and_no_other(
    name: str, backend: AttentionBackend, data: st.DataObject, seed: int
) -> None:
    heads, rows, dim = (data.draw(st.integers(1, most)) for most in (4, 40, 40))
    head_map = data.draw(head_maps(heads))
    named = [
        np.array(data.draw(st.lists(st.integers(0, rows - 1), unique=True)), np.int64)
        for _ in head_map
    ]
    keys, values = normal(seed, 2, heads, rows, dim)
    queries = normal(seed + 1, head_map.size, 1, dim)
    got = backend.resident(keys, values).attend_rows(queries, head_map, named)
    keys, values = as_kept(name, keys), as_kept(name, values)
    seen = np.stack([np.isin(np.arange(rows), chosen) for chosen in named])[:, None]
    assert_near(got, attention(queries, keys, values, head_map, seen), queries, keys, values)


@BUDGET
@given(rows=st.integers(1, 70), block=st.integers(1, 80), seed=SEEDS)
def test_block_means_are_means_also_of_the_short_last_block(
    name: str, backend: AttentionBackend, rows: int, block: int, seed: int
) -> None:
    keys, values = normal(seed, 2, 3, rows, 5)
    kept = backend.resident(keys, values)
    exact = as_kept(name, keys).astype(np.float64)
    starts = range(0, rows, block)
    wanted = np.stack([exact[:, start : start + block].mean(axis=1) for start in starts], axis=1)
    for _ in range(2):  # the second time they may have been kept
        np.testing.assert_allclose(kept.block_means(block), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("rows", [1, 2, 300])
def test_logits_of_ten_thousand_do_not_overflow(
    name: str, backend: AttentionBackend, rows: int, sign: int
) -> None:
    keys, values = normal(1, 2, 2, rows, 64)
    keys = np.abs(keys) + np.float32(0.5)
    queries = np.full((2, 3, 64), sign * 10_000 / (64**0.5), np.float32)
    got = backend.resident(keys, values).attend(queries, ONE_EACH)
    keys, values = as_kept(name, keys), as_kept(name, values)
    wanted = attention(queries, keys, values, ONE_EACH)
    assert np.abs(wanted[1]).min() > 9_000
    assert_near(got, wanted, queries, keys, values)


def test_equal_logits_of_ten_thousand_weigh_the_same(name: str, backend: AttentionBackend) -> None:
    keys = np.full((2, 100, 64), 16, np.float32)
    values = np.broadcast_to(np.arange(100, dtype=np.float32)[:, None], (2, 100, 64)).copy()
    queries = np.full((2, 1, 64), 100, np.float32)  # 64 * 16 * 100 / 8 = 12,800
    got = backend.resident(keys, values).attend(queries, ONE_EACH)
    np.testing.assert_allclose(got.out, 49.5, rtol=1e-6)
    np.testing.assert_allclose(got.lse, 12_800 + np.log(100), rtol=1e-6)


def test_one_row_is_its_value(name: str, backend: AttentionBackend) -> None:
    keys, values = normal(2, 2, 2, 1, 48)
    got = backend.resident(keys, values).attend(normal(3, 2, 5, 48), ONE_EACH)
    np.testing.assert_array_equal(got.out, np.repeat(as_kept(name, values), 5, axis=1))


@pytest.mark.parametrize("where", [0, 3, 7])
def test_a_query_that_sees_nothing_is_zero_and_weighs_nothing(
    backend: AttentionBackend, where: int
) -> None:
    kept = backend.resident(*normal(4, 2, 2, 7, 16))
    got = kept.attend(normal(5, 2, 4, 16), ONE_EACH, np.full((4, 2), where))
    assert (got.out == 0).all()
    assert np.isneginf(got.lse).all()


def test_fp16_halves_the_memory_and_what_a_call_brings_stays_fp32(
    name: str, backend: AttentionBackend
) -> None:
    keys, values = normal(6, 2, 2, 50, 32)
    full = keys.nbytes + values.nbytes
    assert backend.resident(keys, values).nbytes == (full // 2 if "fp16" in name else full)
    brought = backend.transient(keys, values)
    assert brought.nbytes == full
    assert brought.shape == backend.resident(keys, values).shape == (2, 50, 32)
    queries = normal(7, 2, 3, 32)
    wanted = attention(queries, keys, values, ONE_EACH)
    assert_near(brought.attend(queries, ONE_EACH), wanted, queries, keys, values)


@pytest.mark.parametrize("backend_name", ["numpy fp16", "mlx fp16"])
def test_fp16_is_as_near_to_unrounded_rows_as_fp16_can_be(backend_name: str) -> None:
    keys, values = normal(8, 2, 8, 2048, 128)
    queries, head_map = normal(9, 8, 2, 128), np.arange(8, dtype=np.uint8)
    got = make(backend_name).resident(keys, values).attend(queries, head_map)
    out, lse = attention(queries, keys, values, head_map)
    assert np.abs(got.out - out).max() < 2e-4
    assert np.abs(got.lse - lse).max() < 2e-4


@pytest.mark.parametrize("backend_name", ["numpy fp16", "mlx fp16"])
def test_what_fp16_cannot_hold_becomes_its_largest_number(backend_name: str) -> None:
    values = np.array([[[1e6, -1e6, 65504, 6e-8, -6e-8, 0, 1e-9]]], np.float32)
    kept = make(backend_name).resident(np.zeros_like(values), values)
    got = kept.attend(np.zeros((1, 1, 7), np.float32), np.zeros(1, np.uint8))
    smallest = 2.0**-24
    wanted = [65504, -65504, 65504, smallest, -smallest, 0, 0]
    if backend_name.startswith("mlx"):  # a device may take the smallest halves for 0
        got.out[0, 0, 3:5], wanted[3:5] = 0, [0, 0]
    np.testing.assert_array_equal(got.out[0, 0], wanted)


def test_rows_at_odd_addresses_or_far_apart_are_taken_as_well(
    name: str, backend: AttentionBackend
) -> None:
    wide = normal(10, 2, 40, 3, 2 * 16)
    frame = np.frombuffer(b"+" + wide.tobytes(), np.uint8)[1:]
    keys, values = frame.view(np.float32).reshape(wide.shape).swapaxes(1, 2)[..., ::2]
    queries, head_map = normal(11, 6, 2, 16), np.array([2, 0, 0, 1, 2, 2], np.uint8)
    got = backend.resident(keys, values).attend(queries, head_map)
    keys, values = as_kept(name, keys), as_kept(name, values)
    assert_near(got, attention(queries, keys, values, head_map), queries, keys, values)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
def test_a_query_that_is_no_number_spoils_no_other(
    name: str, backend: AttentionBackend, poison: float
) -> None:
    keys, values = normal(12, 2, 2, 40, 16)
    queries = normal(13, 2, 5, 16)
    bad = queries.copy()
    bad[:, 2] = poison
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prefix = backend.resident(keys, values)
        got = fused(prefix, backend.transient(keys, values), bad, ONE_EACH)
    keys, values = (np.concatenate([as_kept(name, s), s], axis=1) for s in (keys, values))
    seen = np.arange(80) <= np.arange(75, 80)[:, None]
    out, lse = attention(queries, keys, values, ONE_EACH, seen)
    good = [0, 1, 3, 4]
    rest = Partial(got.out[:, good], got.lse[:, good])
    assert_near(rest, (out[:, good], lse[:, good]), queries, keys, values)
