"""Sparse queries: each over some rows of the prefix, which the caller names or which are chosen.

Chosen are the blocks of `block` rows whose mean K row scores highest with the query, head by head;
the last block may be short. `top_k` of a plain query is the same with blocks of one row. As many
blocks as there are, or more, is a dense query. Windows and suffixes as in merge.py; a block that a
window cuts is scored as a whole one, and only its part inside the window is attended to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pion_server.attention.base import Floats, Heads, Partial, Resident, Rows, Spans
from pion_server.attention.merge import attend_suffix, merge, prefix_spans


def over_rows(
    prefix: Resident,
    queries: Floats,
    head_map: Heads,
    rows: Sequence[Rows],
    window: int | None = None,
) -> Partial:
    """One query a head, (H_q, 1, D), over the rows that the caller names: token ids below N, for
    each query head."""
    start = int(prefix_spans(prefix, queries, window)[0, 0])
    return prefix.attend_rows(queries, head_map, [named[named >= start] for named in rows])


def over_blocks(
    prefix: Resident,
    queries: Floats,
    head_map: Heads,
    block: int,
    count: int,
    window: int | None = None,
) -> Partial:
    """Queries (H_q, M, D), each over its best `count` blocks of the prefix."""
    spans = prefix_spans(prefix, queries, window)
    return _over_best(prefix, queries, head_map, block, count, spans)


def over_blocks_fused(
    prefix: Resident,
    suffix: Resident,
    queries: Floats,
    head_map: Heads,
    block: int,
    count: int,
    window: int | None = None,
) -> Partial:
    """Queries (H_q, M, D), each over its best `count` blocks of the prefix and, in causal order,
    over the suffix."""
    spans = prefix_spans(prefix, queries, window, suffix)
    return merge(
        _over_best(prefix, queries, head_map, block, count, spans),
        attend_suffix(suffix, queries, head_map, window),
    )


def _over_best(
    prefix: Resident, queries: Floats, head_map: Heads, block: int, count: int, spans: Spans
) -> Partial:
    means = prefix.block_means(block)
    if count >= means.shape[1]:
        return prefix.attend(queries, head_map, spans)
    parts = []
    for m, (start, stop) in enumerate(spans):
        rows = [
            _best_rows(means[head], query, block, count, int(start), int(stop))
            for head, query in zip(head_map, queries[:, m], strict=True)
        ]
        parts.append(prefix.attend_rows(queries[:, m : m + 1], head_map, rows))
    return Partial(
        np.concatenate([part.out for part in parts], axis=1),
        np.concatenate([part.lse for part in parts], axis=1),
    )


def _best_rows(means: Floats, query: Floats, block: int, count: int, start: int, stop: int) -> Rows:
    """Ids, in order, of the rows of [start, stop) in the blocks whose means (blocks, D) score
    highest with the query (D,)."""
    first = start // block
    scores = means[first : -(-stop // block)] @ query
    best: Rows = np.arange(scores.size)
    if count < scores.size:
        best = np.sort(np.argpartition(scores, -count)[-count:])
    rows = ((first + best)[:, None] * block + np.arange(block)).ravel()
    return rows[(rows >= start) & (rows < stop)]
