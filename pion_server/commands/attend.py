"""ATTEND.PREFIX.*: attention over K/V that the server keeps; ATTEND.QUERYBATCH keeps none.

What is kept, for how long, and when to use it: docs/ATTENTION.md. Sparse forms: attend_sparse.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from pion_server.attention.base import AttentionBackend, Floats, Heads, Partial, Resident
from pion_server.attention.engine import Cost
from pion_server.attention.merge import attend_suffix, dense, fused, merge
from pion_server.attention.sparse import over_blocks
from pion_server.attention.table import Item, namespace_of
from pion_server.commands.arguments import Arguments
from pion_server.commands.attend_args import (
    BLOB_ERROR,
    GROUP,
    MAP_ERRORS,
    QUERY_REPLY,
    STATE_ERRORS,
    SUFFIX_ERROR,
    answer,
    attend,
    attend_all,
    compute,
    even_groups,
    floats,
    head_dim,
    head_map,
    heads,
    output,
    queries,
    query_heads,
    state,
    suffix,
    tokens,
    window,
)
from pion_server.commands.context import Context
from pion_server.commands.layouts import sid_and_layer
from pion_server.commands.registry import Access, Home, Job, command
from pion_server.wire.values import OK, Payload, Reply, Status


@command(
    "ATTEND.PREFIX.STORE",
    arity=8,
    group=GROUP,
    access=Access.WRITE | Access.UNLOGGED,
    syntax="ATTEND.PREFIX.STORE <sid> <layer> <H> <N> <D> <K_blob> <V_blob>",
    reply="+OK",
    errors=(BLOB_ERROR, "-OOM"),
)
def store(ctx: Context, raw: list[Payload]) -> Reply | Job:
    """Keep K and V of a layer, fp32 (H, N, D) each, for queries: in memory only, in the place of
    what is there. `<ns>` and `<ns>_attn` as session ids stand for the namespace: their state is
    cold once rows of it are stored, and gone when it is dropped or evicted."""
    args = ctx.arguments(raw)
    sid, layer = sid_and_layer(args)
    shape = heads(args), tokens(args, "N"), head_dim(args)
    keys, values = floats(args, "K_blob", *shape), floats(args, "V_blob", *shape)
    table = ctx.tenant.attention
    namespace = sid if sid in ctx.store.prefixes else namespace_of(sid)

    def finish(item: Item) -> Reply:
        table.put(item)
        return OK

    return compute(
        ctx,
        lambda backend: Item(sid, layer, backend.resident(keys, values), namespace),
        finish,
        Cost(nbytes=16 * keys.nbytes),  # where they become fp16; else next to nothing
    )


@command(
    "ATTEND.PREFIX.LOOKUP",
    arity=3,
    group=GROUP,
    syntax="ATTEND.PREFIX.LOOKUP <sid> <layer>",
    reply="+HIT | +COLD | +MISS",
)
def lookup(ctx: Context, raw: list[Payload]) -> Reply:
    """Whether a layer can be queried: at once (HIT), after KV.PREFIX.WARM (COLD), or not."""
    args = ctx.arguments(raw)
    return Status(ctx.tenant.attention.state(*sid_and_layer(args)).value)


@command(
    "ATTEND.PREFIX.QUERY",
    arity=-7,
    group=GROUP,
    syntax="ATTEND.PREFIX.QUERY <sid> <layer> <H> <D> <top_k> <Q_blob> [<fa_window>]",
    reply=QUERY_REPLY,
    errors=STATE_ERRORS,
)
def query(ctx: Context, raw: list[Payload]) -> Reply | Job:
    """Attention of M queries a head, fp32 (H, M, D), over the whole prefix; M follows from the
    length of Q. H is the number of K/V heads or a multiple of it; the query heads are then in
    groups, one after the other. With a `top_k` between 0 and the number of tokens each query sees
    the rows of its `top_k` highest scores only; with `fa_window` no row but the last so many. LSE
    is the natural logarithm of the sum of exp(score) of the rows that a query saw."""
    args = ctx.arguments(raw)
    sid, layer = sid_and_layer(args)
    asked = question(args)
    kept = state(ctx, sid, layer, asked.dim)
    return asked.put(ctx, kept, even_groups(asked.heads, kept.shape[0]))


@dataclass(frozen=True, slots=True)
class Question:
    """Queries (H_q, M, D) for the rows of their `top_k` highest scores, 0 for all, or those of them
    within the window."""

    queries: Floats
    top_k: int
    window: int | None = None

    @property
    def heads(self) -> int:
        return int(self.queries.shape[0])

    @property
    def dim(self) -> int:
        return int(self.queries.shape[2])

    def over(self, kept: Resident, groups: Heads) -> Partial:
        """The answer, of K/V heads of the same `dim`."""
        if self._chooses(kept.shape):
            return over_blocks(kept, self.queries, groups, 1, self.top_k, self.window)
        return dense(kept, self.queries, groups, self.window)

    def cost(self, kept: tuple[int, int, int]) -> Cost:
        """What the rows of the highest scores take beyond attention over K and V (H, N, D)."""
        return Cost.of_rows(self.top_k, self.queries.shape) if self._chooses(kept) else Cost()

    def _chooses(self, kept: tuple[int, int, int]) -> bool:
        return 0 < self.top_k < kept[1]

    def put(self, ctx: Context, kept: Resident, groups: Heads) -> Reply | Job:
        """The reply: over() computed where there is time for it."""
        cost = Cost.of_attention(kept.shape, self.queries.shape, groups) + self.cost(kept.shape)
        if self.window is None and not self._chooses(kept.shape):
            return attend_all(ctx, kept, self.queries, groups, lambda _, found: answer(found), cost)
        return attend(ctx, lambda _: answer(self.over(kept, groups)), cost)


def question(args: Arguments) -> Question:
    """`<H> <D> <top_k> <Q_blob> [<fa_window>]`, the end of the command."""
    count, dim, top_k = query_heads(args, "H"), head_dim(args), tokens(args, "top_k", 0)
    return Question(queries(args, count, dim), top_k, window(args))


@command(
    "ATTEND.PREFIX.QUERY_FUSED",
    arity=-11,
    group=GROUP,
    syntax=(
        "ATTEND.PREFIX.QUERY_FUSED <sid> <layer> <H_q> <D> <S_suf> <H_kv> <Q> <K_suf> <V_suf>"
        " <head_map> [<fa_window>]"
    ),
    reply="a bulk: fp32 (H_q, M, D)",
    errors=(*STATE_ERRORS, BLOB_ERROR, *MAP_ERRORS, SUFFIX_ERROR),
)
def query_fused(ctx: Context, raw: list[Payload]) -> Reply | Job:
    """Attention of M queries a head over the prefix and over the client's own K and V behind it,
    fp32 (H_kv, S_suf, D) each, in causal order: the queries are those of its last M rows.
    `head_map` has a byte for each query head, the K/V head that it reads. With `fa_window` a query
    sees that many last tokens, its own included."""
    args = ctx.arguments(raw)
    sid, layer = sid_and_layer(args)
    count, dim = query_heads(args), head_dim(args)
    length, kv_heads = tokens(args, "S_suf"), heads(args, "H_kv")
    asked = queries(args, count, dim)
    keys, values = suffix(args, kv_heads, length, dim, asked.shape[1])
    groups, within = head_map(args, count, kv_heads), window(args)
    kept = state(ctx, sid, layer, dim, kv_heads)

    def merged(backend: AttentionBackend, found: Partial) -> Reply:
        own = attend_suffix(backend.transient(keys, values), asked, groups)
        return output(merge(found, own))

    def windowed(backend: AttentionBackend) -> Reply:
        return output(fused(kept, backend.transient(keys, values), asked, groups, within))

    cost = Cost.of_attention(kept.shape, asked.shape, groups)
    cost += Cost.of_transient(keys.shape, asked.shape, groups)
    if within is None:
        return attend_all(ctx, kept, asked, groups, merged, cost)
    return attend(ctx, windowed, cost)


@command(
    "ATTEND.QUERYBATCH",
    arity=8,
    group=GROUP,
    home=Home.ANYWHERE,
    syntax="ATTEND.QUERYBATCH <H> <N> <D> <top_k> <Q_blob> <K_blob> <V_blob>",
    reply=QUERY_REPLY,
    errors=(BLOB_ERROR,),
)
def querybatch(ctx: Context, raw: list[Payload]) -> Reply | Job:
    """ATTEND.PREFIX.QUERY over K and V, fp32 (H, N, D) each, that come along and are not kept. For
    more than one query of the same K and V the two commands are much faster."""
    args = ctx.arguments(raw)
    shape = heads(args), tokens(args, "N"), head_dim(args)
    top_k = tokens(args, "top_k", 0)
    asked = Question(queries(args, shape[0], shape[2]), top_k)
    keys, values = floats(args, "K_blob", *shape), floats(args, "V_blob", *shape)
    groups = even_groups(shape[0], shape[0])
    return attend(
        ctx,
        lambda backend: answer(asked.over(backend.transient(keys, values), groups)),
        Cost.of_transient(shape, asked.queries.shape, groups) + asked.cost(shape),
    )
