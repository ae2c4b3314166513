"""SSM.PREFIX.*: recurrent states of prefixes, a blob for each layer, which nobody here reads."""

from __future__ import annotations

from pion_server.commands.context import Context
from pion_server.commands.layouts import layer, sid_and_layer
from pion_server.commands.registry import Access, command
from pion_server.store.mutations import DropState, StoreState
from pion_server.store.prefixes import sides
from pion_server.wire.values import OK, Payload, Reply

GROUP = "SSM.PREFIX"


@command(
    "SSM.PREFIX.STORE",
    arity=4,
    group=GROUP,
    access=Access.WRITE,
    syntax="SSM.PREFIX.STORE <sid> <layer> <state_blob>",
    reply="+OK",
    errors=("-OOM",),
)
def store(ctx: Context, raw: list[Payload]) -> Reply:
    """Keep a layer's recurrent state, in the place of one that is there. Any bytes, of any size.
    Where `sid` is the name of a namespace its states are dropped and evicted with it."""
    args = ctx.arguments(raw)
    sid, index = sid_and_layer(args)
    if not ctx.ignores(sides(sid)[0]):
        ctx.apply(StoreState(sid, index, args.take("state_blob")))
    return OK


@command(
    "SSM.PREFIX.FETCH",
    arity=3,
    group=GROUP,
    syntax="SSM.PREFIX.FETCH <sid> <layer>",
    reply="the blob as a bulk | null",
)
def fetch(ctx: Context, raw: list[Payload]) -> Reply:
    """A layer's recurrent state, byte for byte as it was stored."""
    return ctx.store.recurrent_state(*sid_and_layer(ctx.arguments(raw)))


@command(
    "SSM.PREFIX.DROP",
    arity=-2,
    group=GROUP,
    access=Access.WRITE,
    syntax="SSM.PREFIX.DROP <sid> [<layer>]",
    reply="+OK",
)
def drop(ctx: Context, raw: list[Payload]) -> Reply:
    """Free the recurrent state of one layer, or those of all layers; it need not be there. A
    namespace of this name stays."""
    args = ctx.arguments(raw)
    sid = args.name("session id")
    index = layer(args) if args else None
    args.end()
    ctx.apply(DropState(sid, index))
    return OK
