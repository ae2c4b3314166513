"""ATTEND.PREFIX.QUERY_SPARSE*: one query a head, over some rows of the prefix.

The rows are named by the client, or are those blocks of tokens whose mean K fits the query best.
"""

from __future__ import annotations

import numpy as np

from pion_server.attention.base import AttentionBackend, Floats, Heads
from pion_server.attention.engine import Cost
from pion_server.attention.sparse import over_blocks, over_blocks_fused, over_rows
from pion_server.commands.attend_args import (
    BLOB_ERROR,
    GROUP,
    MAP_ERRORS,
    STATE_ERRORS,
    Indices,
    attend,
    even_groups,
    head_dim,
    head_map,
    heads,
    indices,
    one_query,
    output,
    query_heads,
    state,
    suffix,
    tokens,
    window,
)
from pion_server.commands.context import Context
from pion_server.commands.layouts import sid_and_layer
from pion_server.commands.registry import Job, command
from pion_server.errors import PionError
from pion_server.wire.values import Payload, Reply

REPLY = "a bulk: fp32 (H_q, 1, D)"


@command(
    "ATTEND.PREFIX.QUERY_SPARSE",
    arity=-9,
    group=GROUP,
    syntax=(
        "ATTEND.PREFIX.QUERY_SPARSE <sid> <layer> <H> <D> <K_sparse_max> <Q> <indices> <counts>"
        " [<fa_window>]"
    ),
    reply="a bulk: fp32 (H, 1, D)",
    errors=(
        *STATE_ERRORS,
        BLOB_ERROR,
        "-ERR counts has",
        "-ERR indices names row",
    ),
)
def query_sparse(ctx: Context, raw: list[Payload]) -> Reply | Job:
    """Attention of one query a head over the rows that are named for this head: `indices` is
    u32 (H, K_sparse_max), of which the first `counts`, u32 (H), count; each row once. A head that
    sees no row gets zeros. H and `fa_window` as in ATTEND.PREFIX.QUERY."""
    args = ctx.arguments(raw)
    sid, layer = sid_and_layer(args)
    count, dim, most = query_heads(args, "H"), head_dim(args), tokens(args, "K_sparse_max", 0)
    asked = one_query(args, count, dim)
    table, counts = indices(args, "indices", count, most), indices(args, "counts", count)
    within = window(args)
    kept = state(ctx, sid, layer, dim)
    groups = even_groups(count, kept.shape[0])
    _check_named(table, counts, kept.shape[1])

    def work(backend: AttentionBackend) -> Reply:
        named = [row[:size].astype("i8") for row, size in zip(table, counts, strict=True)]
        return output(over_rows(kept, asked, groups, named, within))

    return attend(ctx, work, Cost.of_rows(int(counts.max()), asked.shape))


def _cost(kept: tuple[int, int, int], asked: Floats, groups: Heads, chosen: int) -> Cost:
    """Of a query of so many rows, or of all where there are fewer."""
    rows = min(chosen, kept[1])
    return Cost.of_attention(kept, asked.shape, groups) + Cost.of_rows(rows, asked.shape)


def _check_named(table: Indices, counts: Indices, rows: int) -> None:
    """Of the ids (H, K_sparse_max) the first `counts` (H,) have to be rows that there are. No more
    of them than rows, so that naming one again and again makes a query no larger than the whole."""
    most = table.shape[1]
    if counts.max() > most:
        raise PionError(f"counts has {counts.max()}, and K_sparse_max is {most}")
    if counts.max() > rows:
        raise PionError(f"counts has {counts.max()}, and there are {rows} rows, each to name once")
    highest = table[np.arange(most) < counts[:, None]].max(initial=0)
    if highest >= rows:
        raise PionError(f"indices names row {highest}, and there are {rows}")


@command(
    "ATTEND.PREFIX.QUERY_SPARSE_AUTO",
    arity=-10,
    group=GROUP,
    syntax=(
        "ATTEND.PREFIX.QUERY_SPARSE_AUTO <sid> <layer> <H_q> <D> <B> <K_top> <H_kv> <Q> <head_map>"
        " [<fa_window>]"
    ),
    reply=REPLY,
    errors=(*STATE_ERRORS, BLOB_ERROR, *MAP_ERRORS),
)
def query_sparse_auto(ctx: Context, raw: list[Payload]) -> Reply | Job:
    """Attention of one query a head over the `K_top` blocks of `B` tokens, the last one short,
    whose mean K has the highest scores with it. As many blocks as there are, or more, are the whole
    prefix. `head_map` as in ATTEND.PREFIX.QUERY_FUSED, `fa_window` as in ATTEND.PREFIX.QUERY."""
    args = ctx.arguments(raw)
    sid, layer = sid_and_layer(args)
    count, dim = query_heads(args), head_dim(args)
    block, best, kv_heads = tokens(args, "B"), tokens(args, "K_top"), heads(args, "H_kv")
    asked = one_query(args, count, dim)
    groups, within = head_map(args, count, kv_heads), window(args)
    kept = state(ctx, sid, layer, dim, kv_heads)
    return attend(
        ctx,
        lambda backend: output(over_blocks(kept, asked, groups, block, best, within)),
        _cost(kept.shape, asked, groups, block * best),
    )


@command(
    "ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED",
    arity=-13,
    group=GROUP,
    syntax=(
        "ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED <sid> <layer> <H_q> <D> <B> <K_top> <H_kv> <S_suf>"
        " <Q> <K_suf> <V_suf> <head_map> [<fa_window>]"
    ),
    reply=REPLY,
    errors=(*STATE_ERRORS, BLOB_ERROR, *MAP_ERRORS),
)
def query_sparse_auto_fused(ctx: Context, raw: list[Payload]) -> Reply | Job:
    """ATTEND.PREFIX.QUERY_SPARSE_AUTO over the prefix and, in one softmax, attention over all of
    the client's own K and V behind it, fp32 (H_kv, S_suf, D) each, whose last row is that of the
    query. With `fa_window` a query sees that many last tokens, its own included."""
    args = ctx.arguments(raw)
    sid, layer = sid_and_layer(args)
    count, dim = query_heads(args), head_dim(args)
    block, best, kv_heads = tokens(args, "B"), tokens(args, "K_top"), heads(args, "H_kv")
    length = tokens(args, "S_suf")
    asked = one_query(args, count, dim)
    keys, values = suffix(args, kv_heads, length, dim, 1)
    groups, within = head_map(args, count, kv_heads), window(args)
    kept = state(ctx, sid, layer, dim, kv_heads)
    return attend(
        ctx,
        lambda backend: output(
            over_blocks_fused(
                kept, backend.transient(keys, values), asked, groups, block, best, within
            )
        ),
        _cost(kept.shape, asked, groups, block * best)
        + Cost.of_transient(keys.shape, asked.shape, groups),
    )
