"""Connection commands and plain keys, as Redis has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pion_server.client.buffers import Buffer
from pion_server.client.calls.base import (
    Call,
    Name,
    array,
    bulk,
    done,
    flag,
    integer,
    lines,
    mapping,
    option,
    optional_bulk,
    received_into,
    status,
    unexpected,
    words,
)
from pion_server.wire.encode import Argument
from pion_server.wire.replies import Sink
from pion_server.wire.values import OK, Payload, Reply


def ping() -> Call[str]:
    """`PONG`."""
    return Call(words("PING"), status)


def echo(message: Name) -> Call[bytes]:
    """The message again."""
    return Call(words("ECHO", message), lambda reply: bytes(bulk(reply)))


def hello(user: str = "default", password: str | None = None) -> Call[Mapping[str, Any]]:
    """Speak RESP3, and log in where there is a password; facts of the server. Raises WrongPass."""
    login = option("AUTH", user, password) if password is not None else ()
    return Call((*words("HELLO", 3), *login), mapping)


def auth(password: str, user: str = "default") -> Call[None]:
    """Log in. Raises WrongPass."""
    return Call(words("AUTH", user, password), done)


def select(db: int) -> Call[None]:
    """Use the plain keys of another db."""
    return Call(words("SELECT", db), done)


def set_(
    key: Name,
    value: Name | Buffer,
    *,
    ex: int | None = None,
    px: int | None = None,
    nx: bool = False,
    xx: bool = False,
) -> Call[bool]:
    """Set a key, for `ex` seconds or `px` milliseconds; only if it is absent (nx) or there (xx).
    Whether it was set."""
    return Call(
        words("SET", key, value) + _set_options(ex, px, nx, xx), _was_set, retry=not (nx or xx)
    )


def set_get(
    key: Name,
    value: Name | Buffer,
    *,
    ex: int | None = None,
    px: int | None = None,
    nx: bool = False,
    xx: bool = False,
) -> Call[Payload | None]:
    """`set`, answering the value that the key had, or None."""
    args = words("SET", key, value) + _set_options(ex, px, nx, xx) + words("GET")
    return Call(args, optional_bulk, retry=False)


def _set_options(ex: int | None, px: int | None, nx: bool, xx: bool) -> tuple[Argument, ...]:
    switches = words(*(word for word, given in (("NX", nx), ("XX", xx)) if given))
    return option("EX", ex) + option("PX", px) + switches


def _was_set(reply: Reply) -> bool:
    return reply == OK if reply is None or reply == OK else unexpected(reply)


def get(key: Name, *, into: Buffer | None = None) -> Call[Payload | None]:
    """A key's value, received into `into` where it is given (its size must be the value's), or
    None. Large values are memoryviews."""
    parse, sink = received_into(into, optional_bulk)
    return Call(words("GET", key), parse, sink)


def mget(*keys: Name, into: Sink | None = None) -> Call[list[Payload | None]]:
    """The keys' values in their order, None for a key that is absent. `into(i, nbytes)` says where
    the i-th value that is there is received."""
    return Call(words("MGET", *keys), lambda reply: [optional_bulk(v) for v in array(reply)], into)


def mset(items: Mapping[Name, Name | Buffer]) -> Call[None]:
    """Set all keys at once."""
    return Call(words("MSET", *(word for item in items.items() for word in item)), done)


def exists(*keys: Name) -> Call[int]:
    """How many of the keys are there; one named twice counts twice."""
    return Call(words("EXISTS", *keys), integer)


def delete(*keys: Name) -> Call[int]:
    """Delete keys. How many were there."""
    return Call(words("DEL", *keys), integer, retry=False)


def strlen(key: Name) -> Call[int]:
    """Bytes of a key's value, 0 where it is absent."""
    return Call(words("STRLEN", key), integer)


def expire(key: Name, seconds: int) -> Call[bool]:
    """Delete the key after so many seconds. Whether it is there."""
    return Call(words("EXPIRE", key, seconds), flag)


def ttl(key: Name) -> Call[int]:
    """Seconds until the key goes; -1: it stays, -2: it is absent."""
    return Call(words("TTL", key), integer)


def pttl(key: Name) -> Call[int]:
    """Milliseconds until the key goes; -1: it stays, -2: it is absent."""
    return Call(words("PTTL", key), integer)


def persist(key: Name) -> Call[bool]:
    """Take the deadline away. Whether there was one."""
    return Call(words("PERSIST", key), flag, retry=False)


def dbsize() -> Call[int]:
    """Plain keys in the db."""
    return Call(words("DBSIZE"), integer)


def scan(
    cursor: int = 0, *, match: Name | None = None, count: int | None = None
) -> Call[tuple[int, list[bytes]]]:
    """Some keys, and the cursor to go on with; 0: that was all."""
    return Call(words("SCAN", cursor) + option("MATCH", match) + option("COUNT", count), _page)


def _page(reply: Reply) -> tuple[int, list[bytes]]:
    cursor, keys = array(reply)
    return int(bytes(bulk(cursor))), [bytes(bulk(key)) for key in array(keys)]


def type_(key: Name) -> Call[str]:
    """`string`, or `none` for a key that is absent."""
    return Call(words("TYPE", key), status)


def flushdb() -> Call[None]:
    """Delete all plain keys of the db. Prefixes stay."""
    return Call(words("FLUSHDB"), done)


def info(*sections: str) -> Call[dict[str, str]]:
    """The fields of INFO."""
    return Call(words("INFO", *sections), lines)
