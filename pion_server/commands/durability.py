"""KV.PREFIX.SAVE: a snapshot on demand. What it is for is in docs/decisions/0002-journal.md."""

from __future__ import annotations

from pion_server.commands.context import Context
from pion_server.commands.registry import Home, Job, command
from pion_server.errors import PionError
from pion_server.wire.values import OK, Payload, Reply


@command(
    "KV.PREFIX.SAVE",
    arity=-1,
    group="KV.PREFIX",
    home=Home.ANYWHERE,
    syntax="KV.PREFIX.SAVE [path]",
    reply="+OK once the snapshot is on the disk and the log before it is gone",
    errors=("-ERR nothing is kept on disk", "-ERR a snapshot is being taken already", "-MISCONF"),
)
def save(ctx: Context, raw: list[Payload]) -> Reply | Job:
    """Write everything that is held to a snapshot, from immutable views and while writes go on,
    then cut the log. `path`, a file name inside the data folder, keeps a second name of it that
    later snapshots do not replace. Each worker has a folder of its own, and writes what it
    holds."""
    args = ctx.arguments(raw)
    path = args.text("path") if args else None
    args.end()
    journal = ctx.tenant.journal
    if journal is None:
        raise PionError("nothing is kept on disk; start the server with --data-dir")
    return Job(journal.save(path), lambda _: OK)
