"""docs/PROTOCOL.md: what holds for every command, and an entry for each row of the command table.

    python -m pion_server.commands.reference > docs/PROTOCOL.md

Numbers and names come from the constants and tables they describe, so the page cannot drift from
the server; a test fails when the file is stale.
"""

from __future__ import annotations

from collections.abc import Iterator

from pion_server.codecs.convert import WireFormat
from pion_server.codecs.table import by_name, names
from pion_server.commands import load_families
from pion_server.commands.arguments import MAX_NAME
from pion_server.commands.registry import TABLE, Command
from pion_server.commands.subcommands import rows_of
from pion_server.config import Config
from pion_server.errors import PionError
from pion_server.store.admission import GHOSTS
from pion_server.store.schema import MAX_DIM, MAX_LAYERS
from pion_server.store.session import MAX_TOKENS
from pion_server.store.store import LEASE_MS
from pion_server.store.units import CHUNK_KEYS
from pion_server.wire.limits import BEFORE_AUTH, MAX_ARGS, MAX_LINE

# Every group of the table, in the order of the page.
GROUPS = {
    "KV.PREFIX": "Prefixes",
    "V": "Sessions of rows",
    "SSM.PREFIX": "Recurrent states",
    "ATTEND": "Attention",
    "INDEX": "Attention indexes",
    "PION": "The receipt and the workers",
    "Strings": "Plain keys: values",
    "Keys": "Plain keys: the keyspace",
    "Connection": "The connection",
    "Server": "The server",
}
MAX_BULK: int = Config.model_fields["max_bulk"].default
MAX_CLIENTS: int = Config.model_fields["maxclients"].default
# What any command may answer, as it starts on the wire, and when.
COMMON_ERRORS = {
    "-ERR unknown command '<name>', with args beginning with:": "the table below has no such row",
    "-ERR wrong number of arguments for '<name>' command": "too few arguments, or too many",
    "-ERR <argument> is missing": "the command ends before a value that it needs",
    "-ERR <argument> must be": "the value is of the wrong kind, length or size",
    "-ERR unknown option '<word>'": "no option of this command; the known ones are named",
    "-ERR option <word> is given twice": "each option counts once",
    "-ERR unexpected argument": "something is left over",
    "-ERR unknown FMT '<word>'": "the known ones are named",
    "-ERR <range> is half-open and needs start < end": "an empty or backward range",
    "-ERR syntax error": "plain commands: as Redis says it",
    "-ERR value is not an integer or out of range": "plain commands: as Redis says it",
    "-ERR names begin with": "the name does not begin as the server's `--ns-prefix` wants it",
    "-ERR max number of clients reached": "on connecting or AUTH; the connection is closed",
    "-NOAUTH Authentication required.": "the server has a password, and AUTH has not come yet",
    "-ERR <COMMAND> session lives on worker <n>": "see Workers, above",
    "-ERR worker 0, which keeps the plain keys, did not answer": "it is being started again, or "
    "hangs; a write may or may not have been carried out",
    "-ERR internal error": "a defect of the server; its log has the rest",
}

HEAD = f"""\
# The protocol

<!-- Made by `python -m pion_server.commands.reference > docs/PROTOCOL.md`: change it there. -->

`pion-server` speaks the protocol of Redis, so every Redis client can talk to it. First what holds
for all commands, then the commands.

## Frames

- A request is an array of bulk strings, its first the command's name in any case of letters.
- Replies are RESP2 until the client sends `HELLO 3`. Below, "null" is `$-1` in RESP2 and `_` in
  RESP3, "a map" a flat array and `%`, a double a bulk string and `,`.
- Requests may be sent without waiting for replies. Replies come in the order of the requests, and
  a pipeline sees its own writes.
- A request may also be one line of words, as typed into `nc`; quotes work as in Redis.
- A client that shuts down its sending side still gets the replies it is owed, but not over TLS.

## Rows

A session holds rows: `dim` values each, in layers, by token id. A blob of rows is nothing but the
values of `count` rows in token order (C order), little-endian. FMT says what they are on the wire:

| FMT | a row of `dim` values |
|---|---|
{{formats}}

Where FMT is what the session stores, bytes are passed through untouched: exact, and fast. In any
other case values are converted through fp32, rounding to nearest even. NaN and infinity are kept.
Stored formats (`<codec>`): {", ".join(f"`{name}`" for name in names())}.

Ranges are half-open. A range that is not wholly there is an error, never short data; a store is
carried out wholly or not at all. In a bitmap bit `i` is bit `i % 8` of byte `i // 8`, lowest first.

## How a prefix lives

A namespace is two sessions, `<ns>_pk` for keys and `<ns>_pv` for values. Its life in four lines:

```
KV.PREFIX.REGISTER chat-7 192 fp16 LAYERS 30 TOKENS 512 PREFILL_MS 1830 FINGERPRINT 9f3c
KV.PREFIX.STORE chat-7 0 512 FMT NATIVE DATA <k_0> <v_0> <k_1> <v_1> ...
KV.PREFIX.LOOKUP chat-7 FINGERPRINT 9f3c
KV.PREFIX.FETCH chat-7 FMT NATIVE FINGERPRINT 9f3c
```

**Sealing.** LAYERS and TOKENS declare what a complete prefix holds. Such a namespace is a hit only
when every row of every layer is in on both sides, so nobody meets a prefix that is on its way.
Without them REGISTER alone makes it a hit, and its length is the number of rows of layer 0 of K.

**Fingerprint.** 2 to 128 hex digits that stand for the model, its weights, the tokenizer, the
codec: whatever must be equal for stored rows to be usable. A command that names one, on a
namespace that was registered with another or with none, is `-MISMATCH`.

**Memory.** With `--max-memory` or `--max-sessions` a write makes room by dropping others, each as
a whole: a namespace with both sessions and its recurrent states, a session or states without a
namespace, a plain key (two that are called `<x>{CHUNK_KEYS[0].decode()}` and
`<x>{CHUNK_KEYS[1].decode()}`, as a stock LMCache sets them, together). Those that name a namespace
as their PARENT go before it; else what was used longest ago goes first. What EXISTS, LOOKUP or
MATCH said to be there counts as used {LEASE_MS // 1000} seconds ahead. Memory is rows, values,
names, and about what the server takes to keep them. A write that would not fit even then is `-OOM`,
and nothing is dropped for it.

**Admission.** With `--admission N` a namespace, session or plain key that is not there is kept only
when it is written for the N-th time among the last {GHOSTS:,} names. Until then the write, and rows
and states for it, are answered `+OK` and dropped, and a look-up says that it is not there. SET with
NX is always carried out.

## Workers

A server with `-w N` is N processes behind one port, and a connection lands on any of them. What
goes by the name of a session or namespace is done by the one that holds it, and refused by the
others with `-ERR <COMMAND> session lives on worker <n>`: nothing was done, and the same request has
to be sent to that worker's own port, which PION.WORKERS tells. A name belongs to the worker where
the first thing under it was made: a namespace, its `<ns>_pk` and `<ns>_pv`, and the recurrent
states under `<ns>` are one name; attention state under `<ns>` or `<ns>_attn` is where that is, and
where it was stored if nobody has it. KV.PREFIX.LOOKUP and KV.PREFIX.MATCH are answered by every
worker alike, and so are plain keys. Counters and limits are those of the worker that answers.

## Limits

| what | limit |
|---|---|
| an argument | {MAX_BULK >> 30} GiB |
| arguments of a request | {MAX_ARGS:,} |
| clients at a time | {MAX_CLIENTS:,} (`--maxclients`), the same share for each tenant |
| an inline request or a header line | {MAX_LINE >> 10} KB |
| before AUTH, where the server has a password | {BEFORE_AUTH.max_args} arguments of \
{BEFORE_AUTH.max_bulk >> 10} KB |
| the name of a session or namespace | 1 to {MAX_NAME:,} bytes, any bytes |
| values of a row (`dim`) | 1 to {MAX_DIM:,} |
| layers | 1 to {MAX_LAYERS:,} |
| token ids | 0 to {MAX_TOKENS - 1:,} |

## Errors

An error is one line, `-<PREFIX> <message>`. After a refused command the connection goes on, and
nothing of the command was carried out. Only bytes that are no request, `-ERR Protocol error: ...`,
close the connection, since nobody knows where the next request would begin.

| prefix | meaning |
|---|---|
{{prefixes}}

Any command may answer one of these (`<...>` stands for something), beside those of its entry:

| begins with | when |
|---|---|
{{common}}

## What is not here

Types other than strings, transactions, scripts, publish and subscribe, blocking commands, ACL
users, CONFIG SET, replication and cluster commands. Anything that is not listed below is
`-ERR unknown command`, and the connection lives.
"""


def page() -> str:
    """All of docs/PROTOCOL.md."""
    load_families()
    head = HEAD.format(
        formats="\n".join(f"| `{fmt.name}` | {format_size(fmt)} |" for fmt in WireFormat),
        prefixes="\n".join(f"| `-{cls.prefix}` | {meaning(cls)} |" for cls in error_classes()),
        common="\n".join(f"| `{text}` | {when} |" for text, when in COMMON_ERRORS.items()),
    )
    return "\n".join([head, *(group(*item) for item in GROUPS.items())])


def format_size(fmt: WireFormat) -> str:
    if fmt is WireFormat.NATIVE:
        return "the bytes that the session's codec stores"
    return f"{by_name(fmt.value).row_bytes(1)} * dim bytes"


def error_classes() -> Iterator[type[PionError]]:
    """The classes that have a prefix of their own, those of the client left out."""
    yield from (cls for cls in PionError.__subclasses__() if cls.prefix != PionError.prefix)


def meaning(cls: type[PionError]) -> str:
    return " ".join((cls.__doc__ or "").split())


def group(name: str, title: str) -> str:
    rows = [row for _, row in sorted(TABLE.items()) if row.group == name]
    return "\n".join([f"## {title}\n", *map(entry, rows)])


def entry(row: Command) -> str:
    """A command: wire form, what it does, reply, errors; then its subcommands."""
    name = row.name.replace("|", " ")
    errors = "; ".join(f"`{error}`" for error in row.errors)
    lines = [
        f"### {name}\n",
        f"```\n{forms(row)}\n```\n",
        f"{prose(row.summary)}\n",
        f"- Reply: {prose(row.reply)}",
        *([f"- Errors: {errors}"] if errors else []),
        "",
    ]
    return "\n".join([*lines, *map(entry, rows_of(row.name))])


def prose(text: str) -> str:
    """Text in which `<x>` stays what it is, and does not become HTML."""
    return text.replace("<", "\\<")


def forms(row: Command) -> str:
    """The wire forms, one a line."""
    name = row.name.replace("|", " ")
    return row.syntax.replace(f" | {name} ", f"\n{name} ")


if __name__ == "__main__":
    print(page(), end="")
