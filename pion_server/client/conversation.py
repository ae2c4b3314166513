"""What both clients share, without I/O: calls in flight, their replies, the handshake.

Requests leave whole and in order, and replies come back in that order; a `Conversation` is one
connection's record of who waits for what. It is over for good once its bytes are out of step: the
owner closes the connection on any exception raised here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from pion_server.client.calls import Call, Worker, hello, select
from pion_server.client.url import Endpoint
from pion_server.errors import Elsewhere, PionError, ProtocolError
from pion_server.wire.lanes import Lane
from pion_server.wire.limits import Limits
from pion_server.wire.replies import Incomplete
from pion_server.wire.values import Payload, Reply

CLOSED = "this client is closed"
# macOS refuses to receive 2 GB or more in one call.
RECEIVE_MAX = 1 << 30
# In the place of a worker's number: whichever one the server lets answer.
DOOR = None
# How often a call is sent on to the worker that a refusal names. That is the right one unless the
# name has moved since, which takes a drop.
HOPS = 2


class Exchange:
    """Calls that go out in one write, and their replies so far."""

    def __init__(self, calls: Sequence[Call[Any]]) -> None:
        self.calls = calls
        self.replies: list[Reply] = []

    @property
    def complete(self) -> bool:
        return len(self.replies) == len(self.calls)

    @property
    def next_call(self) -> Call[Any]:
        """The call whose reply comes next."""
        return self.calls[len(self.replies)]

    def finished(self) -> None:
        """Called once, when the last reply is in."""


E = TypeVar("E", bound=Exchange)


class Conversation(Generic[E]):
    """One connection's exchanges in flight."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._decoder = lane.replies(Limits())
        self.waiting: deque[E] = deque()

    def begin(self, exchange: E) -> list[Payload]:
        """What to send for an exchange of at least one call, whole and after everything before."""
        payloads = [
            part for call in exchange.calls for part in self._lane.encode_request(call.args)
        ]
        self.waiting.append(exchange)
        if len(self.waiting) == 1:
            self._expect()
        return payloads

    def get_buffer(self) -> memoryview:
        """Where the next bytes from the server go."""
        return self._decoder.get_buffer()[:RECEIVE_MAX]

    def received(self, nbytes: int) -> None:
        """Bytes have come into the buffer: hand replies to those who wait.

        Raises ProtocolError on bytes that are no reply or that nobody asked for, and whatever the
        sink of the call raises whose reply is next.
        """
        self._decoder.buffer_updated(nbytes)
        while not isinstance(reply := self._decoder.next_reply(), Incomplete):
            if not self.waiting:
                raise ProtocolError("the server sent a reply that nobody asked for")
            exchange = self.waiting[0]
            exchange.replies.append(reply)
            if exchange.complete:
                self.waiting.popleft()
                exchange.finished()
            if self.waiting:
                self._expect()
            if self._decoder.drained:
                break
        self._decoder.pushes.clear()  # nothing here subscribes to anything

    def _expect(self) -> None:
        sink = self.waiting[0].next_call.sink
        if sink is not None:
            self._decoder.expect(sink)


def describe(calls: Sequence[Call[Any]], endpoint: Endpoint) -> str:
    """What an error says about the calls it ended."""
    more = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
    return f"{calls[0].name}{more} to {endpoint.place}"


def handshake(endpoint: Endpoint) -> list[Call[Any]]:
    """The first calls on a connection, in one round trip; each result is to be asked for, since
    each may raise."""
    opening: list[Call[Any]] = [hello(endpoint.user, endpoint.password)]
    if endpoint.db:
        opening.append(select(endpoint.db))
    return opening


def safe_to_repeat(calls: Sequence[Call[Any]]) -> bool:
    """Whether calls whose fate is unknown may be sent again."""
    return all(call.retry for call in calls)


def outcome(call: Call[Any], reply: Reply) -> Any:
    """A reply as the call's value, or the PionError it stands for as a value."""
    try:
        return call.result(reply)
    except PionError as error:
        return error


def redirected(replies: Sequence[Reply]) -> dict[int, list[int]]:
    """The positions of the calls that were refused since what they are about lives on another
    worker, by that worker. Nothing was done, so they may all be sent there."""
    positions: dict[int, list[int]] = {}
    for position, reply in enumerate(replies):
        if isinstance(reply, Elsewhere):
            positions.setdefault(reply.worker, []).append(position)
    return positions


def endpoint_of(worker: int, workers: Sequence[Worker], server: Endpoint) -> Endpoint:
    """How to reach a worker of `server`. Raises PionError where there is none such."""
    for each in workers:
        if each.worker == worker:
            return replace(server, place=server.place.of(each))
    raise PionError(f"{server.place} names worker {worker}, but has no such worker")
