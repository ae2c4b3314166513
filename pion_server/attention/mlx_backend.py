"""Attention on a GPU: MLX, by its public operations only. The one server file that imports mlx.

All K/V heads and all queries in one product; rows in tiles, so that fp16 residents are widened a
part at a time and scores stay small. mx.fast.scaled_dot_product_attention does not say its LSE, so
softmax is spelt out. Which queries see nothing is known before the device is asked.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

# On CUDA, MLX would round the operands of fp32 products to 10 bits.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

import mlx.core as mx

from pion_server.attention.base import HIDDEN, BlockMeans, Floats, Heads, Partial, Rows, Spans
from pion_server.attention.groups import in_groups

TILE_VALUES = 1 << 25  # values of K widened at a time: 128 MB in fp32
TILE_SCORES = 1 << 25  # scores held at a time
FREED_BYTES = 1 << 28  # of freed memory that MLX may hold on to; its own limit is all there is


class MlxResident:
    """K and V as (H, N, D) arrays of the device, fp32 or fp16, and the block means asked for
    last."""

    def __init__(self, keys: Floats, values: Floats, dtype: mx.Dtype) -> None:
        self._keys, self._values = _on_device(keys, dtype), _on_device(values, dtype)
        self._means = BlockMeans()
        mx.eval(self._keys, self._values)

    @property
    def shape(self) -> tuple[int, int, int]:
        heads, rows, dim = self._keys.shape
        return heads, rows, dim

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def attend(self, queries: Floats, head_map: Heads, spans: Spans | None = None) -> Partial:
        def product(heads: slice, asked: Floats, seen: Spans | None) -> Partial:
            if seen is None:
                seen = np.broadcast_to([0, self.shape[1]], (asked.shape[1], 2))
            return _attend(self._keys[heads], self._values[heads], asked, seen[None])

        return in_groups(product, queries, head_map, self.shape[0], spans)

    def attend_rows(self, queries: Floats, head_map: Heads, rows: Sequence[Rows]) -> Partial:
        """As many heads at a time as fit a tile when all have as many rows as the longest."""
        longest = max(len(chosen) for chosen in rows)
        step = max(1, TILE_VALUES // (max(1, longest) * queries.shape[2]))
        tiles = [slice(start, start + step) for start in range(0, len(rows), step)]
        parts = [self._attend_rows(queries[tile], head_map[tile], rows[tile]) for tile in tiles]
        return Partial(*(np.concatenate(each) for each in zip(*parts, strict=True)))

    def _attend_rows(self, queries: Floats, head_map: Heads, rows: Sequence[Rows]) -> Partial:
        counts = np.array([len(chosen) for chosen in rows])
        padded = np.zeros((len(rows), counts.max()), np.int32)
        padded[np.arange(counts.max()) < counts[:, None]] = np.concatenate(rows)
        chosen = mx.array(head_map.astype(np.int32))[:, None], mx.array(padded)
        spans = np.stack([np.zeros_like(counts), counts], axis=-1)[:, None]
        return _attend(self._keys[chosen], self._values[chosen], queries, spans)

    def block_means(self, block: int) -> Floats:
        return self._means.of(block, lambda: _block_means(self._keys, block))


class MlxBackend:
    """The protocol `AttentionBackend`. `fp16`: residents are kept as halves, computed in fp32."""

    name = "mlx"
    threads = False

    def __init__(self, fp16: bool = False) -> None:
        self._dtype = mx.float16 if fp16 else mx.float32
        mx.set_cache_limit(FREED_BYTES)

    def resident(self, keys: Floats, values: Floats) -> MlxResident:
        return MlxResident(keys, values, self._dtype)

    def transient(self, keys: Floats, values: Floats) -> MlxResident:
        return MlxResident(keys, values, mx.float32)


def has_a_gpu() -> bool:
    return bool(mx.default_device() == mx.Device(mx.gpu))


def _on_device(rows: Floats, dtype: mx.Dtype) -> mx.array:
    """A copy. What is beyond the range of fp16 becomes its largest number, not infinity."""
    most = mx.finfo(dtype).max
    return mx.clip(mx.array(rows), -most, most).astype(dtype)


def _block_means(keys: mx.array, block: int) -> Floats:
    """(H, N, D) to (H, ceil(N / block), D)."""
    return np.stack([_block_means_of_head(head, block) for head in keys])


def _block_means_of_head(head: mx.array, block: int) -> Floats:
    rows, dim = head.shape
    whole = rows - rows % block
    wide = head.astype(mx.float32)
    means = wide[:whole].reshape(-1, block, dim).mean(axis=1)
    if whole < rows:
        means = mx.concatenate([means, wide[whole:].mean(axis=0, keepdims=True)])
    return np.array(means)


def _attend(keys: mx.array, values: mx.array, queries: Floats, spans: Spans) -> Partial:
    """Queries (H, Q, D) over K and V (H, N, D). Spans are (1 or H, Q, 2)."""
    heads, count, dim = queries.shape
    out, lse = np.zeros(queries.shape, np.float32), np.full((heads, count), -np.inf, np.float32)
    scaled = mx.array(queries * np.float32(dim**-0.5))
    tile_rows = max(1, min(keys.shape[1], TILE_VALUES // (heads * dim)))
    step = max(1, TILE_SCORES // (heads * tile_rows))
    for tile in (slice(start, start + step) for start in range(0, count, step)):
        seen = spans[:, tile]
        first, last = int(seen[..., 0].min()), int(seen[..., 1].max())
        parts = []
        for start in range(first, last, tile_rows):
            stop = min(start + tile_rows, last)
            parts.append(
                _attend_tile(
                    keys[:, start:stop], values[:, start:stop], scaled[:, tile], seen - start
                )
            )
            mx.eval(parts[-1])
        if parts:
            some = np.broadcast_to(seen[..., 0] < seen[..., 1], (heads, seen.shape[1]))
            found_out, found_lse = _merged(parts)
            out[:, tile][some] = np.array(found_out)[some]
            lse[:, tile][some] = np.array(found_lse)[some]
    return Partial(out, lse)


def _attend_tile(
    keys: mx.array, values: mx.array, queries: mx.array, spans: Spans
) -> tuple[mx.array, mx.array]:
    """Out (H, Q, D) and LSE (H, Q) over these rows. Where a query sees none of them its LSE is
    near HIDDEN, so its output weighs nothing."""
    scores = queries @ keys.astype(mx.float32).swapaxes(1, 2)
    count = keys.shape[1]
    if (spans[..., 0] > 0).any() or (spans[..., 1] < count).any():
        row, seen = mx.arange(count), mx.array(spans.astype(np.int32))
        hidden = (row < seen[..., :1]) | (row >= seen[..., 1:])
        scores = mx.where(hidden, HIDDEN, scores)
    top = scores.max(axis=-1, keepdims=True)
    weights = mx.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    out = weights @ values.astype(mx.float32) / total
    return out, (top + mx.log(total))[..., 0]


def _merged(parts: list[tuple[mx.array, mx.array]]) -> tuple[mx.array, mx.array]:
    """Tiles become one, each weighing the exponential of its LSE."""
    if len(parts) == 1:
        return parts[0]
    outs, lses = mx.stack([out for out, _ in parts]), mx.stack([lse for _, lse in parts])
    top = lses.max(axis=0)
    weights = mx.exp(lses - top)
    total = weights.sum(axis=0)
    return (outs * weights[..., None]).sum(axis=0) / total[..., None], top + mx.log(total)
