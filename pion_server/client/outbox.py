"""Payloads on their way into a socket, by reference: scatter-gather, never joined."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterable
from itertools import islice

from pion_server.wire.values import Payload

# What one sendmsg may be given: so many buffers on Linux and macOS, and below 2 GB on macOS. A
# socket takes a few MB at a time, so offering it more than this has no use.
IOV_MAX = 1024
SEND_MAX = 16 << 20


class Outbox:
    """What is left of a request."""

    def __init__(self, payloads: Iterable[Payload]) -> None:
        self._left = deque(memoryview(payload) for payload in payloads)
        self._broken = False

    def __bool__(self) -> bool:
        """Whether there is anything to send."""
        return bool(self._left) and not self._broken

    @property
    def sent(self) -> bool:
        """Whether all of it left."""
        return not self._left

    def send(self, sock: socket.socket) -> None:
        """As much as the non-blocking socket takes in one go.

        A peer that is gone is not reported here: its last words, which say why, may still be there
        to be read, and the reader meets the end of the stream in any case.
        """
        if not self:
            return
        try:
            nbytes = sock.sendmsg(self._offer())
        except BlockingIOError:
            return
        except OSError:
            self._broken = True
            return
        self._advance(nbytes)

    def _offer(self) -> list[memoryview]:
        offer: list[memoryview] = []
        room = SEND_MAX
        for view in islice(self._left, IOV_MAX):
            offer.append(view[:room])
            room -= len(offer[-1])
            if not room:
                break
        return offer

    def _advance(self, nbytes: int) -> None:
        while self._left and nbytes >= len(self._left[0]):
            nbytes -= len(self._left.popleft())
        if nbytes:
            self._left[0] = self._left[0][nbytes:]
