"""Bytes -> requests: RESP arrays of bulks, and inline commands. Malformed input is worded as
Redis words it.

    buffer = decoder.get_buffer(); n = recv_into(buffer); decoder.buffer_updated(n)
    while (request := decoder.next_request()) is not None: ...

Stricter than Redis in one point: the CRLF behind a bulk is checked, for a sender that miscounted
would otherwise have its blob stored cut or shifted.
"""

from __future__ import annotations

from pion_server.errors import ProtocolError
from pion_server.wire import inline
from pion_server.wire.limits import BY_REFERENCE, Limits
from pion_server.wire.receive import CRLF, NO_BULK, RequestReceiver
from pion_server.wire.values import Payload, decimal

_ARRAY = ord("*")
# Any web page can make a browser post to a port of its own machine, and the body would be read as
# commands. As in Redis, the first line that says HTTP ends it; Host comes with every request.
_HTTP = {b"POST", b"HOST:"}
# Headers of small bulks by their text: one lookup checks the `$` and the number.
_SMALL = {b"$%d" % nbytes: nbytes for nbytes in range(1000)}
_LONGEST_HEADER = len(b"$%d\r\n" % BY_REFERENCE)
_TOO_LARGE = 1 << 62  # beyond any buffer, so it fails the check for being all there


class RequestDecoder(RequestReceiver):
    """One connection's requests, in order."""

    __slots__ = ("_missing",)

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._missing = 0  # arguments that the request being read still lacks

    def _read(self) -> bool:
        if not self._missing and not self._begin():
            return False
        while self._missing:
            if self._nbytes == NO_BULK:
                self._take_small_arguments()
                if not self._missing:
                    break
            argument = self._take_argument()
            if argument is None:
                return False
            self._arguments.append(argument)
            self._missing -= 1
        return True

    def _begin(self) -> bool:
        """Read up to the first argument of an array, or one inline command; empty ones are
        skipped."""
        while self._at < self._end:
            if self._scratch[self._at] == _ARRAY:
                line = self._take_line(CRLF, "too big mbulk count string")
                if line is None:
                    return False
                self._missing = self._checked_count(line)
            else:
                line = self._take_line(b"\n", "too big inline request")
                if line is None:
                    return False
                self._arguments += _typed_words(line.removesuffix(b"\r"))
            if self._missing or self._arguments:
                return True
        return False

    def _take_small_arguments(self) -> None:
        """The fast path: arguments that are all in scratch. It leaves at anything else, broken
        input included, to _take_argument(). Looking at stale bytes behind `end` does no harm, as
        nothing is taken that reaches beyond it."""
        scratch, arguments = self._scratch, self._arguments
        at, end, max_bulk = self._at, self._end, self.limits.max_bulk
        before = len(arguments)
        for _ in range(self._missing):
            line_end = scratch.find(CRLF, at, at + _LONGEST_HEADER)
            if line_end < 0:
                break
            header = scratch[at:line_end]
            nbytes = _SMALL.get(header, -1)
            if nbytes < 0:
                nbytes = _length_of(header)
            first = line_end + 2
            last = first + nbytes
            if last + 2 > end or nbytes > max_bulk or scratch[last : last + 2] != CRLF:
                break
            arguments.append(scratch[first:last])
            at = last + 2
        self._missing -= len(arguments) - before
        self._at = at

    def _take_argument(self) -> Payload | None:
        """Any argument, in any number of steps."""
        if self._nbytes == NO_BULK:
            line = self._take_line(CRLF, "too big bulk count string")
            if line is None:
                return None
            self._expect_bulk(self._checked_length(line))
        return self._take_bulk()

    def _checked_count(self, line: bytes) -> int:
        count = decimal(line[1:])
        if count is None:
            raise ProtocolError("invalid multibulk length")
        if count > self.limits.max_args:
            raise ProtocolError(f"{self.limits.refusal} multibulk length")
        return max(count, 0)

    def _checked_length(self, line: bytes) -> int:
        if line[:1] != b"$":
            got = line[:1].decode("latin-1") or "\r"
            raise ProtocolError(f"expected '$', got '{got}'")
        nbytes = decimal(line[1:])
        if nbytes is None or nbytes < 0:
            raise ProtocolError("invalid bulk length")
        if nbytes > self.limits.max_bulk:
            raise ProtocolError(f"{self.limits.refusal} bulk length")
        return nbytes


def _length_of(header: bytes) -> int:
    """What the header of a bulk says, if the bulk passes through scratch; else _TOO_LARGE."""
    nbytes = decimal(header[1:]) if header[:1] == b"$" else None
    return nbytes if nbytes is not None and 0 <= nbytes < BY_REFERENCE else _TOO_LARGE


def _typed_words(line: bytes) -> list[bytes]:
    """The words of an inline command."""
    words = inline.split(line)
    if words and words[0].upper() in _HTTP:
        raise ProtocolError("this is HTTP, not RESP")
    return words
