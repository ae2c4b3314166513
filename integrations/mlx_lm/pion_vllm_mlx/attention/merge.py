"""Attention over prefix and suffix from attention over the prefix: an online softmax in one step.

To each query its prefix is a single key: the LSE is its score, the output its value. So scores of
the suffix, the LSE and a sink, where there is one, go through one softmax (Milakov and Gimelshein
2018, arXiv:1805.02867). Queries of the heads that share a K/V head are rows of one matrix, (H_kv,
R, D) with R = H_q / H_kv * M, so nothing is repeated for GQA. In fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from pion_vllm_mlx.attention.suffix import Query


class Partial(NamedTuple):
    """Attention over the prefix: `out` (H_kv, R, D), `lse` (H_kv, R)."""

    out: mx.array
    lse: mx.array


def rows_of(query: Query) -> mx.array:
    """The queries as (H_kv, R, D), scaled."""
    heads, dim = query.keys.shape[1], query.queries.shape[-1]
    return query.queries.reshape(heads, -1, dim).astype(mx.float32) * query.scale


def merged(query: Query, rows: mx.array, prefix: Partial) -> mx.array:
    """Attention over prefix and suffix, (1, H_q, M, D) of the queries' dtype; `rows` are
    rows_of(query)."""
    keys, values = (side[0].astype(mx.float32) for side in (query.keys, query.values))
    _, query_heads, count, _ = query.queries.shape
    heads, suffix, _ = keys.shape
    by_head = (heads, query_heads // heads, count)  # then whatever a row has
    scores = (rows @ keys.swapaxes(-1, -2)).reshape(*by_head, suffix)
    if query.mask is not None:
        scores = mx.where(visible(query), scores, -mx.inf)
    logits = [prefix.lse.reshape(*by_head, 1), scores]
    if query.sinks is not None:
        sinks = query.sinks.astype(mx.float32).reshape(*by_head[:2], 1, 1)
        logits.append(mx.broadcast_to(sinks, (*by_head, 1)))
    weights = mx.softmax(mx.concatenate(logits, axis=-1), axis=-1).reshape(*rows.shape[:2], -1)
    out = weights[..., :1] * prefix.out + weights[..., 1 : 1 + suffix] @ values
    return out.reshape(1, query_heads, count, -1).astype(query.queries.dtype)


def visible(query: Query) -> mx.array:
    """Which tokens of the suffix each query sees, booleans (M, S)."""
    count, suffix = query.queries.shape[2], query.keys.shape[2]
    if isinstance(query.mask, mx.array):
        return query.mask.reshape(count, suffix)
    if query.mask is None:
        return mx.ones((count, suffix), mx.bool_)
    return mx.arange(suffix) <= mx.arange(suffix - count, suffix)[:, None]
