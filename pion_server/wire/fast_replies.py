"""Bytes -> replies of the binary lane, with the vocabulary, sinks and limits of wire/replies.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from struct import Struct
from typing import ClassVar

from pion_server.errors import ProtocolError, from_wire
from pion_server.wire import fast
from pion_server.wire.replies import INCOMPLETE, Incomplete, ReplyDecoder, text_of
from pion_server.wire.values import Payload, Reply, Status


def _number(form: Struct) -> Callable[[Payload], Reply]:
    def read(payload: Payload) -> Reply:
        if len(payload) != form.size:
            raise ProtocolError(f"a number of {len(payload)} bytes")
        value: int | float = form.unpack(payload)[0]
        return value

    return read


def _boolean(payload: Payload) -> bool:
    if payload not in (b"\0", b"\1"):
        raise ProtocolError("invalid boolean")
    return payload == b"\1"


def _null(payload: Payload) -> None:
    if payload:
        raise ProtocolError("invalid null")


class FastReplyDecoder(ReplyDecoder):
    """One connection's replies, in order."""

    __slots__ = ()
    TRAILER = b""
    STRINGS: ClassVar[Mapping[bytes, Callable[[Payload], Reply]]] = {
        fast.BULK: lambda payload: payload,
        fast.STATUS: lambda payload: Status(text_of(payload)),
        fast.ERROR_TEXT: lambda payload: from_wire(text_of(payload)),
        fast.INTEGER: _number(fast.INT64),
        fast.DOUBLE: _number(fast.FLOAT64),
        fast.BOOLEAN: _boolean,
        fast.NULL: _null,
    }

    def _take_header(self) -> Reply | Incomplete:
        header = self._take_struct(fast.VALUE)
        if header is None:
            return INCOMPLETE
        magic, status, kind, number = header
        if magic != fast.MAGIC:
            raise ProtocolError("no reply of the binary lane begins so")
        if (status == fast.OK) != (kind != fast.ERROR_TEXT):
            raise ProtocolError(f"status {status} does not go with type {kind!r}")
        if kind not in self.STRINGS and kind not in (fast.ARRAY, fast.MAP):
            raise ProtocolError(f"unknown reply type {kind!r}")
        return self._begin(kind, number)
