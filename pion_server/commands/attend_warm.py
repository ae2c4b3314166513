"""KV.PREFIX.WARM: attention state made of rows that are stored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pion_server.attention.base import AttentionBackend, Floats
from pion_server.attention.engine import Cost
from pion_server.attention.table import Item
from pion_server.commands.attend_args import compute, head_dim, heads
from pion_server.commands.context import Context
from pion_server.commands.layouts import FETCH_ERRORS
from pion_server.commands.prefix import GROUP, namespace
from pion_server.commands.registry import Access, Job, command
from pion_server.errors import PionError
from pion_server.store.layer import Extent
from pion_server.store.prefixes import Prefix
from pion_server.store.views import RowView
from pion_server.wire.values import Payload, Reply, Status


@dataclass(frozen=True, slots=True)
class Side:
    """Rows of one layer of one side. `runs`, all that the layer has, is another after any write."""

    view: RowView
    runs: tuple[Extent, ...]

    def heads(self, count: int, dim: int) -> Floats:
        """The rows as fp32 (count, N, dim)."""
        codec, row = self.view.format.codec, self.view.format.dim
        parts = [codec.decode(np.frombuffer(piece, np.uint8), row) for piece in self.view.pieces]
        rows = np.concatenate(parts) if len(parts) > 1 else parts[0]
        return np.ascontiguousarray(rows.reshape(-1, count, dim).transpose(1, 0, 2))


Layers = dict[int, tuple[Side, Side]]


@command(
    "KV.PREFIX.WARM",
    arity=-4,
    group=GROUP,
    access=Access.WRITE,
    syntax="KV.PREFIX.WARM <ns> <H> <D> [<sid>]",
    reply="+<number of layers>, or +<number> skipped_dim=<number>",
    errors=(
        "-ERR unknown namespace",
        "-ERR the namespace is not complete",
        "-ERR the namespace was changed",
        *FETCH_ERRORS[1:],
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
    layers, skipped = _layers(prefix, count * dim)
    table = ctx.tenant.attention
    table.check(len(layers), 0)

    def work(backend: AttentionBackend) -> list[Item]:
        items: list[Item] = []
        for layer, (keys, values) in layers.items():
            kept = backend.resident(keys.heads(count, dim), values.heads(count, dim))
            items.append(Item(sid, layer, kept, ns))
            table.check(0, sum(item.kept.nbytes for item in items))
        return items

    def finish(items: list[Item]) -> Reply:
        if ctx.store.prefixes.get(ns) is not prefix or _changed(prefix, layers):
            raise PionError("the namespace was changed while it was getting warm; nothing is kept")
        table.put(*items)
        return Status(f"{len(items)} skipped_dim={skipped}" if skipped else f"{len(items)}")

    rows = sum(side.view.nbytes for pair in layers.values() for side in pair)
    return compute(ctx, work, finish, Cost(nbytes=8 * rows))


def _complete(ctx: Context, ns: bytes) -> Prefix:
    prefix = ctx.store.prefix(ns)
    if prefix is None:
        raise PionError("unknown namespace; KV.PREFIX.REGISTER it first")
    if not prefix.sealed:
        raise PionError("the namespace is not complete: rows of it are still to come")
    return prefix


def _layers(prefix: Prefix, row: int) -> tuple[Layers, int]:
    """The rows of the layers that have `row` values a row on both sides, by reference, and how many
    layers have not."""
    found: Layers = {}
    for layer in range(prefix.layers):
        sides = prefix.keys, prefix.values
        if all(side.schema.layer(layer).dim == row for side in sides):
            keys, values = (
                Side(side.view(layer, 0, prefix.tokens), side.layer(layer).runs()) for side in sides
            )
            found[layer] = keys, values
    return found, prefix.layers - len(found)


def _changed(prefix: Prefix, layers: Layers) -> bool:
    """Whether rows of one of the layers have been written since."""
    return any(
        side.layer(layer).runs() is not held.runs
        for layer, pair in layers.items()
        for side, held in zip((prefix.keys, prefix.values), pair, strict=True)
    )
