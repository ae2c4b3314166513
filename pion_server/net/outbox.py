"""Replies leave in the order of their requests, whenever each gets ready.

A request takes a slot at once; the slot is filled when its reply is known. What is ready at the
head is written piece by piece, and no piece is made before the transport wants it: a slow reader
costs the socket buffer, and what it has asked for stays in memory until it has taken it: `owed`
says how much that is. Nor is one client's reply made in one go: a flush ends after a TURN, so that
converting gigabytes for a fast reader does not keep the others waiting.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from pion_server.wire.limits import BY_REFERENCE
from pion_server.wire.values import Payload, Reply, Stream

# Largest piece handed to the transport at once: a transport that copies what the socket did not
# take (asyncio's own, before Python 3.12) then copies no more than this.
PIECE = 1 << 22
# A flush ends after this much: one converted piece (codecs/convert.py), some milliseconds at worst.
TURN = 1 << 20


class Gone(asyncio.Transport):
    """In the place of a transport once the connection is lost; what comes late is let drop."""

    def is_closing(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing is left to close."""

    abort = close


GONE = Gone()


class Slot:
    """The place of one reply; `pieces` is None until it is known."""

    __slots__ = ("owed", "pieces")

    def __init__(self) -> None:
        self.pieces: Iterator[Payload] | None = None
        self.owed = 0  # bytes of stored payload that it keeps in memory


def payload_bytes(reply: Reply) -> int:
    """What a reply refers to of stored rows and values, in bytes."""
    if isinstance(reply, Stream):
        return reply.nbytes
    if isinstance(reply, list):
        return sum(map(payload_bytes, reply))
    return len(reply) if isinstance(reply, memoryview) else 0


class Outbox:
    """An ordered queue of replies in front of one transport."""

    def __init__(
        self, transport: asyncio.Transport, encode: Callable[[Reply, int], Iterator[Payload]]
    ) -> None:
        self.transport = transport
        self._encode = encode
        self._slots: deque[Slot] = deque()
        self._unsent: memoryview | None = None  # rest of a piece larger than PIECE
        self.writable = True  # the transport's pause_writing / resume_writing
        self.owed = 0  # payload_bytes of all replies that are not yet wholly with the transport

    def __len__(self) -> int:
        """Replies that are not yet wholly with the transport."""
        return len(self._slots)

    def reserve(self) -> Slot:
        """The next slot, to be filled."""
        slot = Slot()
        self._slots.append(slot)
        return slot

    def fill(self, slot: Slot, reply: Reply, proto: int) -> None:
        """The reply that belongs there, in RESP2 or RESP3. Flush afterwards."""
        slot.pieces, slot.owed = self._encode(reply, proto), payload_bytes(reply)
        self.owed += slot.owed

    def flush(self) -> bool:
        """Write what is ready for as long as the transport takes it, or until the turn is over;
        tells whether it ended with the turn, so there may be more to write at once."""
        small: list[Payload] = []
        held = written = 0
        while self.writable and written < TURN and (piece := self._next_piece()) is not None:
            small.append(piece)
            held += len(piece)
            if held >= BY_REFERENCE:
                self._write(small)
                written += held
                small, held = [], 0
        if small:
            self._write(small)
        return written >= TURN

    def _next_piece(self) -> Payload | None:
        if self._unsent is not None:
            part, rest = self._unsent[:PIECE], self._unsent[PIECE:]
            self._unsent = rest if len(rest) else None
            return part
        while self._slots and (pieces := self._slots[0].pieces) is not None:
            piece = next(pieces, None)
            if piece is None:
                self.owed -= self._slots.popleft().owed
            elif len(piece) <= PIECE:
                return piece
            else:
                self._unsent = memoryview(piece)
                return self._next_piece()
        return None

    def _write(self, pieces: list[Payload]) -> None:
        # The last one may be large: it goes by itself, uncopied. The rest is small by construction.
        if len(pieces) > 1:
            self.transport.write(b"".join(pieces[:-1]))
        self.transport.write(pieces[-1])
