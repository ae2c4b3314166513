"""CLIENT: what the server knows about its connections, and what they tell about themselves.

A client sees those of its own tenant.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from pion_server.commands.arguments import MAX_NAME
from pion_server.commands.context import Context
from pion_server.commands.plain import integer, shown_word, syntax_error, word
from pion_server.commands.registry import Job, command
from pion_server.commands.subcommands import run_subcommand
from pion_server.errors import PionError
from pion_server.tenants import Client
from pion_server.wire.values import OK, Payload, Reply

GROUP = "Connection"
PRINTABLE = re.compile(rb"[!-~]*")
# The kinds of CLIENT LIST TYPE, and whether ours are of that kind.
KINDS = {"NORMAL": True, "MASTER": False, "REPLICA": False, "SLAVE": False, "PUBSUB": False}
LIBRARY_FIELDS = {"LIB-NAME": "lib-name", "LIB-VER": "lib-ver"}
LABEL_ERRORS = (
    "-ERR <what> cannot be longer than",
    "-ERR <what> cannot contain spaces, newlines or special characters.",
)
SWITCH = {"ON": True, "OFF": False}


@command(
    "CLIENT",
    arity=-2,
    group=GROUP,
    syntax="CLIENT <subcommand> [<arg> ...]",
    reply="the subcommand's",
    errors=("-ERR unknown subcommand",),
)
def client(ctx: Context, raw: list[Payload]) -> Reply | Job:
    """The subcommands below; CLIENT HELP lists them."""
    return run_subcommand(ctx, "CLIENT", raw)


def label(value: Payload, what: str) -> bytes:
    """A word that CLIENT LIST can show in one field: printable ASCII without blanks."""
    if len(value) > MAX_NAME:
        raise PionError(f"{what} cannot be longer than {MAX_NAME} bytes")
    if not PRINTABLE.fullmatch(value):
        raise PionError(f"{what} cannot contain spaces, newlines or special characters.")
    return bytes(value)


def set_name(ctx: Context, value: Payload) -> None:
    """An empty name takes the name away."""
    ctx.client.name = label(value, "Client names")


@command(
    "CLIENT|SETNAME",
    arity=3,
    group=GROUP,
    syntax="CLIENT SETNAME <name>",
    reply="+OK",
    errors=LABEL_ERRORS,
)
def setname(ctx: Context, raw: list[Payload]) -> Reply:
    """Name this connection."""
    set_name(ctx, raw[0])
    return OK


@command("CLIENT|GETNAME", arity=2, group=GROUP, syntax="CLIENT GETNAME", reply="a bulk | null")
def getname(ctx: Context, raw: list[Payload]) -> Reply:
    """The name of this connection."""
    return ctx.client.name or None


@command("CLIENT|ID", arity=2, group=GROUP, syntax="CLIENT ID", reply=":<id>")
def id_(ctx: Context, raw: list[Payload]) -> Reply:
    """The number of this connection; its tenant has none of that number before or after it."""
    return ctx.client.id


@command(
    "CLIENT|INFO", arity=2, group=GROUP, syntax="CLIENT INFO", reply="one line, as LIST has it"
)
def info(ctx: Context, raw: list[Payload]) -> Reply:
    """This connection's line of CLIENT LIST."""
    return lines([ctx.client])


@command(
    "CLIENT|LIST",
    arity=-2,
    group=GROUP,
    syntax="CLIENT LIST [TYPE normal | master | replica | pubsub] [ID <id> ...]",
    reply="a bulk, a line of field=value words for each connection",
    errors=("-ERR Unknown client type '<type>'", "-ERR Invalid client ID"),
)
def list_(ctx: Context, raw: list[Payload]) -> Reply:
    """All connections of the tenant, or those of a kind or with the given ids (one of the two
    options)."""
    clients = ctx.tenant.clients
    match [word(option) for option in raw[:1]], raw[1:]:
        case [], _:
            return lines(clients.values())
        case ["TYPE"], [kind]:
            if word(kind) not in KINDS:
                raise PionError(f"Unknown client type '{shown_word(kind)}'")
            return lines(clients.values() if KINDS[word(kind)] else ())
        case ["ID"], [_, *_] as ids:
            wanted = dict.fromkeys(client_id(value) for value in ids)
            return lines(clients[number] for number in wanted if number in clients)
    raise syntax_error()


def client_id(value: Payload) -> int:
    try:
        return integer(value)
    except PionError:
        raise PionError("Invalid client ID") from None


@command(
    "CLIENT|SETINFO",
    arity=4,
    group=GROUP,
    syntax="CLIENT SETINFO LIB-NAME | LIB-VER <value>",
    reply="+OK",
    errors=("-ERR Unrecognized option '<word>'", *LABEL_ERRORS),
)
def setinfo(ctx: Context, raw: list[Payload]) -> Reply:
    """Tell which client library this is; CLIENT LIST shows it."""
    field = LIBRARY_FIELDS.get(word(raw[0]))
    if field is None:
        raise PionError(f"Unrecognized option '{shown_word(raw[0])}'")
    ctx.client.library[field] = label(raw[1], field)
    return OK


@command("CLIENT|NO-EVICT", arity=3, group=GROUP, syntax="CLIENT NO-EVICT ON | OFF", reply="+OK")
def no_evict(ctx: Context, raw: list[Payload]) -> Reply:
    """Accepted and shown by CLIENT LIST; connections are never evicted anyway."""
    if word(raw[0]) not in SWITCH:
        raise syntax_error()
    ctx.client.no_evict = SWITCH[word(raw[0])]
    return OK


def lines(clients: Iterable[Client]) -> bytes:
    """CLIENT LIST's text: the fields of Redis that mean something here, under its names."""
    now = time.time()
    return b"".join(line(each, now) for each in clients)


def line(each: Client, now: float) -> bytes:
    fields: dict[str, object] = {
        "id": each.id,
        "addr": each.address,
        "laddr": each.local_address,
        "name": each.name.decode("ascii"),
        "age": int(now - each.created),
        "idle": int(now - each.last_active),
        "flags": "e" if each.no_evict else "N",
        "db": each.db,
        "cmd": each.last_command.lower(),
        "user": each.tenant.name if each.tenant else "",
        "resp": each.proto,
        **{
            field: each.library.get(field, b"").decode("ascii") for field in LIBRARY_FIELDS.values()
        },
    }
    return (" ".join(f"{name}={value}" for name, value in fields.items()) + "\n").encode()
