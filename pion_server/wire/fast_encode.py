"""Replies and requests -> pieces of bytes of the binary lane; as wire/encode.py does for RESP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from struct import pack

from pion_server.errors import ColdMiss, PionError
from pion_server.wire import fast
from pion_server.wire.encode import Argument, made, payload_of, pieces_of
from pion_server.wire.values import Payload, Reply, Status, Stream

_BOOLEANS = (b"\0", b"\1")
# Errors that a client acts on without reading their text.
_STATUS_OF = {ColdMiss.prefix: fast.COLDMISS}


def encode_fast_reply(reply: Reply, proto: int = 3) -> Iterator[Payload]:
    """The pieces of a reply; `proto` makes no difference here. Raises what encode_reply raises."""
    return pieces_of(_parts(reply))


def encode_fast_request(arguments: Sequence[Argument]) -> list[Payload]:
    """The pieces of a request, its name first. Raises what encode_request raises."""
    name = arguments[0]
    number = fast.NUMBERS.get(name, fast.BY_NAME) if isinstance(name, str) else fast.BY_NAME
    payloads = [payload_of(each) for each in (arguments[1:] if number else arguments)]
    count, lengths = len(payloads), list(map(len, payloads))
    body = count * fast.LENGTH_BYTES + sum(lengths)
    form = f"{fast.REQUEST.format}{count}Q"  # the header and the table in one go
    header = pack(form, fast.MAGIC, fast.VERSION, number, count, body, *lengths)
    return list(pieces_of([header, *payloads]))


def _parts(reply: Reply) -> Iterable[Payload]:
    match reply:
        case Status():
            return _string(fast.STATUS, reply.text.encode())
        case bytes() | memoryview() | str():
            return _string(fast.BULK, payload_of(reply))
        case None:
            return (_header(fast.NULL, 0),)
        case bool():
            return _string(fast.BOOLEAN, _BOOLEANS[reply])
        case int():
            return _string(fast.INTEGER, fast.INT64.pack(reply))
        case float():
            return _string(fast.DOUBLE, fast.FLOAT64.pack(reply))
        case PionError():
            text = reply.wire().encode(errors="backslashreplace")
            return _string(fast.ERROR_TEXT, text, _STATUS_OF.get(reply.prefix, fast.ERROR))
        case Stream():
            return chain((_header(fast.BULK, reply.nbytes),), made(reply))
        case Mapping():
            return _map(reply)
        case Sequence():
            return _array(reply)
        case _:
            raise TypeError(f"{type(reply).__name__} is no reply")


def _map(entries: Mapping[str, Reply]) -> Iterator[Payload]:
    yield _header(fast.MAP, len(entries))
    for key, value in entries.items():
        yield from _string(fast.BULK, key.encode())
        yield from _parts(value)


def _array(items: Sequence[Reply]) -> Iterator[Payload]:
    yield _header(fast.ARRAY, len(items))
    for item in items:
        yield from _parts(item)


def _string(kind: bytes, payload: Payload, status: int = fast.OK) -> tuple[Payload, ...]:
    return _header(kind, len(payload), status), payload


def _header(kind: bytes, number: int, status: int = fast.OK) -> bytes:
    return fast.VALUE.pack(fast.MAGIC, status, kind, number)
