"""Bytes -> replies, RESP2 and RESP3, in the vocabulary of values.py.

    decoder.expect(sink)  # optional
    while (reply := decoder.next_reply()) is INCOMPLETE:
        n = recv_into(decoder.get_buffer()); decoder.buffer_updated(n)

Strings are bytes (memoryview from BY_REFERENCE on), arrays and sets lists, maps dicts whose string
keys are str where they are UTF-8. Error replies are returned, not raised, since they may stand
inside an array. Push frames go to `pushes`; attributes are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any, ClassVar, Final, TypeAlias

from pion_server.errors import PionError, ProtocolError, from_wire
from pion_server.wire.limits import MAX_DEPTH, Limits
from pion_server.wire.receive import CRLF, NO_BULK, Receiver
from pion_server.wire.values import Payload, Reply, Status, decimal


class Incomplete(Enum):
    """Not a reply: None is one."""

    INCOMPLETE = auto()  # more bytes are needed
    OPEN = auto()  # a header was taken, and what it announces is still to come


INCOMPLETE: Final = Incomplete.INCOMPLETE
OPEN: Final = Incomplete.OPEN

# (index of the bulk string within its reply, nbytes) -> a writable memoryview of format "B" and
# exactly `nbytes` to receive it into, or None to let the decoder find memory. Every `$` string
# counts that is the reply or a direct item of it, so the payloads of an array are 0, 1, 2 ...
# whatever a header in front of them holds. Nulls and deeper strings do not count.
Sink: TypeAlias = Callable[[int, int], memoryview | None]

_DOUBLE = re.compile(rb"[+-]?(?:[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|inf|nan)")
# Python refuses to parse more digits than this by default, as the time is quadratic.
_BIG_NUMBER = re.compile(rb"[+-]?[0-9]{1,4300}")


class _Frame:
    """An aggregate whose items are still coming."""

    __slots__ = ("count", "items", "kind")

    def __init__(self, kind: bytes, count: int) -> None:
        self.kind = kind
        self.count = count
        self.items: list[Any] = []


class ReplyDecoder(Receiver):
    """One connection's replies, in order. What is between the values is RESP here."""

    __slots__ = ("_bulks", "_frames", "_kind", "_sink", "limits", "pushes")
    STRINGS: ClassVar[Mapping[bytes, Callable[[Payload], Reply]]] = {
        b"$": lambda payload: payload,
        b"!": lambda payload: from_wire(text_of(payload)),
        b"=": lambda payload: _verbatim(payload),
    }

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self.limits = limits
        self.pushes: list[list[Any]] = []
        self._sink: Sink | None = None
        self._bulks = 0  # bulk strings of this reply so far
        self._kind = b""  # of the string being received
        self._frames: list[_Frame] = []

    def expect(self, sink: Sink) -> None:
        """Receive the strings of the next reply where `sink` says."""
        self._sink = sink

    def next_reply(self) -> Reply | Incomplete:
        """The next reply, or INCOMPLETE until more bytes are received.

        Raises ProtocolError on malformed input and PionError on a sink's view that does not fit;
        the decoder then has lost its place, and raises the same on every later call.
        """
        if self._broken is not None:
            raise self._broken
        try:
            return self._reply()
        except Exception as error:
            self._break(error)
            raise

    def _reply(self) -> Reply | Incomplete:
        while True:
            value = self._take_string() if self._nbytes != NO_BULK else self._take_header()
            if value is INCOMPLETE:
                return value
            reply = self._settle(value)
            if reply is not OPEN:
                self._sink, self._bulks = None, 0
                return reply

    def _take_string(self) -> Reply | Incomplete:
        payload = self._take_bulk()
        return INCOMPLETE if payload is None else self.STRINGS[self._kind](payload)

    def _take_header(self) -> Reply | Incomplete:
        """The next value; OPEN where its items are still to come."""
        line = self._take_line(CRLF, "too long a line in a reply")
        if line is None:
            return INCOMPLETE
        kind, text = line[:1], line[1:]
        if kind in _SCALARS:
            return _SCALARS[kind](text)
        if text == b"-1" and kind in _MAY_BE_NULL:
            return None
        number = decimal(text)
        return self._begin(kind, -1 if number is None else number)

    def _begin(self, kind: bytes, number: int) -> Reply | Incomplete:
        """A string of `number` bytes, if they are there already; or OPEN for so many items."""
        if kind in self.STRINGS:
            if not 0 <= number <= self.limits.max_bulk:
                raise ProtocolError("invalid bulk length")
            self._kind = kind
            self._expect_bulk(number, self._ask_sink(number) if kind == b"$" else None)
            return self._take_string()
        if kind not in _ITEMS_PER_ENTRY:
            raise ProtocolError(f"unknown reply type {kind!r}")
        self._begin_aggregate(kind, number)
        return OPEN

    def _ask_sink(self, nbytes: int) -> memoryview | None:
        frames = self._frames
        if frames and (len(frames) > 1 or frames[0].kind in _NO_PART):
            return None
        index = self._bulks
        self._bulks += 1
        into = self._sink(index, nbytes) if self._sink is not None else None
        if into is not None:
            _check_fit(index, nbytes, into)
        return into

    def _begin_aggregate(self, kind: bytes, count: int) -> None:
        if not 0 <= count <= self.limits.max_args:
            raise ProtocolError("invalid multibulk length")
        if len(self._frames) == MAX_DEPTH:
            raise ProtocolError(f"a reply nested deeper than {MAX_DEPTH}")
        if kind == b">" and self._frames:
            raise ProtocolError("a push frame inside a reply")
        self._frames.append(_Frame(kind, count * _ITEMS_PER_ENTRY[kind]))

    def _settle(self, value: Reply | Incomplete) -> Reply | Incomplete:
        """Put a value where it belongs and close what it completes; the reply, if that is all."""
        while self._frames:
            frame = self._frames[-1]
            if value is not OPEN:
                frame.items.append(value)
            if len(frame.items) < frame.count:
                return OPEN
            self._frames.pop()
            value = self._closed(frame)
        return value

    def _closed(self, frame: _Frame) -> Reply | Incomplete:
        if frame.kind == b">":
            self.pushes.append(frame.items)
        if frame.kind in _NO_PART:
            return OPEN
        return _mapping(frame.items) if frame.kind == b"%" else frame.items


def _check_fit(index: int, nbytes: int, into: memoryview) -> None:
    usable = into.format == "B" and into.c_contiguous and not into.readonly
    if not usable or into.shape != (nbytes,):
        raise PionError(
            f"string {index} of the reply has {nbytes} bytes; the memory given for it has shape "
            f"{into.shape}, strides {into.strides}, format {into.format!r}, "
            f"{'read-only' if into.readonly else 'writable'}"
        )


def _mapping(items: list[Any]) -> dict[Any, Any]:
    return {_key(key): value for key, value in zip(items[::2], items[1::2], strict=True)}


def _key(key: Any) -> Any:
    if isinstance(key, list | dict | PionError):
        raise ProtocolError("a map key that is no string or number")
    if isinstance(key, Status):
        return key.text
    if not isinstance(key, bytes | memoryview):
        return key
    try:
        return bytes(key).decode()
    except UnicodeDecodeError:
        return bytes(key)


def text_of(payload: Payload) -> str:
    """What a person reads; bytes that are no UTF-8 are replaced."""
    return bytes(payload).decode("utf-8", "replace")


def _integer(text: bytes) -> int:
    number = decimal(text)
    if number is None:
        raise ProtocolError("invalid integer")
    return number


def _big_number(text: bytes) -> int:
    if not _BIG_NUMBER.fullmatch(text):
        raise ProtocolError("invalid big number")
    return int(text)


def _double(text: bytes) -> float:
    if not _DOUBLE.fullmatch(text):
        raise ProtocolError("invalid double")
    return float(text)


def _boolean(text: bytes) -> bool:
    if text not in (b"t", b"f"):
        raise ProtocolError("invalid boolean")
    return text == b"t"


def _null(text: bytes) -> None:
    if text:
        raise ProtocolError("invalid null")


def _verbatim(payload: Payload) -> Payload:
    if payload[3:4] != b":":
        raise ProtocolError("invalid verbatim string")
    return payload[4:]


_SCALARS: dict[bytes, Callable[[bytes], Reply]] = {
    b"+": lambda text: Status(text_of(text)),
    b"-": lambda text: from_wire(text_of(text)),
    b":": _integer,
    b",": _double,
    b"#": _boolean,
    b"(": _big_number,
    b"_": _null,
}
_MAY_BE_NULL = (b"$", b"*")
_ITEMS_PER_ENTRY = {b"*": 1, b"~": 1, b">": 1, b"%": 2, b"|": 2}
_NO_PART = (b">", b"|")  # push frames and attributes come along with a reply
