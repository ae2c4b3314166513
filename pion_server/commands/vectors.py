"""V.*: sessions of rows, addressed by layer and token id. The ground KV.PREFIX.* stands on."""

from __future__ import annotations

from pion_server.codecs.convert import WireFormat
from pion_server.commands.arguments import Arguments
from pion_server.commands.context import Context
from pion_server.commands.layouts import (
    FETCH_ERRORS,
    LAYOUT_ERRORS,
    NO_SCHEMA_WORD,
    STORE_ERRORS,
    UNKNOWN_SESSION,
    Incoming,
    fmt_or_fp32,
    layer_index,
    outgoing,
    schema_words,
    span,
    start_and_count,
    store,
    token,
    uniform,
)
from pion_server.commands.plain import word
from pion_server.commands.registry import Access, Job, command
from pion_server.errors import PionError
from pion_server.store.mutations import CreateSession
from pion_server.store.schema import MAX_DIM, MAX_LAYERS
from pion_server.wire.values import OK, Payload, Reply

GROUP = "V"


@command(
    "V.CREATE",
    arity=-3,
    group=GROUP,
    access=Access.WRITE,
    syntax=(
        "V.CREATE <sid> <dim> [VQUANT <codec>]"
        " | V.CREATE <sid> 0 SCHEMA <n> fmt=<codec>,dim=<d> ..."
    ),
    reply="+OK",
    errors=(*LAYOUT_ERRORS, NO_SCHEMA_WORD, "-ERR dim 0 must be followed by SCHEMA", "-OOM"),
)
def create(ctx: Context, raw: list[Payload]) -> Reply:
    """Make a session: one layout for all layers (codec fp16 unless VQUANT names another), or a
    word for each layer. Repeating it with the same layout keeps the rows."""
    args = ctx.arguments(raw)
    sid = args.name("session id")
    dim = args.integer("dim", 0, MAX_DIM)
    if dim:
        options = args.options({"VQUANT": lambda a: a.text("VQUANT")})
        schema = uniform(dim, options.get("VQUANT", "fp16"))
    else:
        if args.keyword("SCHEMA") != "SCHEMA":
            raise PionError("dim 0 must be followed by SCHEMA <n> fmt=<codec>,dim=<d> ...")
        schema = schema_words(args)
        args.end()
    ctx.offer(CreateSession(sid, schema))
    return OK


@command(
    "V.STOREBATCH",
    arity=-6,
    group=GROUP,
    access=Access.WRITE,
    syntax="V.STOREBATCH <sid> <layer> <start_id> <count> <blob> [FMT FP32|FP16|BF16|NATIVE]",
    reply="+OK",
    errors=(UNKNOWN_SESSION, *STORE_ERRORS),
)
def storebatch(ctx: Context, raw: list[Payload]) -> Reply | Job:
    """Store `count` rows of a layer from token `start_id` on, in token order, little-endian. Rows
    that are there are replaced. NaN and infinity are kept."""
    args = ctx.arguments(raw)
    sid, layer = args.name("session id"), layer_index(args)
    start, count = start_and_count(args, "start_id")
    rows = [Incoming(sid, layer, args.blob("blob"))]
    return store(ctx, rows, start, count, fmt_or_fp32(args))


@command(
    "V.FETCH",
    arity=-4,
    group=GROUP,
    syntax=(
        "V.FETCH <sid> <layer> <id> [<id> ...]"
        " | V.FETCH <sid> <layer> RANGE <start> <end> [FMT <f>]"
        " | V.FETCH <sid> BATCH <start> <end> <n_layers> [FMT <f>]"
    ),
    reply="a bulk of the rows in the asked order; BATCH: an array of bulks, one a layer",
    errors=(UNKNOWN_SESSION, *FETCH_ERRORS),
)
def fetch(ctx: Context, raw: list[Payload]) -> Reply:
    """Rows by id list (always FP32), by half-open range, or a range of several layers at once.
    FMT is FP32 unless given. A range that is not fully there is an error, never short data."""
    args = ctx.arguments(raw)
    sid = args.name("session id")
    if word(raw[1]) == "BATCH":
        return _fetch_batch(ctx, sid, args)
    layer = layer_index(args)
    if word(raw[2]) == "RANGE":
        args.take("RANGE")
        start, end = span(args, "RANGE", token)
        fmt = fmt_or_fp32(args)
        return outgoing(ctx, ctx.store.view(sid, layer, start, end), fmt)
    ids = []
    while args:
        ids.append(token(args, "token id"))
    return outgoing(ctx, ctx.store.gather(sid, layer, ids), WireFormat.FP32)


def _fetch_batch(ctx: Context, sid: bytes, args: Arguments) -> Reply:
    args.take("BATCH")
    start, end = span(args, "BATCH", token)
    layers = args.integer("n_layers", 1, MAX_LAYERS)
    fmt = fmt_or_fp32(args)
    views = [ctx.store.view(sid, layer, start, end) for layer in range(layers)]
    return [outgoing(ctx, view, fmt) for view in views]
