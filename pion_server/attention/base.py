"""What a backend is: K/V that it keeps in its own form, and attention of queries over them.

Shapes: H K/V heads, N rows (tokens), D values a head, H_q query heads, M queries a head. All arrays
that come in and go out are fp32, C-ordered numpy. `head_map`, uint8 (H_q,), is the K/V head of each
query head (GQA); the caller has checked that each is below H. Scores are scaled by 1/sqrt(D). The
log-sum-exp (LSE) beside an output is the natural logarithm of the sum of exp(score) of the rows it
saw; with it two partial results become one (online softmax; Milakov and Gimelshein 2018,
arXiv:1805.02867).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
Heads: TypeAlias = npt.NDArray[np.uint8]
Rows: TypeAlias = npt.NDArray[np.int64]
Spans: TypeAlias = npt.NDArray[np.int64]  # (M, 2): query m sees rows [spans[m, 0], spans[m, 1])

# The score of a row that a query does not see. Not -inf, which a GPU's fast mathematics need not
# keep, and whose difference with itself is no number.
HIDDEN = -1e30
# Block means are kept for blocks of at least so many rows: an eighth of K at most.
KEPT_BLOCK = 8


class BlockMeans:
    """The block means of one K that were asked for last, where they are worth keeping."""

    def __init__(self) -> None:
        self._kept: tuple[int, Floats] | None = None

    def of(self, block: int, make: Callable[[], Floats]) -> Floats:
        kept = self._kept  # read once, since another thread may replace it
        if kept is not None and kept[0] == block:
            return kept[1]
        means = make()
        if block >= KEPT_BLOCK:
            self._kept = block, means
        return means


class Partial(NamedTuple):
    """Attention over some of the rows: `out` (H_q, M, D), `lse` (H_q, M). Where a query saw no row
    its output is 0 and its LSE is -inf."""

    out: Floats
    lse: Floats


class Resident(Protocol):
    """K/V of one layer of one session, kept as a backend wants them. As thread-safe as it is."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, N, D)."""

    @property
    def nbytes(self) -> int:
        """Bytes of K/V that it keeps. The block means asked for last come on top, an eighth of K
        at most."""

    def attend(self, queries: Floats, head_map: Heads, spans: Spans | None = None) -> Partial:
        """Every query (H_q, M, D) over all rows, or query m of every head over its span. A span
        lies within [0, N] and may be empty."""

    def attend_rows(self, queries: Floats, head_map: Heads, rows: Sequence[Rows]) -> Partial:
        """One query a head, (H_q, 1, D), each head over its own rows: `rows[h]` are token ids, in
        any order, possibly none."""

    def block_means(self, block: int) -> Floats:
        """The mean K row of each `block` rows, the last block short: (H, ceil(N / block), D)."""


class AttentionBackend(Protocol):
    """`threads`: whether calls may come from several of them at a time, else only ever from one."""

    name: str
    threads: bool

    def resident(self, keys: Floats, values: Floats) -> Resident:
        """Keep K and V, (H, N, D) each, N >= 1, as fp32 or fp16 (an option of the backend). The
        caller's arrays may be kept, and must not change."""

    def transient(self, keys: Floats, values: Floats) -> Resident:
        """K and V of one call only (a suffix, QUERYBATCH): fp32, whatever residents are."""
