"""Dense queries: over a prefix, and over a prefix and the suffix that the client brings.

A suffix of S rows follows the N rows of the prefix; its last M rows are those of the M queries, so
query m stands at position N + S - M + m and sees what is not after it. With a window of W tokens
(sliding-window attention) a query at position p sees positions above p - W only. A query without a
suffix stands behind the prefix, and its window is the prefix's last W rows, whatever M is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pion_server.attention.base import Floats, Heads, Partial, Resident, Spans


def dense(prefix: Resident, queries: Floats, head_map: Heads, window: int | None = None) -> Partial:
    """Queries (H_q, M, D) over the prefix."""
    seen = None if window is None else prefix_spans(prefix, queries, window)
    return prefix.attend(queries, head_map, seen)


def together(
    prefix: Resident, asked: Sequence[Floats], head_map: Heads, window: int | None = None
) -> list[Partial]:
    """What dense() answers to the queries (H_q, M_i, D) of several clients, in one product: K and V
    are read once for all of them."""
    found = dense(prefix, np.concatenate(asked, axis=1), head_map, window)
    ends = np.cumsum([queries.shape[1] for queries in asked])[:-1]
    outs, lses = np.split(found.out, ends, axis=1), np.split(found.lse, ends, axis=1)
    return [Partial(out, lse) for out, lse in zip(outs, lses, strict=True)]


def fused(
    prefix: Resident,
    suffix: Resident,
    queries: Floats,
    head_map: Heads,
    window: int | None = None,
) -> Partial:
    """Queries (H_q, M, D), M <= S, over the prefix and, in causal order, the suffix."""
    seen = None if window is None else prefix_spans(prefix, queries, window, suffix)
    return merge(
        prefix.attend(queries, head_map, seen),
        attend_suffix(suffix, queries, head_map, window),
    )


def attend_suffix(
    suffix: Resident, queries: Floats, head_map: Heads, window: int | None = None
) -> Partial:
    """Queries (H_q, M, D), M <= S, over the suffix alone, in causal order."""
    rows = suffix.shape[1]
    stop = np.arange(rows - queries.shape[1], rows) + 1
    start = np.zeros_like(stop) if window is None else np.maximum(stop - window, 0)
    return suffix.attend(queries, head_map, np.stack([start, stop], axis=1))


def prefix_spans(
    prefix: Resident, queries: Floats, window: int | None, suffix: Resident | None = None
) -> Spans:
    """What each query sees of the prefix: (M, 2)."""
    rows, count = prefix.shape[1], queries.shape[1]
    position = np.full(count, rows - 1)
    if suffix is not None:
        position = rows + suffix.shape[1] - count + np.arange(count)
    start = np.zeros(count, np.int64)
    if window is not None:
        start = np.clip(position - window + 1, 0, rows)
    return np.stack([start, np.full(count, rows)], axis=1)


@np.errstate(divide="ignore", over="ignore", invalid="ignore")
def merge(first: Partial, second: Partial) -> Partial:
    """Attention over the rows of both, which have none in common: each output weighs the
    exponential of its LSE (online softmax, arXiv:1805.02867)."""
    top: Floats = np.maximum(first.lse, second.lse)
    top[np.isneginf(top)] = 0  # neither saw a row
    weights = np.exp(first.lse - top), np.exp(second.lse - top)
    total: Floats = weights[0] + weights[1]
    lse = np.log(total) + top
    total[total == 0] = 1
    shares = [(weight / total)[..., None] for weight in weights]
    return Partial(first.out * shares[0] + second.out * shares[1], lse)
