"""Blocks of tokens: what stands for each in a choice, and the choice."""

from __future__ import annotations

import mlx.core as mx


def block_means(keys: mx.array, block: int) -> mx.array:
    """The mean key of each block, the last one short: (H, N, D) -> fp32 (H, ceil(N / block), D)."""
    heads, tokens, dim = keys.shape
    count = -(-tokens // block)
    padding = [(0, 0), (0, count * block - tokens), (0, 0)]
    sums = mx.pad(keys.astype(mx.float32), padding).reshape(heads, count, block, dim).sum(axis=2)
    sizes = mx.minimum(tokens - mx.arange(count) * block, block)
    return sums / sizes[:, None]


def best(scores: mx.array, count: int) -> mx.array:
    """Where the `count` highest of the last axis are, or all of them."""
    if count >= scores.shape[-1]:
        return mx.broadcast_to(mx.arange(scores.shape[-1]), scores.shape)
    return mx.argpartition(-scores, count - 1, axis=-1)[..., :count]
