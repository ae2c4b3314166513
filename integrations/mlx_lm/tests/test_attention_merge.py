"""Prefix and suffix, merged, are attention over both: any shapes, masks, sinks and scores."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st
from pion_vllm_mlx.attention.blocks import best, block_means
from pion_vllm_mlx.attention.merge import Partial, merged, rows_of
from pion_vllm_mlx.attention.suffix import Mask, Query
from pion_vllm_mlx.attention.wire import continued

Array = npt.NDArray[Any]


def softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def oracle(query: Query, keys: Array, values: Array, seen: Array) -> Array:
    """In float64, one head at a time; `seen` (M, N + S)."""
    queries = np.asarray(query.queries[0], np.float64)
    group = len(queries) // len(keys)
    outs = []
    for head, rows in enumerate(queries):
        scores = np.where(seen, query.scale * rows @ keys[head // group].T, -np.inf)
        if query.sinks is not None:
            sink = np.full((len(rows), 1), float(query.sinks[head].item()))
            scores = np.concatenate([scores, sink], axis=-1)
        outs.append(softmax(scores)[:, : seen.shape[1]] @ values[head // group])
    return np.stack(outs)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Query, Array, Array]:
    """A query, and K and V of its prefix, (H_kv, N, D)."""
    heads, group, dim = (draw(st.integers(1, 3)) for _ in range(3))
    tokens, suffix = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    count = draw(st.integers(1, suffix))
    size = draw(st.sampled_from([0.1, 1.0, 30.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def values(*shape: int) -> mx.array:
        return mx.array(rng.normal(size=shape).astype(np.float32))

    masks: list[Mask] = ["causal", mx.array(np.tri(count, suffix, suffix - count, dtype=bool))]
    if count == 1:
        masks.append(None)
    query = Query(
        values(1, heads * group, count, dim) * size,
        values(1, heads, suffix, dim) * size,
        values(1, heads, suffix, dim),
        draw(st.sampled_from(masks)),
        draw(st.sampled_from([dim**-0.5, 1.0])),
        values(heads * group) if draw(st.booleans()) else None,
    )
    return query, *(np.asarray(values(heads, tokens, dim) * size) for _ in range(2))


def partial_of(rows: mx.array, keys: Array, values: Array) -> Partial:
    scores = rows @ mx.array(keys).swapaxes(-1, -2)
    lse = mx.logsumexp(scores, axis=-1)
    return Partial(mx.exp(scores - lse[..., None]) @ mx.array(values), lse)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_both_ways_to_go_on_are_attention_over_everything(
    case: tuple[Query, Array, Array],
) -> None:
    query, keys, values = case
    count, suffix = query.queries.shape[2], query.keys.shape[2]
    seen = np.tri(count, keys.shape[1] + suffix, keys.shape[1] + suffix - count, dtype=bool)
    every_key, every_value = (
        np.concatenate([np.asarray(far, np.float64), np.asarray(near[0], np.float64)], axis=1)
        for far, near in ((keys, query.keys), (values, query.values))
    )
    wanted = oracle(query, every_key, every_value, seen)
    rows = rows_of(query)
    found = merged(query, rows, partial_of(rows, keys, values))
    at_home = continued(query, mx.array(keys[None]), mx.array(values[None]))
    for out in (found, at_home):
        assert out.shape == query.queries.shape
        error = np.abs(np.asarray(out[0], np.float64) - wanted).max()
        # With scores of thousands, fp32 leaves their differences few digits.
        assert error <= 3e-4 * max(1.0, np.abs(wanted).max())


@given(st.integers(1, 40), st.integers(1, 12))
def test_a_block_is_as_long_as_there_are_tokens(tokens: int, block: int) -> None:
    keys = np.random.default_rng(tokens).normal(size=(2, tokens, 3)).astype(np.float32)
    means = np.asarray(block_means(mx.array(keys), block))
    wanted = [keys[:, at : at + block].mean(axis=1) for at in range(0, tokens, block)]
    assert np.allclose(means, np.stack(wanted, axis=1), atol=1e-5)


@given(st.integers(1, 9), st.integers(1, 12))
def test_the_best_are_the_highest(count: int, blocks: int) -> None:
    scores = np.random.default_rng(count).normal(size=(2, 3, blocks)).astype(np.float32)
    found = np.sort(np.asarray(best(mx.array(scores), count)), axis=-1)
    wanted = np.sort(np.argsort(-scores, axis=-1)[..., :count], axis=-1)
    assert np.array_equal(found, wanted)
