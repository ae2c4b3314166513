"""Commands whose first argument names what to do: CLIENT, COMMAND, CONFIG.

A subcommand is a row of its own, `CLIENT|SETNAME`, so its arity, documentation and COMMAND entry
come from where every other command's do. Each container answers HELP from those rows.
"""

from __future__ import annotations

from pion_server.commands.context import Context
from pion_server.commands.plain import shown_word, word, wrong_arity
from pion_server.commands.registry import SUBCOMMANDS, Command, Job
from pion_server.errors import PionError
from pion_server.wire.values import Payload, Reply, Status


def rows_of(container: str) -> list[Command]:
    """The subcommands of a command, in the order of their definition."""
    return [row for name, row in SUBCOMMANDS.items() if name.startswith(f"{container}|")]


def run_subcommand(ctx: Context, container: str, raw: list[Payload]) -> Reply | Job:
    """Hand the rest of the arguments to the subcommand that the first one names. Raises PionError,
    in Redis' words, on an unknown one or a wrong arity."""
    name = word(raw[0])
    if name == "HELP" and len(raw) == 1:
        return _help(container)
    row = SUBCOMMANDS.get(f"{container}|{name}")
    if row is None:
        raise PionError(f"unknown subcommand '{shown_word(raw[0])}'. Try {container} HELP.")
    if not row.accepts(len(raw) + 1):
        raise wrong_arity(row.name)
    ctx.client.last_command = row.name
    return row.handler(ctx, raw[1:])


def _help(container: str) -> Reply:
    lines = [f"{container} <subcommand> [<arg> ...]. Subcommands are:"]
    for row in rows_of(container):
        lines += [row.syntax.removeprefix(f"{container} "), f"    {row.summary}"]
    return [Status(line) for line in lines]
