"""KV.STORE, FETCH, INFO and ATTEND.STORE, QUERY: attention indexes.

An index is a namespace whose rows come bit by bit, K beside V, and which is asked for what fits a
query best. Why so and no further: docs/decisions/0006-attention-index.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pion_server.attention.base import AttentionBackend
from pion_server.attention.engine import Cost
from pion_server.attention.table import Item, State
from pion_server.codecs.convert import WireFormat
from pion_server.commands.attend import question
from pion_server.commands.attend_args import (
    BLOB_ERROR,
    QUERY_REPLY,
    answer,
    compute,
    even_groups,
    floats,
    head_dim,
    heads,
    sized,
    state,
    tokens,
)
from pion_server.commands.attend_rows import LayerRows
from pion_server.commands.attend_warm import row_size
from pion_server.commands.context import Context
from pion_server.commands.layouts import (
    FETCH_ERRORS,
    LAYOUT_ERROR,
    outgoing,
    sid_and_layer,
    span,
    start_and_count,
    token,
    uniform,
)
from pion_server.commands.prefix import namespace
from pion_server.commands.registry import Access, Job, command
from pion_server.errors import PionError
from pion_server.store.mutations import DropPrefix, RegisterPrefix, RowBlock, StoreRows
from pion_server.store.prefixes import Prefix, sides
from pion_server.wire.values import OK, Payload, Reply

GROUP = "INDEX"
UNKNOWN = "-ERR unknown index"


@command(
    "KV.STORE",
    arity=7,
    group=GROUP,
    access=Access.WRITE,
    syntax="KV.STORE <ns> <layer> <start> <count> <K_blob> <V_blob>",
    reply="+OK",
    errors=(
        "-ERR a blob of rows has",
        BLOB_ERROR,
        LAYOUT_ERROR,
        "-ERR rows to store must lie in",
        "-OOM",
    ),
)
def store(ctx: Context, raw: list[Payload]) -> Reply:
    """Store `count` rows of K and of V, fp32 in token order, from token `start` on. A namespace
    that is not there is made, with as many values a row as these have, in fp32."""
    args = ctx.arguments(raw)
    ns, layer = sid_and_layer(args)
    start, count = start_and_count(args)
    keys = args.blob("K_blob")
    dim, rest = divmod(keys.nbytes, 4 * count)
    if rest or not dim:
        raise PionError(f"a blob of rows has fp32 values of {count} rows, got {keys.nbytes} bytes")
    values = sized(args, "V_blob", keys.nbytes)
    return _put(ctx, ns, dim, layer, start, (keys, values))


@command(
    "ATTEND.STORE",
    arity=8,
    group=GROUP,
    access=Access.WRITE,
    syntax="ATTEND.STORE <ns> <layer> <H> <N> <D> <K_blob> <V_blob>",
    reply="+OK",
    errors=(BLOB_ERROR, LAYOUT_ERROR, "-OOM"),
)
def append(ctx: Context, raw: list[Payload]) -> Reply | Job:
    """Append N tokens to a layer: K and V as ATTEND.PREFIX.STORE takes them, fp32 (H, N, D). A
    namespace that is not there is made, with H * D values a row in fp32. Unlike the state of
    ATTEND.PREFIX.STORE its rows are stored: logged, evicted and counted as any prefix."""
    args = ctx.arguments(raw)
    ns, layer = sid_and_layer(args)
    shape = heads(args), tokens(args, "N"), head_dim(args)
    both = floats(args, "K_blob", *shape), floats(args, "V_blob", *shape)

    def work(backend: AttentionBackend) -> list[memoryview]:
        return [np.ascontiguousarray(each.transpose(1, 0, 2)).data.cast("B") for each in both]

    def finish(rows: list[memoryview]) -> Reply:
        prefix = ctx.store.prefix(ns)
        start = prefix.keys.layer(layer).rows if prefix is not None else 0
        return _put(ctx, ns, shape[0] * shape[2], layer, start, rows)

    return compute(ctx, work, finish, Cost(nbytes=4 * both[0].nbytes))


def _put(
    ctx: Context, ns: bytes, dim: int, layer: int, start: int, rows: Sequence[memoryview]
) -> Reply:
    """Store rows of K and V, all or none, in a namespace that is made where it is not there."""
    new = ctx.store.prefix(ns) is None
    schema = uniform(dim, "fp32")
    ctx.offer(RegisterPrefix(ns, schema, schema))
    if ctx.ignores(sides(ns)[0]):
        return OK
    count = rows[0].nbytes // (4 * dim)
    blocks = [
        RowBlock(sid, layer, start, count, each) for sid, each in zip(sides(ns), rows, strict=True)
    ]
    try:
        ctx.apply(StoreRows(tuple(blocks)))
    except PionError:
        if new:
            ctx.apply(DropPrefix(ns))
        raise
    return OK


@command(
    "KV.FETCH",
    arity=5,
    group=GROUP,
    syntax="KV.FETCH <ns> <layer> <start> <end>",
    reply="an array of two bulks, K and V: fp32 rows in token order",
    errors=(UNKNOWN, *FETCH_ERRORS),
)
def fetch(ctx: Context, raw: list[Payload]) -> Reply:
    """The rows of a half-open range of tokens, both sides of one layer."""
    args = ctx.arguments(raw)
    ns, layer = sid_and_layer(args)
    start, end = span(args, "the range", token)
    prefix = _index(ctx, ns)
    return [
        outgoing(ctx, side.view(layer, start, end), WireFormat.FP32)
        for side in (prefix.keys, prefix.values)
    ]


@command(
    "KV.INFO",
    arity=2,
    group=GROUP,
    syntax="KV.INFO <ns>",
    reply="null, or a map: tokens (rows of K) and bytes for each layer that has rows, by layer",
)
def info(ctx: Context, raw: list[Payload]) -> Reply:
    """What there is of an index; null where there is no such namespace."""
    prefix = ctx.store.prefix(namespace(ctx.arguments(raw)))
    if prefix is None:
        return None
    sides_of = [(prefix.keys.layer(n), prefix.values.layer(n)) for n in range(prefix.layers)]
    return {
        str(k.index): {"tokens": k.rows, "bytes": k.nbytes + v.nbytes}
        for k, v in sides_of
        if k.rows
    }


@command(
    "ATTEND.QUERY",
    arity=-7,
    group=GROUP,
    syntax="ATTEND.QUERY <ns> <layer> <H> <D> <top_k> <Q_blob> [<fa_window>]",
    reply=QUERY_REPLY,
    errors=(UNKNOWN, "-ERR rows of layer", "-ERR the state has", *FETCH_ERRORS, "-OOM"),
)
def query(ctx: Context, raw: list[Payload]) -> Reply | Job:
    """ATTEND.PREFIX.QUERY over all tokens of a layer. Its attention state, under `<ns>`, is made of
    the rows where it is not warm; so there is no cold miss."""
    args = ctx.arguments(raw)
    ns, layer = sid_and_layer(args)
    asked, prefix, table = question(args), _index(ctx, ns), ctx.tenant.attention
    if table.state(ns, layer) is State.WARM:
        kept = state(ctx, ns, layer, asked.dim)
        return asked.put(ctx, kept, even_groups(asked.heads, kept.shape[0]))
    size = row_size(prefix, layer)
    if not size or size % asked.dim:
        raise PionError(f"rows of layer {layer} are not made of heads of {asked.dim} values")
    groups = even_groups(asked.heads, size // asked.dim)
    count = max(1, prefix.keys.layer(layer).rows)
    rows, shape = LayerRows.of(prefix, layer, count), (size // asked.dim, count, asked.dim)

    def work(backend: AttentionBackend) -> tuple[Item, Reply]:
        kept = backend.resident(*rows.heads(size // asked.dim, asked.dim))
        return Item(ns, layer, kept, ns), answer(asked.over(kept, groups))

    def finish(made: tuple[Item, Reply]) -> Reply:
        item, reply = made
        if rows.current(ctx.store):
            table.put(item)
        return reply

    cost = Cost.of_attention(shape, asked.queries.shape, groups) + asked.cost(shape)
    return compute(ctx, work, finish, rows.cost + cost)


def _index(ctx: Context, ns: bytes) -> Prefix:
    prefix = ctx.store.prefix(ns)
    if prefix is None:
        raise PionError("unknown index; KV.STORE or ATTEND.STORE makes it")
    return prefix
