"""What the server tells about itself: INFO, CONFIG GET, and COMMAND from the command table.

Fields and parameters have Redis' names where Redis has them, so its tools can read them. Counts
and limits are those of the client's own tenant; passwords, and other tenants, are in none of them.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from pion_server import __version__
from pion_server.commands.context import Context
from pion_server.commands.glob import compile_glob
from pion_server.commands.plain import REDIS_VERSION, word
from pion_server.commands.registry import SUBCOMMANDS, TABLE, Access, Command, Job, command
from pion_server.commands.subcommands import rows_of, run_subcommand
from pion_server.store.keys import DBS
from pion_server.wire.values import Payload, Reply, Status

GROUP = "Server"
Fields: TypeAlias = Mapping[str, object]

# -- INFO ---------------------------------------------------------------------------------------


def _server(ctx: Context) -> Fields:
    uptime = int(time.time() - ctx.server.started)
    return {
        "redis_version": REDIS_VERSION,
        "pion_version": __version__,
        "redis_mode": "standalone",
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "arch_bits": 64,
        "process_id": os.getpid(),
        "run_id": ctx.server.run_id,
        "tcp_port": ctx.server.port,
        "fast_port": ctx.server.fast_port,
        "uptime_in_seconds": uptime,
        "uptime_in_days": uptime // 86400,
    }


def _clients(ctx: Context) -> Fields:
    return {"connected_clients": len(ctx.tenant.clients)}


def _memory(ctx: Context) -> Fields:
    return {
        "used_memory": ctx.store.bytes_used,
        "maxmemory": ctx.tenant.budget.memory,
        "maxmemory_policy": "allkeys-lru",
    }


def _stats(ctx: Context) -> Fields:
    stats = ctx.stats
    return {
        "total_connections_received": stats.connections,
        "total_commands_processed": stats.commands,
        "expired_keys": stats.expired,
        "evicted_keys": stats.evicted,
        "keyspace_hits": stats.key_hits,
        "keyspace_misses": stats.key_misses,
    }


def _replication(ctx: Context) -> Fields:
    return {"role": "master", "connected_slaves": 0}


def _keyspace(ctx: Context) -> Fields:
    counts = {db: ctx.store.keys.count(db) for db in range(DBS)}
    return {f"db{db}": f"keys={count}" for db, count in counts.items() if count}


SECTIONS: dict[str, Callable[[Context], Fields]] = {
    "Server": _server,
    "Clients": _clients,
    "Memory": _memory,
    "Stats": _stats,
    "Replication": _replication,
    "Keyspace": _keyspace,
    "Pion": lambda ctx: ctx.stats.receipt(),
}
EVERY_SECTION = {"ALL", "DEFAULT", "EVERYTHING"}


@command(
    "INFO",
    arity=-1,
    group=GROUP,
    syntax=f"INFO [{' | '.join(name.lower() for name in SECTIONS)} ...]",
    reply="a bulk of field:value lines under # Section lines",
)
def info(ctx: Context, raw: list[Payload]) -> Reply:
    """The named sections, or all of them. An unknown name adds nothing."""
    wanted = {word(name) for name in raw} or EVERY_SECTION
    texts = [
        f"# {name}\r\n" + "".join(f"{field}:{value}\r\n" for field, value in fields(ctx).items())
        for name, fields in SECTIONS.items()
        if name.upper() in wanted or wanted & EVERY_SECTION
    ]
    return "\r\n".join(texts)


# -- CONFIG -------------------------------------------------------------------------------------


def parameters(ctx: Context) -> dict[str, str]:
    """What CONFIG GET shows: our options under Redis' names, and what Redis' tools ask for."""
    config = ctx.server.config
    return {
        "appendonly": "yes" if ctx.tenant.journal else "no",
        "bind": config.host,
        "databases": str(DBS),
        "loglevel": config.log_level,
        "maxclients": str(ctx.tenant.seats),
        "maxmemory": str(ctx.tenant.budget.memory),
        "maxmemory-policy": "allkeys-lru",
        "port": str(ctx.server.port),
        "proto-max-bulk-len": str(config.max_bulk),
        "save": "",
        "timeout": "0",
    }


@command(
    "CONFIG",
    arity=-2,
    group=GROUP,
    syntax="CONFIG <subcommand> [<arg> ...]",
    reply="the subcommand's",
    errors=("-ERR unknown subcommand",),
)
def config(ctx: Context, raw: list[Payload]) -> Reply | Job:
    """The configuration is set by the options of pion-server and can only be read here."""
    return run_subcommand(ctx, "CONFIG", raw)


@command(
    "CONFIG|GET",
    arity=-3,
    group=GROUP,
    syntax="CONFIG GET <pattern> [<pattern> ...]",
    reply="a map of names and values",
)
def config_get(ctx: Context, raw: list[Payload]) -> Reply:
    """The parameters whose name matches one of the glob patterns, in any case of letters."""
    patterns = [compile_glob(bytes(pattern), ignore_case=True) for pattern in raw]
    return {
        name: value
        for name, value in parameters(ctx).items()
        if any(pattern.fullmatch(name.encode()) for pattern in patterns)
    }


# -- COMMAND ------------------------------------------------------------------------------------


@command(
    "COMMAND",
    arity=-1,
    group=GROUP,
    syntax="COMMAND [<subcommand> [<arg> ...]]",
    reply="an array, an entry for each command: name, arity, flags, first key, last key, step, "
    "three empty arrays, subcommands",
    errors=("-ERR unknown subcommand",),
)
def command_(ctx: Context, raw: list[Payload]) -> Reply | Job:
    """The commands of this server as its table has them."""
    return run_subcommand(ctx, "COMMAND", raw) if raw else [entry(row) for row in TABLE.values()]


@command("COMMAND|COUNT", arity=2, group=GROUP, syntax="COMMAND COUNT", reply=":<count>")
def count(ctx: Context, raw: list[Payload]) -> Reply:
    """How many commands there are, subcommands not counted."""
    return len(TABLE)


@command(
    "COMMAND|INFO",
    arity=-2,
    group=GROUP,
    syntax="COMMAND INFO [<name> ...]",
    reply="an array as COMMAND's; null for a name that is unknown",
)
def command_info(ctx: Context, raw: list[Payload]) -> Reply:
    """The entries of the named commands, or of all."""
    if not raw:
        return [entry(row) for row in TABLE.values()]
    rows = [find(name) for name in raw]
    return [entry(row) if row else None for row in rows]


@command(
    "COMMAND|DOCS",
    arity=-2,
    group=GROUP,
    syntax="COMMAND DOCS [<name> ...]",
    reply="a map of maps: summary, since, group, syntax, reply, subcommands",
)
def docs(ctx: Context, raw: list[Payload]) -> Reply:
    """The documentation of the named commands, or of all. Unknown names are passed over."""
    rows = [find(name) for name in raw] if raw else TABLE.values()
    return {row.name.lower(): document(row) for row in rows if row}


def find(name: Payload) -> Command | None:
    """A row by its name; a subcommand's is `client|setname`."""
    return TABLE.get(word(name)) or SUBCOMMANDS.get(word(name))


def entry(row: Command) -> list[Reply]:
    """COMMAND's ten fields; ACL categories, tips and key specifications are none."""
    flags = [Status(flag) for access, flag in FLAGS.items() if access in row.access]
    subcommands: list[Reply] = [entry(each) for each in rows_of(row.name)]
    return [row.name.lower(), row.arity, flags, *key_places(row), [], [], [], subcommands]


FLAGS = {Access.WRITE: "write", Access.READ: "readonly", Access.NO_AUTH: "no_auth"}


def key_places(row: Command) -> tuple[int, int, int]:
    """First key, last key (-1: to the end) and step, as the row's syntax shows them."""
    words = [each.strip("[]") for each in row.syntax.split()]
    places = [place for place, each in enumerate(words) if each == "<key>"]
    match places:
        case []:
            return 0, 0, 0
        case [only]:
            return only, only, 1
        case _:
            return places[0], -1, places[1] - places[0]


def document(row: Command) -> dict[str, Reply]:
    subcommands: dict[str, Reply] = {
        each.name.lower(): document(each) for each in rows_of(row.name)
    }
    return {
        "summary": row.summary,
        "since": __version__,
        "group": row.group.lower(),
        "syntax": row.syntax,
        "reply": row.reply,
        **({"subcommands": subcommands} if subcommands else {}),
    }
