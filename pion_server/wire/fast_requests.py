"""Bytes -> requests of the binary lane; driven as wire/requests.py is, with the same limits."""

from __future__ import annotations

from collections.abc import Sequence
from struct import unpack

from pion_server.errors import ProtocolError
from pion_server.wire.fast import BY_NAME, COMMANDS, LENGTH_BYTES, MAGIC, REQUEST, VERSION
from pion_server.wire.limits import BY_REFERENCE, Limits
from pion_server.wire.receive import NO_BULK, RequestReceiver

# A number that stands for nothing becomes its own name, of which the dispatcher will say so.
_NAMES = {
    number: COMMANDS.get(number, f"0x{number:02X}").encode() for number in range(BY_NAME + 1, 256)
}


class FastRequestDecoder(RequestReceiver):
    """One connection's requests, in order."""

    __slots__ = ("_body", "_lengths", "_lengths_due", "_next")
    TRAILER = b""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._body = 0  # bytes behind the header of the request being read
        self._lengths_due = False  # nothing but its header is in
        self._lengths: Sequence[int] = ()  # of its arguments
        self._next = 0  # which of these comes next

    def _read(self) -> bool:
        between = self._nbytes == NO_BULK and self._next == len(self._lengths)
        if between and not self._take_header():
            return False
        if self._lengths_due and not self._take_lengths():
            return False
        while True:
            if self._nbytes == NO_BULK:
                self._take_small_arguments()
                if self._next == len(self._lengths):
                    return True
                self._expect_bulk(self._lengths[self._next])
                self._next += 1
            argument = self._take_bulk()
            if argument is None:
                return False
            self._arguments.append(argument)

    def _take_header(self) -> bool:
        header = self._take_struct(REQUEST)
        if header is None:
            return False
        magic, version, number, count, self._body = header
        if magic != MAGIC:
            raise ProtocolError("no frame of the binary lane begins so; is this RESP?")
        if version != VERSION:
            raise ProtocolError(f"version {version} of the binary lane; {VERSION} is spoken here")
        if number != BY_NAME:
            self._arguments.append(_NAMES[number])
        elif not count:
            raise ProtocolError("a request without a name")
        if count > self.limits.max_args:
            raise ProtocolError(f"{self.limits.refusal} count of arguments")
        self._lengths_due = True
        self._expect_bulk(count * LENGTH_BYTES)
        return True

    def _take_lengths(self) -> bool:
        table = self._take_bulk()
        if table is None:
            return False
        lengths = unpack(f"<{len(table) // LENGTH_BYTES}Q", table)
        if sum(lengths, len(table)) != self._body:
            raise ProtocolError("lengths of arguments that do not add up to the frame's")
        if lengths and max(lengths) > self.limits.max_bulk:
            raise ProtocolError(f"{self.limits.refusal} length of an argument")
        self._lengths_due, self._lengths, self._next = False, lengths, 0
        return True

    def _take_small_arguments(self) -> None:
        """Those that are all in scratch, at one go."""
        scratch, arguments, lengths = self._scratch, self._arguments, self._lengths
        at, end = self._at, self._end
        for index in range(self._next, len(lengths)):
            nbytes = lengths[index]
            last = at + nbytes
            if last > end or nbytes >= BY_REFERENCE:
                break
            arguments.append(scratch[at:last])
            at = last
        else:
            index = len(lengths)
        self._next, self._at = index, at
