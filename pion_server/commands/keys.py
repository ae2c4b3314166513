"""Keys as such: whether they are there, how long they live, which there are, as in Redis 7.0.

A key past its deadline is absent for every command; `sweep` gives its memory back.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from pion_server.commands.context import Context
from pion_server.commands.glob import compile_glob
from pion_server.commands.plain import (
    MIN_INTEGER,
    deadline,
    integer,
    live,
    shown_word,
    syntax_error,
    word,
)
from pion_server.commands.registry import Access, command
from pion_server.errors import PionError
from pion_server.store.mutations import DeleteKeys, FlushDb, SetExpiry
from pion_server.store.units import key_unit
from pion_server.tenants import Tenant
from pion_server.wire.values import OK, Payload, Reply, Status

GROUP = "Keys"
# Expired keys that one sweep takes away: a few milliseconds of the event loop.
SWEEP_KEYS = 1000
# SCAN's COUNT is a hint; a longer page would hold the event loop for too long.
MAX_PAGE = 10_000
CURSOR = re.compile(rb"[0-9]{1,20}")
MAX_CURSOR = 2**64 - 1

# -- being there --------------------------------------------------------------------------------


@command("EXISTS", arity=-2, group=GROUP, syntax="EXISTS <key> [<key> ...]", reply=":<count>")
def exists(ctx: Context, raw: list[Payload]) -> Reply:
    """How many of the keys are there; one that is named twice counts twice. Those that are there
    are not evicted for some seconds, unless nothing else is left, so that a GET may follow."""
    there = [ctx.key(key) for key in raw if live(ctx, key)]
    for key in there:
        ctx.store.lease(key_unit(ctx.client.db, key), ctx.now_ms())
    return len(there)


@command(
    "UNLINK",
    arity=-2,
    group=GROUP,
    access=Access.WRITE,
    syntax="UNLINK <key> [<key> ...]",
    reply=":<deleted>",
)
@command(
    "DEL",
    arity=-2,
    group=GROUP,
    access=Access.WRITE,
    syntax="DEL <key> [<key> ...]",
    reply=":<deleted>",
)
def delete(ctx: Context, raw: list[Payload]) -> Reply:
    """Delete keys. DEL and UNLINK are the same here."""
    there = tuple(key for key in dict.fromkeys(map(bytes, raw)) if live(ctx, key))
    return ctx.apply(DeleteKeys(ctx.client.db, there))


@command("TYPE", arity=2, group=GROUP, syntax="TYPE <key>", reply="+string | +none")
def type_(ctx: Context, raw: list[Payload]) -> Reply:
    """What a key holds: strings are the only type."""
    return Status("string" if live(ctx, raw[0]) else "none")


# -- living -------------------------------------------------------------------------------------

# EXPIRE's conditions on the new deadline and the one there is, if any.
CONDITIONS: dict[str, Callable[[int, int | None], bool]] = {
    "NX": lambda new, old: old is None,
    "XX": lambda new, old: old is not None,
    "GT": lambda new, old: old is not None and new > old,
    "LT": lambda new, old: old is None or new < old,
}
EXPIRE_SYNTAX = "[NX | XX] [GT | LT]"
EXPIRE_REPLY = ":1, or :0 where the key is absent or an option forbids it"
EXPIRE_ERRORS = (
    "-ERR invalid expire time",
    "-ERR Unsupported option",
    "-ERR NX and XX, GT or LT options at the same time are not compatible",
    "-ERR GT and LT options at the same time are not compatible",
)


@command(
    "EXPIRE",
    arity=-3,
    group=GROUP,
    access=Access.WRITE,
    syntax=f"EXPIRE <key> <seconds> {EXPIRE_SYNTAX}",
    reply=EXPIRE_REPLY,
    errors=EXPIRE_ERRORS,
)
def expire(ctx: Context, raw: list[Payload]) -> Reply:
    """Let a key live for so many seconds from now; none or less deletes it. NX: only if it has no
    deadline yet, XX: only if it has one, GT, LT: only if the new one is later, earlier."""
    return set_deadline(ctx, raw, 1000, "expire")


@command(
    "PEXPIRE",
    arity=-3,
    group=GROUP,
    access=Access.WRITE,
    syntax=f"PEXPIRE <key> <milliseconds> {EXPIRE_SYNTAX}",
    reply=EXPIRE_REPLY,
    errors=EXPIRE_ERRORS,
)
def pexpire(ctx: Context, raw: list[Payload]) -> Reply:
    """EXPIRE in milliseconds."""
    return set_deadline(ctx, raw, 1, "pexpire")


def set_deadline(ctx: Context, raw: list[Payload], scale: int, name: str) -> int:
    key, conditions, now_ms = ctx.key(raw[0]), expire_conditions(raw[2:]), ctx.now_ms()
    new = deadline(raw[1], scale, now_ms, MIN_INTEGER, name)
    entry = live(ctx, key)
    if entry is None or not all(holds(new, entry.expires_ms) for holds in conditions):
        return 0
    if new > now_ms:
        return ctx.apply(SetExpiry(ctx.client.db, key, new))
    return ctx.apply(DeleteKeys(ctx.client.db, (key,)))


def expire_conditions(raw: list[Payload]) -> list[Callable[[int, int | None], bool]]:
    words = {word(option): option for option in raw}
    for name, option in words.items():
        if name not in CONDITIONS:
            raise PionError(f"Unsupported option {shown_word(option)}")
    if "NX" in words and len(words) > 1:
        raise PionError("NX and XX, GT or LT options at the same time are not compatible")
    if {"GT", "LT"} <= words.keys():
        raise PionError("GT and LT options at the same time are not compatible")
    return [CONDITIONS[name] for name in words]


@command("TTL", arity=2, group=GROUP, syntax="TTL <key>", reply=":<seconds> | :-1 | :-2")
def ttl(ctx: Context, raw: list[Payload]) -> Reply:
    """Seconds a key has left, rounded; -1 for one without a deadline, -2 for none."""
    left = left_ms(ctx, raw[0])
    return (left + 500) // 1000 if left >= 0 else left


@command("PTTL", arity=2, group=GROUP, syntax="PTTL <key>", reply=":<milliseconds> | :-1 | :-2")
def pttl(ctx: Context, raw: list[Payload]) -> Reply:
    """Milliseconds a key has left; -1 for one without a deadline, -2 for none."""
    return left_ms(ctx, raw[0])


def left_ms(ctx: Context, key: Payload) -> int:
    entry = live(ctx, key)
    if entry is None:
        return -2
    return -1 if entry.expires_ms is None else max(entry.expires_ms - ctx.now_ms(), 0)


@command(
    "PERSIST",
    arity=2,
    group=GROUP,
    access=Access.WRITE,
    syntax="PERSIST <key>",
    reply=":1, or :0 where the key is absent or has no deadline",
)
def persist(ctx: Context, raw: list[Payload]) -> Reply:
    """Take a key's deadline away."""
    entry = live(ctx, raw[0])
    if entry is None or entry.expires_ms is None:
        return 0
    return ctx.apply(SetExpiry(ctx.client.db, ctx.key(raw[0]), None))


def sweep(tenant: Tenant) -> int:
    """Take away up to SWEEP_KEYS expired keys of a tenant; returns how many."""
    now_ms = time.time_ns() // 1_000_000
    due = tenant.store.keys.expired(now_ms, SWEEP_KEYS)
    taken = sum(map(tenant.apply, due))
    tenant.stats.expired += taken
    return taken


# -- all of them --------------------------------------------------------------------------------


@command("DBSIZE", arity=1, group=GROUP, syntax="DBSIZE", reply=":<keys>")
def dbsize(ctx: Context, raw: list[Payload]) -> Reply:
    """How many keys the database has."""
    while sweep(ctx.tenant):
        pass
    return ctx.store.keys.count(ctx.client.db)


@command("KEYS", arity=2, group=GROUP, syntax="KEYS <pattern>", reply="an array of bulks")
def keys(ctx: Context, raw: list[Payload]) -> Reply:
    """Every key that matches a glob pattern. It holds up all clients of a large database: SCAN
    does not."""
    db, held = ctx.client.db, ctx.store.keys
    _, names = held.scan(db, 0, held.count(db), ctx.now_ms())
    return list(filter(compile_glob(bytes(raw[0])).fullmatch, names))


@command(
    "SCAN",
    arity=-2,
    group=GROUP,
    syntax="SCAN <cursor> [MATCH <pattern>] [COUNT <count>] [TYPE <type>]",
    reply="an array: the cursor to go on from, 0 at the end; an array of keys",
    errors=("-ERR invalid cursor", "-ERR syntax error"),
)
def scan(ctx: Context, raw: list[Payload]) -> Reply:
    """Some keys at a time, beginning with cursor 0. A key that is there all the while is returned
    exactly once. COUNT keys are looked at in one call, 10 if it is not given."""
    cursor = int(bytes(raw[0])) if CURSOR.fullmatch(raw[0]) else MAX_CURSOR + 1
    if cursor > MAX_CURSOR:
        raise PionError("invalid cursor")
    options = scan_options(raw[1:])
    count, matches = options.get("COUNT", 10), options.get("MATCH")
    following, names = ctx.store.keys.scan(ctx.client.db, cursor, count, ctx.now_ms())
    chosen = filter(matches, names) if matches else names
    return [str(following), list(chosen) if options.get("TYPE", True) else []]


def scan_options(raw: list[Payload]) -> dict[str, Any]:
    """Pairs of a word and a value; of a word given twice the last value counts."""
    options: dict[str, Any] = {}
    rest = iter(raw)
    for option in rest:
        read, value = SCAN_OPTIONS.get(word(option)), next(rest, None)
        if read is None or value is None:
            raise syntax_error()
        options[word(option)] = read(value)
    return options


def page_size(value: Payload) -> int:
    count = integer(value)
    if count < 1:
        raise syntax_error()
    return min(count, MAX_PAGE)


SCAN_OPTIONS: dict[str, Callable[[Payload], Any]] = {
    "COUNT": page_size,
    "MATCH": lambda pattern: compile_glob(bytes(pattern)).fullmatch,
    "TYPE": lambda name: word(name) == "STRING",
}


@command(
    "FLUSHDB",
    arity=-1,
    group=GROUP,
    access=Access.WRITE,
    syntax="FLUSHDB [ASYNC | SYNC]",
    reply="+OK",
)
def flushdb(ctx: Context, raw: list[Payload]) -> Reply:
    """Delete every plain key of this database. Prefixes and sessions stay: they are in none."""
    return flush(ctx, raw, ctx.client.db)


@command(
    "FLUSHALL",
    arity=-1,
    group=GROUP,
    access=Access.WRITE,
    syntax="FLUSHALL [ASYNC | SYNC]",
    reply="+OK",
)
def flushall(ctx: Context, raw: list[Payload]) -> Reply:
    """Delete every plain key of every database. Prefixes and sessions stay."""
    return flush(ctx, raw, None)


def flush(ctx: Context, raw: list[Payload], db: int | None) -> Reply:
    if [word(option) for option in raw] not in ([], ["ASYNC"], ["SYNC"]):
        raise syntax_error()
    ctx.apply(FlushDb(db))
    return OK
