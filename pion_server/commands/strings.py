"""Plain values: SET GET MGET MSET STRLEN, as in Redis 7.0.

Large values go in and out by reference.
"""

from __future__ import annotations

from dataclasses import dataclass

from pion_server.commands.context import Context
from pion_server.commands.plain import deadline, live, syntax_error, word, wrong_arity
from pion_server.commands.registry import Access, command
from pion_server.store.mutations import SetKey
from pion_server.store.units import key_unit
from pion_server.wire.values import OK, Payload, Reply

GROUP = "Strings"
# A stock LMCache sets the two keys of a chunk one after the other: the first must still be there
# when the second comes.
HALF_MS = 1000

# SET's options, and what each decides. Two that decide the same exclude each other.
OPTIONS = {
    "NX": "condition",
    "XX": "condition",
    "GET": "answer",
    **dict.fromkeys(("EX", "PX", "EXAT", "PXAT", "KEEPTTL"), "lifetime"),
}
# Of the options that take a time: milliseconds in its unit, and whether it counts from now.
TIMES = {"EX": (1000, True), "PX": (1, True), "EXAT": (1000, False), "PXAT": (1, False)}


@dataclass(slots=True)
class SetOptions:
    """How a SET was asked for: a word of OPTIONS, or empty; `time` goes with `lifetime`."""

    condition: str = ""
    answer: str = ""
    lifetime: str = ""
    time: Payload = b""


def set_options(raw: list[Payload]) -> SetOptions:
    """Raises PionError (syntax error). An option may be repeated; the last time given counts."""
    options = SetOptions()
    rest = iter(raw)
    for argument in rest:
        option = word(argument)
        decides = OPTIONS.get(option)
        if decides is None or getattr(options, decides) not in ("", option):
            raise syntax_error()
        setattr(options, decides, option)
        if option in TIMES:
            value = next(rest, None)
            if value is None:
                raise syntax_error()
            options.time = value
    return options


@command(
    "SET",
    arity=-3,
    group=GROUP,
    access=Access.WRITE,
    syntax="SET <key> <value> [NX | XX] [GET] [EX <seconds> | PX <milliseconds>"
    " | EXAT <unix-seconds> | PXAT <unix-milliseconds> | KEEPTTL]",
    reply="+OK, or null where NX or XX forbid it; with GET the old value | null",
    errors=("-ERR syntax error", "-ERR invalid expire time in 'set' command", "-OOM"),
)
def set_(ctx: Context, raw: list[Payload]) -> Reply:
    """Set a key, with a time to live if one is given, if NX (it is absent) or XX (it is there)
    holds."""
    key, value = ctx.key(raw[0]), raw[1]
    options = set_options(raw[2:])
    expires_ms = default_deadline(ctx)
    if options.lifetime in TIMES:
        scale, relative = TIMES[options.lifetime]
        since_ms = ctx.now_ms() if relative else 0
        expires_ms = deadline(options.time, scale, since_ms, 1, "set")
    old = live(ctx, key)
    if options.lifetime == "KEEPTTL" and old:
        expires_ms = old.expires_ms
    allowed = options.condition != ("XX" if old is None else "NX")
    if allowed:
        # Whoever says NX takes the answer for a promise: two must not both hold a lock.
        store(ctx, SetKey(ctx.client.db, key, value, expires_ms), must=options.condition == "NX")
    if options.answer:
        return old.value if old else None
    return OK if allowed else None


def default_deadline(ctx: Context) -> int | None:
    """When a key goes that is set without saying; None: it stays."""
    seconds = ctx.server.config.default_ttl
    return ctx.now_ms() + 1000 * seconds if seconds else None


def store(ctx: Context, *mutations: SetKey, must: bool = False) -> None:
    """Set keys, all of them or, where they do not fit the memory budget, none; what --admission
    turns away is set only if it must be."""
    (ctx.apply if must else ctx.offer)(*mutations)
    for each in mutations:
        unit = key_unit(each.db, each.key)
        if len(unit.keys) > 1:
            ctx.store.lease(unit, ctx.now_ms(), HALF_MS)


@command("GET", arity=2, group=GROUP, syntax="GET <key>", reply="the value as a bulk | null")
def get(ctx: Context, raw: list[Payload]) -> Reply:
    """The value of a key."""
    return read(ctx, raw[0])


def read(ctx: Context, key: Payload) -> Payload | None:
    """A value that a client asked for; counts as a hit or a miss."""
    entry = live(ctx, key)
    if entry is None:
        ctx.stats.key_misses += 1
        return None
    ctx.stats.key_hits += 1
    return entry.value


@command(
    "MGET",
    arity=-2,
    group=GROUP,
    syntax="MGET <key> [<key> ...]",
    reply="an array of bulks and nulls",
)
def mget(ctx: Context, raw: list[Payload]) -> Reply:
    """The values of several keys."""
    return [read(ctx, key) for key in raw]


@command(
    "MSET",
    arity=-3,
    group=GROUP,
    access=Access.WRITE,
    syntax="MSET <key> <value> [<key> <value> ...]",
    reply="+OK",
    errors=("-OOM",),
)
def mset(ctx: Context, raw: list[Payload]) -> Reply:
    """Set several keys, all of them or, where they do not fit the memory budget, none."""
    if len(raw) % 2:
        raise wrong_arity("MSET")
    values = {ctx.key(key): value for key, value in zip(raw[::2], raw[1::2], strict=True)}
    expires_ms = default_deadline(ctx)
    store(ctx, *(SetKey(ctx.client.db, key, value, expires_ms) for key, value in values.items()))
    return OK


@command("STRLEN", arity=2, group=GROUP, syntax="STRLEN <key>", reply=":<bytes>, 0 if absent")
def strlen(ctx: Context, raw: list[Payload]) -> Reply:
    """The length of a value."""
    entry = live(ctx, raw[0])
    return len(entry.value) if entry else 0
