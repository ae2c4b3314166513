"""KV.PREFIX.WARM: attention state made of rows that are stored."""

from __future__ import annotations

from functools import partial

from pion_server.attention.base import AttentionBackend, Floats, Resident
from pion_server.attention.table import Item
from pion_server.commands.attend_args import head_dim, heads
from pion_server.commands.attend_rows import LayerRows
from pion_server.commands.context import Context
from pion_server.commands.layouts import ROW_ERRORS, known
from pion_server.commands.prefix import GROUP, namespace
from pion_server.commands.registry import Access, Job, command
from pion_server.errors import PionError
from pion_server.store.prefixes import Prefix
from pion_server.wire.values import Payload, Reply, Status


@command(
    "KV.PREFIX.WARM",
    arity=-4,
    group=GROUP,
    access=Access.WRITE | Access.UNLOGGED,
    syntax="KV.PREFIX.WARM <ns> <H> <D> [<sid>]",
    reply="+<number of layers>, or +<number> skipped_dim=<number>",
    errors=(
        "-ERR unknown namespace",
        "-ERR the namespace is not complete",
        "-ERR the namespace was changed",
        *ROW_ERRORS,
        "-OOM",
    ),
)
def warm(ctx: Context, raw: list[Payload]) -> Reply | Job:
    """Make attention state of every layer of a namespace, under the session id `sid` (the
    namespace's name unless given), so that ATTEND.PREFIX.* can be asked of it. Layers whose rows
    have another size than H * D values are skipped, and counted. All layers get warm, or none."""
    args = ctx.arguments(raw)
    ns, count, dim = namespace(args), heads(args), head_dim(args)
    sid = args.name("session id") if args else ns
    args.end()
    prefix = _complete(ctx, ns)
    fitting = [layer for layer in range(prefix.layers) if row_size(prefix, layer) == count * dim]
    skipped = prefix.layers - len(fitting)
    table, engine = ctx.tenant.attention, ctx.tenant.engine
    table.check(len(fitting), 0)
    layers = [LayerRows.of(prefix, layer, prefix.tokens) for layer in fitting]

    def work() -> list[Item]:
        items: list[Item] = []
        for rows in layers:  # queries of others come in between
            kept = engine.wait_for(partial(_resident, *rows.heads(count, dim)))
            items.append(Item(sid, rows.layer, kept, ns))
            table.check(0, sum(item.kept.nbytes for item in items))
        return items

    def finish(items: list[Item]) -> Reply:
        if not all(rows.current(ctx.store) for rows in layers):
            raise PionError("the namespace was changed while it was getting warm; nothing is kept")
        table.put(*items)
        return Status(f"{len(items)} skipped_dim={skipped}" if skipped else f"{len(items)}")

    return Job(work, finish)


def _resident(keys: Floats, values: Floats, backend: AttentionBackend) -> Resident:
    return backend.resident(keys, values)


def row_size(prefix: Prefix, layer: int) -> int | None:
    """Values a row, where it is the same on both sides."""
    keys, values = (side.schema.layer(layer).dim for side in (prefix.keys, prefix.values))
    return keys if keys == values else None


def _complete(ctx: Context, ns: bytes) -> Prefix:
    prefix = known(ctx, ns)
    if not prefix.sealed:
        raise PionError("the namespace is not complete: rows of it are still to come")
    return prefix
