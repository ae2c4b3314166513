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
    return pieces_of(_reply_parts(reply, proto))


def encode_request(arguments: Sequence[Argument]) -> list[Payload]:
    """The pieces of a request. Numbers go as decimal text, memoryviews of any format as their
    bytes; raises PionError for one that is not C-contiguous."""
    parts: list[Payload] = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        parts += _bulk(payload_of(argument))
    return list(pieces_of(parts))


def pieces_of(parts: Iterable[Payload]) -> Iterator[Payload]:
    """The same bytes, with small parts put together. Parts that are still to be made are made one
    by one."""
    if isinstance(parts, list | tuple):
        sizes = list(map(len, parts))
        if max(sizes) < BY_REFERENCE and sum(sizes) < JOIN:  # nearly always
            return iter((b"".join(parts),))
    return _joined(parts)


def _joined(parts: Iterable[Payload]) -> Iterator[Payload]:
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


def _reply_parts(reply: Reply, proto: int) -> Iterable[Payload]:
    match reply:
        case Status():
            return (f"+{reply.text}\r\n".encode(),)
        case bytes() | memoryview() | str():
            return _bulk(payload_of(reply))
        case None:
            return (_NULLS[proto],)
        case bool():
            return (_BOOLEANS[proto][reply],)
        case int():
            return (b":%d\r\n" % reply,)
        case float():
            return (b",%b\r\n" % _decimal(reply),) if proto == 3 else _bulk(_decimal(reply))
        case PionError():
            return (f"-{reply.wire()}\r\n".encode(errors="backslashreplace"),)
        case Stream():
            return _stream(reply)
        case Mapping():
            return _map(reply, proto)
        case Sequence():
            return _array(reply, proto)
        case _:
            raise TypeError(f"{type(reply).__name__} is no reply")


def _map(entries: Mapping[str, Reply], proto: int) -> Iterator[Payload]:
    yield b"%%%d\r\n" % len(entries) if proto == 3 else b"*%d\r\n" % (2 * len(entries))
    for key, value in entries.items():
        yield from _bulk(key.encode())
        yield from _reply_parts(value, proto)


def _array(items: Sequence[Reply], proto: int) -> Iterator[Payload]:
    yield b"*%d\r\n" % len(items)
    for item in items:
        yield from _reply_parts(item, proto)


def _decimal(number: int | float) -> bytes:
    """The shortest text that reads back as the same number; numpy's scalars included."""
    return b"%d" % number if isinstance(number, int) else float.__repr__(number).encode()


def payload_of(value: Argument) -> Payload:
    """What an argument is on the wire. Raises PionError for a memoryview with gaps."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    return as_bytes(value) if isinstance(value, memoryview) else _decimal(value)


def _bulk(payload: Payload) -> tuple[Payload, ...]:
    return b"$%d\r\n" % len(payload), payload, b"\r\n"


def _stream(stream: Stream) -> Iterator[Payload]:
    yield b"$%d\r\n" % stream.nbytes
    yield from made(stream)
    yield b"\r\n"


def made(stream: Stream) -> Iterator[Payload]:
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
    contiguous = view.c_contiguous
    if contiguous and view.ndim == 1 and view.format == "B":
        return view
    if not contiguous:
        raise PionError("a memoryview must be C-contiguous to be sent; copy it first")
    # Not cast(): it knows native single-character formats only, and no zeros in the shape.
    return np.asarray(view).reshape(-1).view(np.uint8).data
