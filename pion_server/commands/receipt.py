"""PION.STATS: the value receipt."""

from __future__ import annotations

from pion_server.commands.context import Context
from pion_server.commands.registry import command
from pion_server.errors import PionError
from pion_server.stats import Stats
from pion_server.wire.values import OK, Payload, Reply


@command(
    "PION.STATS",
    arity=-1,
    group="PION",
    syntax="PION.STATS [RESET]",
    reply=f"a map: {', '.join(Stats().receipt())}; RESET: +OK",
    errors=("-ERR PION.STATS takes nothing, or RESET",),
)
def stats(ctx: Context, raw: list[Payload]) -> Reply:
    """What the prefix cache did for its users since the start or the last RESET: hits, tokens,
    bytes, and prefill seconds spared, measured and estimated kept apart. The semantic, moe and
    vector fields are of subsystems that are not in this server, and 0."""
    args = ctx.arguments(raw)
    if not args:
        return ctx.stats.receipt()
    if args.keyword("RESET") != "RESET":
        raise PionError("PION.STATS takes nothing, or RESET")
    args.end()
    ctx.stats.reset()
    return OK
