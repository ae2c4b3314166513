"""Parsing shared by the V.* and KV.PREFIX.* families: layouts, wire formats, rows in and out."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from pion_server.codecs.convert import WireFormat, is_free, to_stored
from pion_server.codecs.table import by_name
from pion_server.commands.arguments import Arguments, shown
from pion_server.commands.context import Context
from pion_server.commands.registry import Job
from pion_server.errors import PionError
from pion_server.store.mutations import RowBlock, StoreRows
from pion_server.store.prefixes import Prefix
from pion_server.store.schema import MAX_LAYERS, LayerFormat, Schema
from pion_server.store.session import MAX_TOKENS
from pion_server.store.views import RowView
from pion_server.wire.values import OK, Reply, Stream

_SCHEMA_WORD = re.compile(r"fmt=(?P<codec>[^,]+),dim=(?P<dim>[0-9]{1,9})")

# Error replies, as the entries of the command table name them.
UNKNOWN_SESSION = "-ERR unknown session '<sid>'"
NO_SUCH_LAYER = "-ERR layer <n> is outside this session's schema"
LAYOUT_ERROR = "-ERR it exists with another layout"
LAYOUT_ERRORS = ("-ERR unknown codec '<codec>'", LAYOUT_ERROR)
NO_SCHEMA_WORD = "-ERR a schema word reads fmt=<codec>,dim=<d>"
STORE_ERRORS = (
    NO_SUCH_LAYER,
    "-ERR expected <n> bytes",
    "-ERR rows to store must lie in",
    "-ERR the session was replaced",
    "-OOM",
)
ROW_ERRORS = (
    "-ERR layer <n>: row <id> is not stored",
    "-ERR layer <n>: rows <first> to <last> are not stored",
)
FETCH_ERRORS = (NO_SUCH_LAYER, *ROW_ERRORS)


def token(args: Arguments, what: str) -> int:
    """A token position or a number of tokens."""
    return args.integer(what, 0, MAX_TOKENS)


def start_and_count(args: Arguments, start: str = "start") -> tuple[int, int]:
    """The position of the first of some tokens, and how many there are."""
    return token(args, start), args.integer("count", 1, MAX_TOKENS)


def sid_and_layer(args: Arguments) -> tuple[bytes, int]:
    return args.name("session id"), layer(args)


def layer(args: Arguments) -> int:
    """The number of a layer of states, or of attention."""
    return args.integer("layer", 0, MAX_LAYERS - 1)


def known(ctx: Context, ns: bytes) -> Prefix:
    """A namespace that is registered."""
    prefix = ctx.store.prefix(ns)
    if prefix is None:
        raise PionError("unknown namespace; KV.PREFIX.REGISTER it first")
    return prefix


def layer_index(args: Arguments, what: str = "layer") -> int:
    return args.integer(what, 0, MAX_LAYERS)


def uniform(dim: int, codec: str) -> Schema:
    """Every layer alike."""
    return Schema.same(LayerFormat(by_name(codec), dim))


def schema_words(args: Arguments) -> Schema:
    """`<n> fmt=<codec>,dim=<d> ...`, one word a layer."""
    count = args.integer("number of layers", 1, MAX_LAYERS)
    return Schema.each(tuple(_layer_format(args.text("schema word")) for _ in range(count)))


def _layer_format(word: str) -> LayerFormat:
    match = _SCHEMA_WORD.fullmatch(word.lower())
    if match is None:
        raise PionError(f"a schema word reads fmt=<codec>,dim=<d>, got {shown(word.encode())}")
    return LayerFormat(by_name(match["codec"]), int(match["dim"]))


def wire_format(args: Arguments) -> WireFormat:
    """The value of FMT."""
    word = args.keyword("FMT")
    try:
        return WireFormat[word]
    except KeyError:
        known = ", ".join(WireFormat.__members__)
        raise PionError(f"unknown FMT '{word[:40]}'; known here: {known}") from None


def fmt_or_fp32(args: Arguments) -> WireFormat:
    """What is left of the command: FMT and its value, or nothing, which is FP32."""
    fmt: WireFormat = args.options({"FMT": wire_format}).get("FMT", WireFormat.FP32)
    return fmt


def span(args: Arguments, what: str, read: Callable[[Arguments, str], int]) -> tuple[int, int]:
    """A half-open, non-empty range, `start end`."""
    start, end = read(args, f"{what} start"), read(args, f"{what} end")
    if start >= end:
        raise PionError(f"{what} is half-open and needs start < end, got {start} {end}")
    return start, end


@dataclass(frozen=True, slots=True)
class Incoming:
    """Rows of one layer as a client sent them."""

    sid: bytes
    layer: int
    blob: memoryview


def store(
    ctx: Context, rows: list[Incoming], start: int, count: int, fmt: WireFormat
) -> Reply | Job:
    """Store all of `rows` or none of them, computing off the loop only where formats differ.

    `rows` is emptied blob by blob, so a conversion never holds more than one blob twice.
    """
    if any(ctx.ignores(row.sid) for row in rows):
        return OK
    sessions = [ctx.store.session(row.sid) for row in rows]
    formats = [session.schema.layer(row.layer) for session, row in zip(sessions, rows, strict=True)]

    def convert() -> StoreRows:
        blocks = []
        for layer_format in formats:
            row = rows.pop(0)
            data = to_stored(fmt, row.blob, layer_format.codec, layer_format.dim, count)
            blocks.append(RowBlock(row.sid, row.layer, start, count, data))
        return StoreRows(tuple(blocks))

    def finish(mutation: StoreRows) -> Reply:
        # Another client may have put a namespace of another layout or model in the place of it.
        if any(ctx.store.session(session.sid) is not session for session in sessions):
            raise PionError("the session was replaced while rows for it came in; none is stored")
        ctx.apply(mutation)
        return OK

    if all(is_free(fmt, layer_format.codec) for layer_format in formats):
        return finish(convert())
    return Job(convert, finish)


def outgoing(ctx: Context, view: RowView, fmt: WireFormat) -> Stream:
    """Rows on their way to a client."""
    nbytes, pieces = view.pieces_as(fmt)
    ctx.stats.fetched(nbytes)
    return Stream(nbytes, pieces)
