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
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Final, TypeAlias

from pion_server.errors import PionError, ProtocolError, from_wire
from pion_server.wire.limits import MAX_DEPTH, Limits
from pion_server.wire.receive import CRLF, NO_BULK, Receiver, integer
from pion_server.wire.values import Payload, Reply, Status


class Incomplete(Enum):
    """Not a reply: None is one."""

    INCOMPLETE = auto()


INCOMPLETE: Final = Incomplete.INCOMPLETE

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
    """One connection's replies, in order."""

    __slots__ = ("_blob", "_bulks", "_frames", "_sink", "limits", "pushes")

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self.limits = limits
        self.pushes: list[list[Any]] = []
        self._sink: Sink | None = None
        self._bulks = 0  # bulk strings of this reply so far
        self._blob = b""  # the type of the string being received
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
            value: Reply | Incomplete
            if self._nbytes != NO_BULK:
                payload = self._take_bulk()
                if payload is None:
                    return INCOMPLETE
                value = _BLOBS[self._blob](payload)
            else:
                line = self._take_line(CRLF, "too long a line in a reply")
                if line is None:
                    return INCOMPLETE
                value = self._begin(line[:1], line[1:])
            reply = self._settle(value)
            if reply is not INCOMPLETE:
                self._sink, self._bulks = None, 0
                return reply

    def _begin(self, kind: bytes, text: bytes) -> Reply | Incomplete:
        """The value of a one-line reply; of a longer one, INCOMPLETE with its header taken in."""
        if kind in _SCALARS:
            return _SCALARS[kind](text)
        if kind in _BLOBS:
            return self._begin_blob(kind, text)
        if kind in _ITEMS_PER_ENTRY:
            return self._begin_aggregate(kind, text)
        raise ProtocolError(f"unknown reply type {kind!r}")

    def _begin_blob(self, kind: bytes, text: bytes) -> Reply | Incomplete:
        if kind == b"$" and text == b"-1":
            return None
        nbytes = integer(text)
        if nbytes is None or not 0 <= nbytes <= self.limits.max_bulk:
            raise ProtocolError("invalid bulk length")
        self._blob = kind
        self._expect_bulk(nbytes, self._ask_sink(nbytes) if kind == b"$" else None)
        return INCOMPLETE

    def _ask_sink(self, nbytes: int) -> memoryview | None:
        frames = self._frames
        if len(frames) > 1 or (frames and frames[0].kind in _NO_PART):
            return None
        index = self._bulks
        self._bulks += 1
        into = self._sink(index, nbytes) if self._sink is not None else None
        if into is not None:
            _check_fit(index, nbytes, into)
        return into

    def _begin_aggregate(self, kind: bytes, text: bytes) -> Reply | Incomplete:
        if kind == b"*" and text == b"-1":
            return None
        count = integer(text)
        if count is None or not 0 <= count <= self.limits.max_args:
            raise ProtocolError("invalid multibulk length")
        if len(self._frames) == MAX_DEPTH:
            raise ProtocolError(f"a reply nested deeper than {MAX_DEPTH}")
        if kind == b">" and self._frames:
            raise ProtocolError("a push frame inside a reply")
        self._frames.append(_Frame(kind, count * _ITEMS_PER_ENTRY[kind]))
        return INCOMPLETE

    def _settle(self, value: Reply | Incomplete) -> Reply | Incomplete:
        """Put a value where it belongs and close what it completes; the reply, if that is all."""
        if self._nbytes != NO_BULK:
            return INCOMPLETE
        while self._frames:
            frame = self._frames[-1]
            if value is not INCOMPLETE:
                frame.items.append(value)
            if len(frame.items) < frame.count:
                return INCOMPLETE
            self._frames.pop()
            value = self._closed(frame)
        return value

    def _closed(self, frame: _Frame) -> Reply | Incomplete:
        if frame.kind == b">":
            self.pushes.append(frame.items)
        if frame.kind in _NO_PART:
            return INCOMPLETE
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


def _text(payload: Payload) -> str:
    return bytes(payload).decode("utf-8", "replace")


def _integer(text: bytes) -> int:
    number = integer(text)
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
    b"+": lambda text: Status(_text(text)),
    b"-": lambda text: from_wire(_text(text)),
    b":": _integer,
    b",": _double,
    b"#": _boolean,
    b"(": _big_number,
    b"_": _null,
}
_BLOBS: dict[bytes, Callable[[Payload], Reply]] = {
    b"$": lambda payload: payload,
    b"!": lambda payload: from_wire(_text(payload)),
    b"=": _verbatim,
}
_ITEMS_PER_ENTRY = {b"*": 1, b"~": 1, b">": 1, b"%": 2, b"|": 2}
_NO_PART = (b">", b"|")  # push frames and attributes come along with a reply
