"""Where bytes from the socket land: the machine both decoders stand on.

`get_buffer()` says where the next bytes shall be put, `buffer_updated(n)` that n bytes were; no
other call may come between the two. Lines and small bulks pass through one scratch buffer, and
become bytes. A bulk of BY_REFERENCE bytes or more is received into memory of its own (or of the
caller), which then is the payload: apart from what had already come into scratch with its header,
it is never copied. At most RESERVE of a declared length is reserved before its bytes arrive; then
the block doubles each time it is full.

A decoder must be asked for its requests or replies until there are no more before it receives
again: what it leaves unread is at most one line or one small bulk, so scratch never fills up.
"""

from __future__ import annotations

import mmap
from struct import Struct
from typing import Any, ClassVar

import numpy as np

from pion_server.errors import ProtocolError
from pion_server.wire.blocks import AVAILABLE, BLOCKS, MAPPED_FROM
from pion_server.wire.limits import BY_REFERENCE, MAX_LINE, RESERVE, Limits
from pion_server.wire.values import Payload

CRLF = b"\r\n"
# Holds the longest line and a worthwhile read behind it. Anonymous mappings take memory only for
# the pages that were touched, so an idle connection costs little.
SCRATCH = 128 * 1024
# A read smaller than this is not worth its system call: first move what is unread to the front.
LEAST_ROOM = 32 * 1024
NO_BULK = -1


class LargeBulk:
    """One bulk on its way into memory of its own, or into `into`, of exactly `nbytes`."""

    __slots__ = ("_growing", "_lent", "_view", "filled", "nbytes")

    def __init__(self, nbytes: int, into: memoryview | None) -> None:
        self.nbytes = nbytes
        self.filled = 0
        self._growing: mmap.mmap | None = None
        if into is not None:
            self._view = into
        elif AVAILABLE and nbytes >= MAPPED_FROM:
            # resize() of a mapping moves its pages (mremap), huge ones as such. An ndarray's would
            # copy them: numpy's advice for huge pages keeps realloc() from moving.
            self._growing = BLOCKS.take(nbytes, RESERVE)
            self._view = memoryview(self._growing)
        else:
            # Leaves pages untouched, and on Linux asks for huge ones: fewer page faults. Where
            # mappings cannot be moved (macOS), a whole long bulk is asked for at once: that costs
            # address space, but no memory for pages that no byte has reached.
            self._view = np.empty(nbytes, np.uint8).data
        self._lent = self._view[:0]

    @property
    def complete(self) -> bool:
        return self.filled == self.nbytes

    def payload(self) -> memoryview:
        """The bytes, once they are all there; to be asked for once."""
        return self._view if self._growing is None else BLOCKS.lend(self._growing)

    def room(self) -> memoryview:
        """The unfilled rest of what is reserved; valid until the next call."""
        if self._growing is not None and self.filled == len(self._view):
            # The view that was lent is dead by now. Should someone still hold on to a part of it,
            # resize() raises BufferError, and nothing can be left pointing at the old place.
            self._lent.release()
            self._view.release()
            self._growing.resize(min(self.nbytes, 2 * self.filled))
            self._view = memoryview(self._growing)
        self._lent = self._view[self.filled :]
        return self._lent


class Receiver:
    """Base of the decoders; see the head of this file for how it is driven."""

    __slots__ = (
        "_at",
        "_broken",
        "_end",
        "_into",
        "_large",
        "_nbytes",
        "_scanned",
        "_scratch",
        "_window",
    )
    TRAILER: ClassVar[bytes] = CRLF  # behind every bulk

    def __init__(self) -> None:
        # A mapping, not a bytearray, since its slices are bytes: one object an argument, not two.
        self._scratch = mmap.mmap(-1, SCRATCH)
        self._window = memoryview(self._scratch)
        self._at = 0  # unread bytes are scratch[at:end]
        self._end = 0
        self._scanned = 0  # no line ends before here, so a long one is searched only once
        self._nbytes = NO_BULK  # of the bulk whose header was read last
        self._into: memoryview | None = None  # where that bulk shall go
        self._large: LargeBulk | None = None
        self._broken: Exception | None = None  # frame boundaries are lost for good

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        """Where to receive next: never empty, and valid until buffer_updated()."""
        if self._large is not None and not self._large.complete:
            return self._large.room()
        if self._at == self._end:
            self._at = self._end = self._scanned = 0
        elif SCRATCH - self._end < LEAST_ROOM:
            self._to_front()
        return self._window[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` were put at the start of what get_buffer() gave."""
        if self._large is not None and not self._large.complete:
            self._large.filled += nbytes
        elif self._broken is None:  # else dropped, so that the peer can read the error in peace
            self._end += nbytes

    @property
    def in_bulk(self) -> bool:
        """Whether what was received last ended within a large bulk, so that nothing new is
        complete."""
        return self._large is not None and not self._large.complete

    @property
    def drained(self) -> bool:
        """Whether all that was received has been taken, so that nothing more is complete."""
        return self._at == self._end and self._large is None

    def _to_front(self) -> None:
        unread = self._end - self._at
        if unread == SCRATCH:
            raise RuntimeError("receiving before what was received has been decoded")
        self._scratch.move(0, self._at, unread)
        self._scanned = max(0, self._scanned - self._at)
        self._at, self._end = 0, unread

    def _break(self, error: Exception) -> None:
        """Refuse further work with `error`, and drop whatever still comes in."""
        self._broken = error
        self._at = self._end = self._scanned = 0

    def _take_line(self, terminator: bytes, too_long: str) -> bytes | None:
        """The next line without its terminator, or None while it is incomplete.

        Raises ProtocolError(too_long) where none ends within MAX_LINE bytes.
        """
        at = self._at
        stop = min(self._end, at + MAX_LINE + len(terminator))
        found = self._scratch.find(terminator, max(at, self._scanned), stop)
        if found >= 0:
            self._at = found + len(terminator)
            return self._scratch[at:found]
        if stop == at + MAX_LINE + len(terminator):
            raise ProtocolError(too_long)
        self._scanned = stop - 1  # the last byte may be the first half of a terminator
        return None

    def _take_struct(self, form: Struct) -> tuple[Any, ...] | None:
        """The next fields (at most MAX_LINE bytes), or None until they are there."""
        at = self._at
        if at + form.size > self._end:
            return None
        self._at = at + form.size
        return form.unpack_from(self._scratch, at)

    def _expect_bulk(self, nbytes: int, into: memoryview | None = None) -> None:
        """A header announced `nbytes`: get ready for them, in `into` if that is given."""
        self._nbytes = nbytes
        self._into = into
        if nbytes < BY_REFERENCE:
            return
        self._large = large = LargeBulk(nbytes, into)
        while self._at < self._end and not large.complete:
            room = large.room()
            count = min(len(room), self._end - self._at)
            room[:count] = self._window[self._at : self._at + count]
            self._at += count
            large.filled += count

    def _take_bulk(self) -> Payload | None:
        """The bulk of _expect_bulk(), or None while it is incomplete."""
        large, into = self._large, self._into
        at = end = self._at
        if large is None:
            end += self._nbytes
        elif not large.complete:
            return None
        behind = end + len(self.TRAILER)
        if behind > self._end:
            return None
        if self._scratch[end:behind] != self.TRAILER:
            raise ProtocolError("expected CRLF after a bulk")
        payload: Payload
        if large is not None:
            payload = large.payload()
        elif into is not None:
            into[:] = self._window[at:end]
            payload = into
        else:
            payload = self._scratch[at:end]
        self._at = behind
        self._nbytes = NO_BULK
        self._into = self._large = None
        return payload


class RequestReceiver(Receiver):
    """Base of the decoders of requests. `limits` may be replaced at any time; they hold from the
    next header on."""

    __slots__ = ("_arguments", "limits")

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self.limits = limits
        self._arguments: list[Payload] = []  # of the request being read

    def next_request(self) -> list[Payload] | None:
        """The next request (at least its name), or None until more bytes are received.

        Raises ProtocolError on malformed input, and again on every later call.
        """
        if self._broken is not None:
            raise self._broken
        try:
            if not self._read():
                return None
        except ProtocolError as error:
            self._break(error)
            raise
        arguments, self._arguments = self._arguments, []
        return arguments

    def _read(self) -> bool:
        """Read on, up to the end of a request; whether that was reached."""
        raise NotImplementedError
