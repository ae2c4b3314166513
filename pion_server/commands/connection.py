"""The connection itself: PING ECHO AUTH HELLO SELECT QUIT RESET, as in Redis 7.0.

Passwords are compared in constant time (tenants.py) and appear in no reply and no log.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from pion_server.commands.clients import LABEL_ERRORS, set_name
from pion_server.commands.context import Context
from pion_server.commands.plain import (
    REDIS_VERSION,
    integer,
    shown_word,
    syntax_error,
    word,
    wrong_arity,
)
from pion_server.commands.registry import Access, command
from pion_server.errors import NoAuth, NoProto, PionError, WrongPass
from pion_server.store.keys import DBS
from pion_server.tenants import dismiss
from pion_server.wire.values import OK, Payload, Reply, Status

GROUP = "Connection"
BEFORE_AUTH = Access.READ | Access.NO_AUTH
WRONG_PASSWORD = "-WRONGPASS invalid username-password pair or user is disabled."
INT32 = range(-(2**31), 2**31)


@command(
    "PING",
    arity=-1,
    group=GROUP,
    syntax="PING [<message>]",
    reply="+PONG, or the message as a bulk",
)
def ping(ctx: Context, raw: list[Payload]) -> Reply:
    """Tells that the server is there."""
    if len(raw) > 1:
        raise wrong_arity("PING")
    return raw[0] if raw else Status("PONG")


@command("ECHO", arity=2, group=GROUP, syntax="ECHO <message>", reply="the message as a bulk")
def echo(ctx: Context, raw: list[Payload]) -> Reply:
    """The message comes back."""
    return raw[0]


@command(
    "AUTH",
    arity=-2,
    group=GROUP,
    access=BEFORE_AUTH,
    syntax="AUTH [<tenant>] <password>",
    reply="+OK",
    errors=(WRONG_PASSWORD, "-ERR AUTH <password> called without any password configured"),
)
def auth(ctx: Context, raw: list[Payload]) -> Reply:
    """Log in as a tenant, `default` unless another is named. What the connection does from then on
    is done to that tenant's prefixes, sessions, keys and counters, and no others exist for it."""
    if len(raw) > 2:
        raise syntax_error()
    if len(raw) == 1 and ctx.server.tenants.open:
        raise PionError(
            "AUTH <password> called without any password configured for the default user. "
            "Are you sure your configuration is correct?"
        )
    log_in(ctx, raw[0] if len(raw) == 2 else b"default", raw[-1])
    return OK


def log_in(ctx: Context, user: Payload, password: Payload) -> None:
    """Raises WrongPass; a client that had logged in before stays so."""
    tenant = ctx.server.tenants.find(user, password)
    if tenant is None:
        raise WrongPass("invalid username-password pair or user is disabled.")
    tenant.admit(ctx.client)


# What a HELLO option does with how many values.
HELLO_OPTIONS: dict[str, tuple[Callable[..., None], int]] = {
    "AUTH": (log_in, 2),
    "SETNAME": (set_name, 1),
}


@command(
    "HELLO",
    arity=-1,
    group=GROUP,
    access=BEFORE_AUTH,
    syntax="HELLO [2 | 3 [AUTH <tenant> <password>] [SETNAME <name>]]",
    reply="a map: server, version, proto, id, mode, role, modules",
    errors=(
        "-ERR Protocol version is not an integer or out of range",
        "-NOPROTO",
        "-NOAUTH HELLO must be called with the client already authenticated",
        WRONG_PASSWORD,
        "-ERR Syntax error in HELLO option '<word>'",
        *LABEL_ERRORS,
    ),
)
def hello(ctx: Context, raw: list[Payload]) -> Reply:
    """Choose RESP2 or RESP3, and log in on the way. Options take effect from the left, up to the
    first wrong one, as in Redis."""
    proto = protocol_version(raw[0]) if raw else ctx.client.proto
    rest = iter(raw[1:])
    for option in rest:
        take_effect, count = HELLO_OPTIONS.get(word(option), (None, 0))
        values = list(islice(rest, count))
        if take_effect is None or len(values) < count:
            raise PionError(f"Syntax error in HELLO option '{shown_word(option)}'")
        take_effect(ctx, *values)
    if ctx.client.tenant is None:
        raise NoAuth(
            "HELLO must be called with the client already authenticated, otherwise the HELLO AUTH "
            "<user> <pass> option can be used to authenticate the client and select the RESP "
            "protocol version at the same time"
        )
    ctx.client.proto = proto
    return greeting(ctx)


def protocol_version(value: Payload) -> int:
    try:
        version = integer(value)
    except PionError:
        raise PionError("Protocol version is not an integer or out of range") from None
    if version not in (2, 3):
        raise NoProto("unsupported protocol version")
    return version


def greeting(ctx: Context) -> dict[str, Any]:
    """HELLO's map. `server` is what clients of Redis look for."""
    return {
        "server": "redis",
        "version": REDIS_VERSION,
        "proto": ctx.client.proto,
        "id": ctx.client.id,
        "mode": "standalone",
        "role": "master",
        "modules": [],
    }


@command(
    "SELECT",
    arity=2,
    group=GROUP,
    syntax="SELECT <index>",
    reply="+OK",
    errors=("-ERR DB index is out of range", "-ERR value is out of range"),
)
def select(ctx: Context, raw: list[Payload]) -> Reply:
    """Choose the database of the plain keys, 0 to 15. Prefixes and sessions are in none of them."""
    index = integer(raw[0])
    if index not in INT32:
        low, high = INT32.start, INT32.stop - 1
        raise PionError(f"value is out of range, value must between {low} and {high}")
    if not 0 <= index < DBS:
        raise PionError("DB index is out of range")
    ctx.client.db = index
    return OK


@command(
    "QUIT", arity=-1, group=GROUP, access=BEFORE_AUTH, syntax="QUIT", reply="+OK, then it closes"
)
def quit_(ctx: Context, raw: list[Payload]) -> Reply:
    """Close the connection once every reply is out."""
    ctx.client.closing = True
    return OK


@command("RESET", arity=1, group=GROUP, access=BEFORE_AUTH, syntax="RESET", reply="+RESET")
def reset(ctx: Context, raw: list[Payload]) -> Reply:
    """Back to how the connection began: RESP2, database 0, no name, not logged in."""
    client = ctx.client
    client.proto, client.db, client.name, client.no_evict = 2, 0, b"", False
    if not ctx.server.tenants.open:
        dismiss(client)
    return Status("RESET")
