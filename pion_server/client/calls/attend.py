"""ATTEND.*: attention over K/V that the server keeps. Wire forms: docs/PROTOCOL.md.

H_kv K/V heads, N tokens of the prefix, D values a head, H_q query heads, M queries a head, S tokens
of the caller's own suffix, whose last M are those of the queries. Arrays are sent as fp32; one that
is fp32 and C-contiguous goes out without a copy. `head_map`, (H_q,), is the K/V head of each query
head; calls without one take query heads in even groups. `window`: a query sees only that many last
tokens, its own included. Results are fp32 and read-only.

Raises ColdMiss where the state has to be brought back with `prefix_warm`, and PionError where there
is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pion_server.client.buffers import Buffer
from pion_server.client.calls.base import Call, Name, bulk, done, status, unexpected, words
from pion_server.wire.encode import Argument
from pion_server.wire.values import Reply

Floats: TypeAlias = npt.NDArray[np.float32]
HeadMap: TypeAlias = "Sequence[int] | npt.NDArray[np.integer]"
State: TypeAlias = Literal["HIT", "COLD", "MISS"]
_STATES: dict[str, State] = {"HIT": "HIT", "COLD": "COLD", "MISS": "MISS"}


class Attended(NamedTuple):
    """`out` (H_q, M, D). `lse` (H_q, M), the natural logarithm of each query's sum of exp(score),
    with which two partial results become one; the server sends none for M = 1."""

    out: Floats
    lse: Floats | None


class Warmed(NamedTuple):
    """How many layers are warm now, and how many were skipped since their rows have another size
    than heads * head_dim."""

    layers: int
    skipped: int


def attend_store(sid: Name, layer: int, keys: Floats, values: Floats) -> Call[None]:
    """Have the server keep K and V of a layer, (H_kv, N, D) each, in the place of what is there."""
    head = words("ATTEND.PREFIX.STORE", sid, layer, *keys.shape)
    return Call(head + words(_floats(keys), _floats(values)), done)


def attend_lookup(sid: Name, layer: int) -> Call[State]:
    """`HIT`: it can be queried; `COLD`: after `prefix_warm`; `MISS`: it is not there."""
    return Call(words("ATTEND.PREFIX.LOOKUP", sid, layer), lambda reply: _STATES[status(reply)])


def attend_query(
    sid: Name, layer: int, queries: Floats, *, top_k: int = 0, window: int | None = None
) -> Call[Attended]:
    """Attention of `queries` (H_q, M, D) over the whole prefix; with 0 < `top_k` < N each query
    sees the rows of its `top_k` highest scores only. For a `window` all of them stand on the last
    token of the prefix."""
    heads, _, dim = queries.shape
    head = words("ATTEND.PREFIX.QUERY", sid, layer, heads, dim, top_k, _floats(queries))
    return Call(head + _window(window), lambda reply: _attended(reply, queries.shape))


def attend_query_fused(
    sid: Name,
    layer: int,
    queries: Floats,
    keys_suffix: Floats,
    values_suffix: Floats,
    head_map: HeadMap,
    *,
    window: int | None = None,
) -> Call[Floats]:
    """Attention of `queries` (H_q, M, D) over the prefix and, in causal order, the caller's own K
    and V, (H_kv, S, D): (H_q, M, D)."""
    heads, _, dim = queries.shape
    kv_heads, suffix, _ = keys_suffix.shape
    head = words("ATTEND.PREFIX.QUERY_FUSED", sid, layer, heads, dim, suffix, kv_heads)
    data = words(*map(_floats, (queries, keys_suffix, values_suffix)), _heads(head_map))
    return Call(head + data + _window(window), lambda reply: _out(reply, queries.shape))


def attend_query_sparse(
    sid: Name,
    layer: int,
    queries: Floats,
    rows: Sequence[Sequence[int] | npt.NDArray[np.integer]],
    *,
    window: int | None = None,
) -> Call[Floats]:
    """Attention of one query a head, (H_q, 1, D), each head over the tokens of the prefix that
    `rows[head]` names: (H_q, 1, D)."""
    heads, _, dim = queries.shape
    counts = np.array([len(each) for each in rows], "<u4")
    indices = np.zeros((len(rows), int(counts.max(initial=0))), "<u4")
    for row, each in zip(indices, rows, strict=True):
        row[: len(each)] = each
    head = words("ATTEND.PREFIX.QUERY_SPARSE", sid, layer, heads, dim, indices.shape[1])
    data = words(_floats(queries), indices, counts)
    return Call(head + data + _window(window), lambda reply: _out(reply, queries.shape))


def attend_query_sparse_auto(
    sid: Name,
    layer: int,
    queries: Floats,
    head_map: HeadMap,
    kv_heads: int,
    *,
    block: int,
    top_blocks: int,
    window: int | None = None,
) -> Call[Floats]:
    """Attention of one query a head, (H_q, 1, D), over those `top_blocks` blocks of `block` tokens
    whose mean K fits it best: (H_q, 1, D)."""
    heads, _, dim = queries.shape
    head = words(
        "ATTEND.PREFIX.QUERY_SPARSE_AUTO", sid, layer, heads, dim, block, top_blocks, kv_heads
    )
    data = words(_floats(queries), _heads(head_map))
    return Call(head + data + _window(window), lambda reply: _out(reply, queries.shape))


def attend_query_sparse_auto_fused(
    sid: Name,
    layer: int,
    queries: Floats,
    keys_suffix: Floats,
    values_suffix: Floats,
    head_map: HeadMap,
    *,
    block: int,
    top_blocks: int,
    window: int | None = None,
) -> Call[Floats]:
    """`attend_query_sparse_auto` over the prefix, and densely over the caller's own K and V,
    (H_kv, S, D): (H_q, 1, D)."""
    heads, _, dim = queries.shape
    kv_heads, suffix, _ = keys_suffix.shape
    name = "ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED"
    head = words(name, sid, layer, heads, dim, block, top_blocks, kv_heads, suffix)
    data = words(*map(_floats, (queries, keys_suffix, values_suffix)), _heads(head_map))
    return Call(head + data + _window(window), lambda reply: _out(reply, queries.shape))


def attend_querybatch(
    queries: Floats, keys: Floats, values: Floats, *, top_k: int = 0
) -> Call[Attended]:
    """Attention of `queries` (H_q, M, D) over K and V, (H_kv, N, D), that are sent along and not
    kept. H_q must be H_kv: the wire form has one number of heads."""
    head = words("ATTEND.QUERYBATCH", *keys.shape, top_k)
    data = words(*map(_floats, (queries, keys, values)))
    return Call(head + data, lambda reply: _attended(reply, queries.shape))


def prefix_warm(ns: Name, heads: int, head_dim: int, sid: Name | None = None) -> Call[Warmed]:
    """Make attention state of every layer of a namespace, under the session id `sid` (the
    namespace's name unless given)."""
    target = () if sid is None else words(sid)
    return Call(words("KV.PREFIX.WARM", ns, heads, head_dim) + target, _warmed)


def _floats(array: Floats) -> Buffer:
    return np.ascontiguousarray(array, "<f4")


def _heads(head_map: HeadMap) -> Buffer:
    return np.ascontiguousarray(head_map, np.uint8)


def _window(window: int | None) -> tuple[Argument, ...]:
    return () if window is None else words(window)


def _out(reply: Reply, shape: tuple[int, ...]) -> Floats:
    return np.frombuffer(bulk(reply), "<f4").reshape(shape)


def _attended(reply: Reply, shape: tuple[int, ...]) -> Attended:
    values, size = np.frombuffer(bulk(reply), "<f4"), prod(shape)
    out, lse = values[:size].reshape(shape), values[size:]
    return Attended(out, lse.reshape(shape[:2]) if shape[1] > 1 else None)


def _warmed(reply: Reply) -> Warmed:
    layers, _, skipped = status(reply).partition(" skipped_dim=")
    if not layers.isdecimal():
        unexpected(reply)
    return Warmed(int(layers), int(skipped or 0))
