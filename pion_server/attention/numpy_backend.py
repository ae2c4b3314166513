"""Attention on a CPU: numpy and its BLAS. Also the reference for every other backend.

All queries of the query heads that share a K/V head in one product; K and V are read where they
lie. A product runs in tiles of rows that BLAS multiplies without packing K first, which for few
queries costs more than the product (H=8 N=2048 D=128, 4 queries: 0.23 ms tiled, 1.4 in one piece).
fp16 residents are widened tile by tile. Softmax runs over as many heads at once as fit the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pion_server.attention.base import HIDDEN, BlockMeans, Floats, Heads, Partial, Rows, Spans
from pion_server.attention.groups import in_groups
from pion_server.attention.half import Halves, narrow, widen

PRODUCT = 1 << 19  # multiply-adds of a tile: OpenBLAS packs the operands of larger products
TILE_ROWS = 128  # at least: below it the call costs more than the product
WIDENED = 1 << 16  # values widened at a time: 256 KB stay in the cache until they are used
SCORES = 1 << 16  # scores held at a time: 256 KB stay in the cache from one step to the next
TILE_QUERIES = 16  # at least, however many scores those are: each tile of queries reads all of K


class NumpyResident:
    """K and V as (H, N, D) arrays, fp32 or fp16, and the block means asked for last."""

    def __init__(self, keys: Floats | Halves, values: Floats | Halves) -> None:
        self._keys, self._values = keys, values
        self._means = BlockMeans()

    @property
    def shape(self) -> tuple[int, int, int]:
        heads, rows, dim = self._keys.shape
        return heads, rows, dim

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def attend(self, queries: Floats, head_map: Heads, spans: Spans | None = None) -> Partial:
        def product(heads: slice, asked: Floats, seen: Spans | None) -> Partial:
            return _attend(self._keys[heads], self._values[heads], asked, seen)

        return in_groups(product, queries, head_map, self.shape[0], spans)

    def attend_rows(self, queries: Floats, head_map: Heads, rows: Sequence[Rows]) -> Partial:
        out = np.zeros(queries.shape, np.float32)
        lse = np.full(queries.shape[:2], -np.inf, np.float32)
        for query_head, (head, chosen) in enumerate(zip(head_map, rows, strict=True)):
            if chosen.size:
                keys = self._keys[head].take(chosen, axis=0)
                values = self._values[head].take(chosen, axis=0)
                found = _attend(keys[None], values[None], queries[query_head, None], None)
                out[query_head], lse[query_head] = found.out[0], found.lse[0]
        return Partial(out, lse)

    def block_means(self, block: int) -> Floats:
        if block == 1:
            return _wide(self._keys)
        return self._means.of(block, lambda: _block_means(self._keys, block))


class NumpyBackend:
    """The protocol `AttentionBackend`. `fp16`: residents are kept as halves, computed in fp32."""

    name = "numpy"
    threads = True

    def __init__(self, fp16: bool = False) -> None:
        self._fp16 = fp16

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


def _block_means(keys: Floats | Halves, block: int) -> Floats:
    heads, rows, dim = keys.shape
    starts = np.arange(0, rows, block)
    counts = np.diff(starts, append=rows).astype(np.float32)[:, None]
    means = np.empty((heads, starts.size, dim), np.float32)
    for head, of_head in enumerate(keys):
        np.divide(np.add.reduceat(_wide(of_head), starts), counts, out=means[head])
    return means


def _wide(rows: Floats | Halves) -> Floats:
    return widen(rows.view(np.float16)) if rows.dtype == np.float16 else rows.view(np.float32)


def _tiles(rows: Floats | Halves, queries: Floats) -> Iterator[tuple[slice, Floats]]:
    """K or V (h, N, D) in fp32, as many of the N at a time as BLAS multiplies best with queries
    (h, Q, D), and fewer where they must be widened."""
    heads, count, dim = queries.shape
    step = max(TILE_ROWS, PRODUCT // (count * dim))
    if rows.dtype == np.float16:
        step = min(step, max(1, WIDENED // (heads * dim)))
    for start in range(0, rows.shape[1], step):
        tile = slice(start, start + step)
        yield tile, _wide(rows[:, tile])


@np.errstate(over="ignore", invalid="ignore")  # a query may hold infinities and NaN: its affair
def _attend(
    keys: Floats | Halves, values: Floats | Halves, queries: Floats, spans: Spans | None
) -> Partial:
    """Queries (H, Q, D) over rows (H, N, D); query q of every head over its span, if given."""
    heads, rows, dim = keys.shape
    count = queries.shape[1]
    scaled = queries * np.float32(dim**-0.5)
    found = Partial(np.empty_like(scaled), np.empty((heads, count), np.float32))
    step = min(count, max(TILE_QUERIES, SCORES // rows))
    several = max(1, SCORES // (step * rows))
    for start in range(0, count, step):
        asked = slice(start, start + step)
        first, last = (0, rows) if spans is None else _bounds(spans[asked])
        hidden = None if spans is None else _outside(spans[asked], first, last)
        for head in range(0, heads if first < last else 0, several):
            some = slice(head, head + several)
            found.out[some, asked], found.lse[some, asked] = _attend_tile(
                keys[some, first:last], values[some, first:last], scaled[some, asked], hidden
            )
    if spans is not None:
        blind = spans[:, 0] >= spans[:, 1]
        found.out[:, blind], found.lse[:, blind] = 0, -np.inf
    return found


def _bounds(spans: Spans) -> tuple[int, int]:
    """The rows that some of the queries see."""
    return int(spans[:, 0].min()), int(spans[:, 1].max())


def _outside(spans: Spans, first: int, last: int) -> npt.NDArray[np.bool_] | None:
    """(Q, last - first): which of the rows [first, last) each query does not see."""
    if (spans == [first, last]).all():
        return None
    row = np.arange(first, last)
    return (row < spans[:, :1]) | (row >= spans[:, 1:])


def _attend_tile(
    keys: Floats | Halves,
    values: Floats | Halves,
    queries: Floats,
    hidden: npt.NDArray[np.bool_] | None,
) -> Partial:
    """As many heads and queries, scaled, as are computed at once. For a query from which all rows
    are hidden, anything."""
    scores = _scores(keys, queries)
    if hidden is not None:
        np.copyto(scores, HIDDEN, where=hidden)
    top = scores.max(axis=-1, keepdims=True)
    scores -= top
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    out = np.zeros(queries.shape, np.float32)
    for tile, block in _tiles(values, queries):
        out += np.matmul(scores[:, :, tile], block)
    out /= total
    return Partial(out, (top + np.log(total))[:, :, 0])


def _scores(keys: Floats | Halves, queries: Floats) -> Floats:
    """(h, Q, N). K times the queries, each tile turned over: BLAS packs K for the other order."""
    scores = np.empty((*queries.shape[:2], keys.shape[1]), np.float32)
    columns = np.ascontiguousarray(queries.swapaxes(1, 2))
    for tile, block in _tiles(keys, queries):
        scores[:, :, tile] = np.matmul(block, columns).swapaxes(1, 2)
    return scores
