"""Bytes -> requests of the binary lane; driven as wire/requests.py is, with the same limits."""

from __future__ import annotations

import struct

from pion_server.errors import ProtocolError
from pion_server.wire.fast import BY_NAME, COMMANDS, LENGTH_BYTES, MAGIC, REQUEST, VERSION
from pion_server.wire.limits import BY_REFERENCE, Limits
from pion_server.wire.receive import NO_BULK, Receiver
from pion_server.wire.values import Payload

# A number that stands for nothing becomes its own name, of which the dispatcher will say so.
_NAMES = {
    number: COMMANDS.get(number, f"0x{number:02X}").encode() for number in range(BY_NAME + 1, 256)
}


class FastRequestDecoder(Receiver):
    """`limits` may be replaced at any time; they hold from the next header on."""

    __slots__ = ("_arguments", "_body", "_count", "_lengths", "limits")
    TRAILER = b""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self.limits = limits
        self._arguments: list[Payload] = []  # of the request being read
        self._count: int | None = None  # of its arguments, while their lengths are awaited
        self._body = 0  # bytes behind its header
        self._lengths: list[int] = []  # of the arguments that are still to come, the last first

    def next_request(self) -> list[Payload] | None:
        """The next request (at least its name), or None until more bytes are received.

        Raises ProtocolError on malformed input, and again on every later call.
        """
        if self._broken is not None:
            raise self._broken
        try:
            return self._request()
        except ProtocolError as error:
            self._break(error)
            raise

    def _request(self) -> list[Payload] | None:
        if not self._lengths and self._nbytes == NO_BULK and not self._take_header():
            return None
        if self._count is not None:
            table = self._take_bulk()
            if table is None:
                return None
            self._lengths = self._checked_lengths(table, self._count)
            self._count = None
        while self._lengths or self._nbytes != NO_BULK:
            if self._nbytes == NO_BULK:
                self._take_small_arguments()
                if not self._lengths:
                    break
                self._expect_bulk(self._lengths.pop())
            argument = self._take_bulk()
            if argument is None:
                return None
            self._arguments.append(argument)
        arguments, self._arguments = self._arguments, []
        return arguments

    def _take_header(self) -> bool:
        header = self._take_exactly(REQUEST.size)
        if header is None:
            return False
        magic, version, number, count, self._body = REQUEST.unpack(header)
        if magic != MAGIC:
            raise ProtocolError("no frame of the binary lane begins so; is this RESP?")
        if version != VERSION:
            raise ProtocolError(f"version {version} of the binary lane; {VERSION} is spoken here")
        if number != BY_NAME:
            self._arguments.append(_NAMES[number])
        elif not count:
            raise ProtocolError("a request without a name")
        if count > self.limits.max_args:
            raise ProtocolError(f"{self._invalid()} count of arguments")
        self._count = count
        self._expect_bulk(count * LENGTH_BYTES)
        return True

    def _checked_lengths(self, table: Payload, count: int) -> list[int]:
        lengths = list(struct.unpack(f"<{count}Q", table))
        if sum(lengths, len(table)) != self._body:
            raise ProtocolError("lengths of arguments that do not add up to the frame's")
        if lengths and max(lengths) > self.limits.max_bulk:
            raise ProtocolError(f"{self._invalid()} length of an argument")
        lengths.reverse()
        return lengths

    def _invalid(self) -> str:
        return "invalid" if self.limits.authenticated else "unauthenticated"

    def _take_small_arguments(self) -> None:
        """Those that are all in scratch, at one go."""
        lengths, at, end = self._lengths, self._at, self._end
        while lengths:
            last = at + lengths[-1]
            if last > end or lengths[-1] >= BY_REFERENCE:
                break
            self._arguments.append(self._scratch[at:last])
            lengths.pop()
            at = last
        self._at = at
