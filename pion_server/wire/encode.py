"""Replies and requests -> pieces of bytes, ready for one write each.

Small parts are joined, so a small message is one piece; payloads of BY_REFERENCE bytes and more
are passed on as they are, never copied. Replies are encoded lazily: a piece is made when the one
before it was taken, so a slow reader holds back what a Stream computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from pion_server.errors import PionError
from pion_server.wire.limits import BY_REFERENCE
from pion_server.wire.values import Payload, Reply, Status, Stream

# Joined pieces are about this large: far beyond where a system call matters, and small enough to
# stay in the cache between the join and the send.
JOIN = 64 * 1024

Argument: TypeAlias = bytes | memoryview | str | int | float

_BOOLEANS = {2: (b":0\r\n", b":1\r\n"), 3: (b"#f\r\n", b"#t\r\n")}
_NULLS = {2: b"$-1\r\n", 3: b"_\r\n"}


def encode_reply(reply: Reply, proto: int) -> Iterator[Payload]:
    """The pieces of a reply in RESP2 or RESP3 (`proto` 2 or 3); values.py says what becomes what.

    Raises PionError for a memoryview that is not contiguous. Raises RuntimeError for a Stream that
    yields more or less than it declared: the frame is broken then, and the connection must close.
    """
    return joined(_reply_parts(reply, proto))


def encode_request(arguments: Sequence[Argument]) -> list[Payload]:
    """The pieces of a request. Numbers go as decimal text, memoryviews of any format as their
    bytes; raises PionError for one that is not C-contiguous."""
    return list(joined(_request_parts(arguments)))


def joined(parts: Iterable[Payload]) -> Iterator[Payload]:
    """The same bytes, with small parts put together."""
    small: list[Payload] = []
    size = 0
    for part in parts:
        if len(part) < BY_REFERENCE:
            small.append(part)
            size += len(part)
            if size < JOIN:
                continue
        if small:
            yield b"".join(small)
            small.clear()
            size = 0
        if len(part) >= BY_REFERENCE:
            yield part
    if small:
        yield b"".join(small)


def _request_parts(arguments: Sequence[Argument]) -> Iterator[Payload]:
    yield b"*%d\r\n" % len(arguments)
    for argument in arguments:
        yield from _bulk(payload_of(argument))


def _reply_parts(reply: Reply, proto: int) -> Iterator[Payload]:
    match reply:
        case None:
            yield _NULLS[proto]
        case bool():
            yield _BOOLEANS[proto][reply]
        case int():
            yield b":%d\r\n" % reply
        case float():
            yield from (b",%b\r\n" % _decimal(reply),) if proto == 3 else _bulk(_decimal(reply))
        case Status():
            yield f"+{reply.text}\r\n".encode()
        case PionError():
            yield f"-{reply.wire()}\r\n".encode(errors="backslashreplace")
        case bytes() | memoryview() | str():
            yield from _bulk(payload_of(reply))
        case Stream():
            yield from _stream(reply)
        case Mapping():
            yield b"%%%d\r\n" % len(reply) if proto == 3 else b"*%d\r\n" % (2 * len(reply))
            for key, value in reply.items():
                yield from _bulk(key.encode())
                yield from _reply_parts(value, proto)
        case Sequence():
            yield b"*%d\r\n" % len(reply)
            for item in reply:
                yield from _reply_parts(item, proto)
        case _:
            raise TypeError(f"{type(reply).__name__} is no reply")


def _decimal(number: int | float) -> bytes:
    """The shortest text that reads back as the same number; numpy's scalars included."""
    return b"%d" % number if isinstance(number, int) else float.__repr__(number).encode()


def payload_of(value: Argument) -> Payload:
    """What an argument is on the wire. Raises PionError for a memoryview with gaps."""
    match value:
        case bytes():
            return value
        case memoryview():
            return as_bytes(value)
        case str():
            return value.encode()
        case _:
            return _decimal(value)


def _bulk(payload: Payload) -> Iterator[Payload]:
    yield b"$%d\r\n" % len(payload)
    yield payload
    yield b"\r\n"


def _stream(stream: Stream) -> Iterator[Payload]:
    yield b"$%d\r\n" % stream.nbytes
    yield from pieces_of(stream)
    yield b"\r\n"


def pieces_of(stream: Stream) -> Iterator[Payload]:
    """Its bytes, as they are made. Raises RuntimeError where they are not as many as declared."""
    left = stream.nbytes
    for piece in stream.pieces:
        part = as_bytes(piece)
        left -= len(part)
        if left < 0:
            break
        yield part
    if left:
        wrong = "more" if left < 0 else f"{left} bytes less"
        raise RuntimeError(f"a stream of {stream.nbytes} bytes yielded {wrong} than it declared")


def as_bytes(view: memoryview) -> memoryview:
    """The same memory in format B, one dimension; raises PionError if it has gaps."""
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    if not view.c_contiguous:
        raise PionError("a memoryview must be C-contiguous to be sent; copy it first")
    # Not cast(): it knows native single-character formats only, and no zeros in the shape.
    return np.asarray(view).reshape(-1).view(np.uint8).data
