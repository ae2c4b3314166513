"""Replies and requests -> pieces of bytes of the binary lane; as wire/encode.py does for RESP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from struct import pack

from pion_server.errors import PionError
from pion_server.wire import fast
from pion_server.wire.encode import Argument, joined, payload_of, pieces_of
from pion_server.wire.values import Payload, Reply, Status, Stream

_BOOLEANS = (b"\0", b"\1")
# Errors that a client acts on without reading their text.
_STATUS_OF = {"COLDMISS": fast.COLDMISS}


def encode_fast_reply(reply: Reply, proto: int = 3) -> Iterator[Payload]:
    """The pieces of a reply; `proto` makes no difference here. Raises what encode_reply raises."""
    return joined(_parts(reply))


def encode_fast_request(arguments: Sequence[Argument]) -> list[Payload]:
    """The pieces of a request, its name first. Raises what encode_request raises."""
    name, rest = arguments[0], arguments[1:]
    number = fast.NUMBERS.get(name, fast.BY_NAME) if isinstance(name, str) else fast.BY_NAME
    payloads = [payload_of(each) for each in (rest if number else arguments)]
    count, lengths = len(payloads), [len(each) for each in payloads]
    body = count * fast.LENGTH_BYTES + sum(lengths)
    header = fast.REQUEST.pack(fast.MAGIC, fast.VERSION, number, count, body)
    return list(joined([header, pack(f"<{count}Q", *lengths), *payloads]))


def _parts(reply: Reply) -> Iterator[Payload]:
    match reply:
        case None:
            yield _header(fast.NULL, 0)
        case bool():
            yield from _string(fast.BOOLEAN, _BOOLEANS[reply])
        case int():
            yield from _string(fast.INTEGER, fast.INT64.pack(reply))
        case float():
            yield from _string(fast.DOUBLE, fast.FLOAT64.pack(reply))
        case Status():
            yield from _string(fast.STATUS, reply.text.encode())
        case PionError():
            text = reply.wire().encode(errors="backslashreplace")
            yield from _string(fast.ERROR_TEXT, text, _STATUS_OF.get(reply.prefix, fast.ERROR))
        case bytes() | memoryview() | str():
            yield from _string(fast.BULK, payload_of(reply))
        case Stream():
            yield _header(fast.BULK, reply.nbytes)
            yield from pieces_of(reply)
        case Mapping():
            yield _header(fast.MAP, len(reply))
            for key, value in reply.items():
                yield from _string(fast.BULK, key.encode())
                yield from _parts(value)
        case Sequence():
            yield _header(fast.ARRAY, len(reply))
            for item in reply:
                yield from _parts(item)
        case _:
            raise TypeError(f"{type(reply).__name__} is no reply")


def _string(kind: bytes, payload: Payload, status: int = fast.OK) -> Iterator[Payload]:
    yield _header(kind, len(payload), status)
    yield payload


def _header(kind: bytes, number: int, status: int = fast.OK) -> bytes:
    return fast.VALUE.pack(fast.MAGIC, status, kind, number)
