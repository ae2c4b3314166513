"""Attention on a CPU: numpy and its BLAS. Also the reference for every other backend.

One K/V head at a time, all queries of the query heads that share it in one product; K and V are
read where they lie. A product runs in tiles of rows that BLAS multiplies without packing K first,
which for few queries costs more than the product (H=8 N=2048 D=128, 4 queries: 0.23 ms tiled, 1.4
in one piece). fp16 residents are widened tile by tile. BLAS gets one thread in this process: its
own threads spin, and a server has other work for its cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from threadpoolctl import threadpool_limits

from pion_server.attention.base import Floats, Heads, Partial, Rows, Spans
from pion_server.attention.half import Halves, narrow, widen

PRODUCT = 1 << 19  # multiply-adds of a tile: OpenBLAS packs the operands of larger products
TILE_ROWS = 128  # at least: below it the call costs more than the product
WIDENED = 1 << 16  # values widened at a time: 256 KB stay in the cache until they are used
SCORES = 1 << 21  # scores of one head held at a time: 8 MB
FEW_MEANS = 8  # rows a block from which on its means are kept: an eighth of K at most


class NumpyResident:
    """K and V as (H, N, D) arrays, fp32 or fp16, and the block means asked for last."""

    def __init__(self, keys: Floats | Halves, values: Floats | Halves) -> None:
        self._keys, self._values = keys, values
        self._means = (0, np.empty((0, 0, 0), np.float32))

    @property
    def shape(self) -> tuple[int, int, int]:
        heads, rows, dim = self._keys.shape
        return heads, rows, dim

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def attend(self, queries: Floats, head_map: Heads, spans: Spans | None = None) -> Partial:
        heads, rows, dim = self.shape
        everything = np.tile(np.array([[0, rows]]), (queries.shape[1], 1))
        seen = everything if spans is None else spans
        result = _empty(queries.shape)
        for head in range(heads):
            members = np.flatnonzero(head_map == head)
            if members.size:
                out, lse = _attend(
                    self._keys[head],
                    self._values[head],
                    queries[members].reshape(-1, dim),
                    np.tile(seen, (members.size, 1)),
                )
                result.out[members] = out.reshape(members.size, -1, dim)
                result.lse[members] = lse.reshape(members.size, -1)
        return result

    def attend_rows(self, queries: Floats, head_map: Heads, rows: Sequence[Rows]) -> Partial:
        result = _empty(queries.shape)
        for query_head, (head, chosen) in enumerate(zip(head_map, rows, strict=True)):
            result.out[query_head], result.lse[query_head] = _attend(
                self._keys[head].take(chosen, axis=0),
                self._values[head].take(chosen, axis=0),
                queries[query_head],
                np.array([[0, chosen.size]]),
            )
        return result

    def block_means(self, block: int) -> Floats:
        if self._means[0] == block:
            return self._means[1]
        starts = np.arange(0, self.shape[1], block)
        counts = np.diff(starts, append=self.shape[1]).astype(np.float32)[:, None]
        means = np.empty((self.shape[0], starts.size, self.shape[2]), np.float32)
        for head, keys in enumerate(self._keys):
            np.divide(np.add.reduceat(_wide(keys), starts), counts, out=means[head])
        if block >= FEW_MEANS:
            self._means = (block, means)
        return means


class NumpyBackend:
    """The protocol `AttentionBackend`. `fp16`: residents are kept as halves, computed in fp32."""

    name = "numpy"

    def __init__(self, fp16: bool = False) -> None:
        self._fp16 = fp16
        threadpool_limits(limits=1, user_api="blas")

    def resident(self, keys: Floats, values: Floats) -> NumpyResident:
        if self._fp16:
            return NumpyResident(narrow(keys), narrow(values))
        return self.transient(keys, values)

    def transient(self, keys: Floats, values: Floats) -> NumpyResident:
        return NumpyResident(_aligned(keys), _aligned(values))


def _aligned(rows: Floats) -> Floats:
    """Most often the same array. numpy would copy for every query what a frame left at an odd
    address."""
    return np.require(rows, np.float32, ("C_CONTIGUOUS", "ALIGNED"))


def _empty(shape: tuple[int, ...]) -> Partial:
    return Partial(np.empty(shape, np.float32), np.empty(shape[:-1], np.float32))


def _wide(rows: Floats | Halves) -> Floats:
    return widen(rows.view(np.float16)) if rows.dtype == np.float16 else rows.view(np.float32)


def _tiles(rows: Floats | Halves, step: int) -> Iterator[tuple[slice, Floats]]:
    """`rows` in fp32, `step` of them at a time (fewer where they must be widened)."""
    if rows.dtype == np.float16:
        step = min(step, max(1, WIDENED // rows.shape[1]))
    for start in range(0, len(rows), step):
        tile = slice(start, start + step)
        yield tile, _wide(rows[tile])


def _attend(
    keys: Floats | Halves, values: Floats | Halves, queries: Floats, spans: Spans
) -> tuple[Floats, Floats]:
    """Queries (Q, D), each with its span, over one head's rows (N, D): out (Q, D), LSE (Q,)."""
    out, lse = _empty(queries.shape)
    scaled = queries * np.float32(queries.shape[1] ** -0.5)
    step = max(1, SCORES // max(1, len(keys)))
    for start in range(0, len(queries), step):
        tile = slice(start, start + step)
        first, last = int(spans[tile, 0].min()), int(spans[tile, 1].max())
        if first >= last:
            out[tile], lse[tile] = 0, -np.inf
            continue
        scores = _scores(keys[first:last], scaled[tile])
        _hide(scores, spans[tile] - first)
        total, lse[tile] = _exponentiate(scores)
        out[tile] = _weighted(values[first:last], scores) / total[:, None]
    return out, lse


def _scores(keys: Floats | Halves, queries: Floats) -> Floats:
    """(Q, N). K times the queries, each tile turned over: BLAS packs K for the other order."""
    count, dim = queries.shape
    scores = np.empty((count, len(keys)), np.float32)
    columns = np.ascontiguousarray(queries.T)
    for tile, block in _tiles(keys, max(TILE_ROWS, PRODUCT // (count * dim))):
        scores[:, tile] = np.matmul(block, columns).T
    return scores


def _hide(scores: Floats, spans: Spans) -> None:
    """-inf where a query does not see a row. Most calls hide nothing, and do nothing."""
    count = scores.shape[1]
    if spans[:, 0].any() or (spans[:, 1] != count).any():
        row = np.arange(count)
        scores[(row < spans[:, :1]) | (row >= spans[:, 1:])] = -np.inf


def _exponentiate(scores: Floats) -> tuple[Floats, Floats]:
    """Scores become weights in place, to be divided by the totals (Q,); and the LSE (Q,). A query
    that sees nothing has weights of 0, to be divided by 1."""
    top = scores.max(axis=1)
    top[np.isneginf(top)] = 0
    scores -= top[:, None]
    np.exp(scores, out=scores)
    total: Floats = scores.sum(axis=1)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top
    total[total == 0] = 1
    return total, lse


def _weighted(values: Floats | Halves, weights: Floats) -> Floats:
    """Weights (Q, N) times V (N, D)."""
    out = np.zeros((len(weights), values.shape[1]), np.float32)
    for tile, block in _tiles(values, len(values)):
        out += np.matmul(weights[:, tile], block)
    return out
