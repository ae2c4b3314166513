"""`Client`: blocking calls over one connection, each under a deadline.

Thread-safe: one call at a time, the others wait within their own deadlines. The connection opens
with the first call, and again in a child process after a fork. One that broke while it was idle
is replaced; where that shows only after sending, the calls are sent once more if that is safe (see
`Call.retry`). After a deadline or a protocol error the connection is closed, never reused. Where a
server of several workers says that another one has to be asked, that one is, over a connection that
is kept.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Self, TypeVar

from pion_server.client.calls import Call, pion_workers
from pion_server.client.connecting import connect
from pion_server.client.conversation import (
    CLOSED,
    DOOR,
    HOPS,
    Conversation,
    Exchange,
    describe,
    endpoint_of,
    handshake,
    outcome,
    redirected,
    safe_to_repeat,
)
from pion_server.client.deadline import Deadline
from pion_server.client.methods import Commands
from pion_server.client.outbox import Outbox
from pion_server.client.tls import undelivered
from pion_server.client.url import DEFAULT_URL, Endpoint, Place, parse_url
from pion_server.errors import ConnectionFailed, PionError
from pion_server.wire.values import Reply

T = TypeVar("T")

# Going to sleep and being woken is the larger part of a short call's time. So where the last
# answer came within this, the next is looked for as long before the thread sleeps; small attention
# takes half of it. Whoever wants the core has it: first of all a server that shares it.
AWAKE_SECONDS = 600e-6


class Client(Commands):
    """A client of one server; one method a command (pion_server/client/methods.py).

    `timeout` is the deadline of a call in seconds. Calls raise ConnectionFailed, DeadlineExceeded,
    or the error that the server answered, all of them PionError: Elsewhere too where
    `auto_redirect` is off.
    """

    def __init__(
        self, url: str = DEFAULT_URL, *, timeout: float = 5.0, auto_redirect: bool = True
    ) -> None:
        self._endpoint = parse_url(url)
        self._timeout = timeout
        self._hops = HOPS if auto_redirect else 0
        self._closed = False
        self._start()

    def execute(self, call: Call[T], *, timeout: float | None = None) -> T:
        """Run a call and wait for its value, for `timeout` seconds instead of the client's."""
        (reply,) = self._run([call], timeout)
        return call.result(reply)

    def pipeline(
        self, calls: Sequence[Call[T]], *, timeout: float | None = None
    ) -> list[T | PionError]:
        """Run calls in one write and one round trip. A call that the server refused has its error
        in the list, in its place; only what ends all of them is raised."""
        if not calls:
            return []
        replies = self._run(calls, timeout)
        return [outcome(call, reply) for call, reply in zip(calls, replies, strict=True)]

    def close(self) -> None:
        """Close the connection once the running call is over. Later calls raise
        ConnectionFailed."""
        self._closed = True
        with self._own_lock():
            self._hang_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client of {self._endpoint.place}>"

    def _run(self, calls: Sequence[Call[Any]], timeout: float | None) -> list[Reply]:
        seconds = self._timeout if timeout is None else timeout
        deadline = Deadline(seconds, partial(describe, calls, self._endpoint))
        lock = self._own_lock()
        if not lock.acquire(timeout=deadline.left()):
            raise deadline.exceeded()
        try:
            if self._closed:
                raise ConnectionFailed(CLOSED)
            return self._settle(calls, deadline)
        finally:
            lock.release()

    def _settle(self, calls: Sequence[Call[Any]], deadline: Deadline) -> list[Reply]:
        replies = self._exchange(DOOR, calls, deadline)
        for _ in range(self._hops):
            moved = redirected(replies)
            if not moved:
                break
            for worker, positions in moved.items():
                again = [calls[position] for position in positions]
                answers = self._ask(worker, again, deadline)
                for position, reply in zip(positions, answers, strict=True):
                    replies[position] = reply
        return replies

    def _ask(self, worker: int, calls: Sequence[Call[Any]], deadline: Deadline) -> list[Reply]:
        """What that worker answers; why there is no answer, where it cannot be reached."""
        try:
            return self._exchange(worker, calls, deadline)
        except ConnectionFailed as error:
            return [error] * len(calls)

    def _exchange(
        self, worker: int | None, calls: Sequence[Call[Any]], deadline: Deadline
    ) -> list[Reply]:
        link, reused = self._ready(worker, deadline)
        try:
            return link.exchange(calls, deadline)
        except ConnectionFailed:
            if not (reused and safe_to_repeat(calls)):
                raise
        return self._connect(worker, deadline).exchange(calls, deadline)

    def _own_lock(self) -> threading.Lock:
        """This process's lock. A forked child must not write into its parent's connection, nor
        wait for a lock that one of the parent's threads held at the fork, so it starts anew."""
        if self._pid != os.getpid():
            self._hang_up()
            self._start()
        return self._lock

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._links: dict[int | None, Link] = {}  # by worker

    def _hang_up(self) -> None:
        for link in self._links.values():
            link.close()

    def _ready(self, worker: int | None, deadline: Deadline) -> tuple[Link, bool]:
        link = self._links.get(worker)
        if link is not None and link.usable():
            return link, True
        return self._connect(worker, deadline), False

    def _connect(self, worker: int | None, deadline: Deadline) -> Link:
        if worker in self._links:
            self._links[worker].close()
        endpoint = self._endpoint if worker is DOOR else self._endpoint_of(worker, deadline)
        link = self._links[worker] = Link.open(endpoint, deadline)
        return link

    def _endpoint_of(self, worker: int, deadline: Deadline) -> Endpoint:
        """Where a worker is reached, as the server says."""
        call = pion_workers()
        (reply,) = self._exchange(DOOR, [call], deadline)
        return endpoint_of(worker, call.result(reply), self._endpoint)


class Link:
    """One connection. Any failure closes it."""

    def __init__(self, sock: socket.socket, place: Place) -> None:
        self._socket = sock
        self._place = place
        self._conversation: Conversation[Exchange] = Conversation(place.lane)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._open = True
        self._quick = False  # the last wait was shorter than AWAKE_SECONDS

    @classmethod
    def open(cls, endpoint: Endpoint, deadline: Deadline) -> Link:
        """Connect and shake hands. Raises ConnectionFailed, DeadlineExceeded, or the server's
        refusal."""
        link = cls(connect(endpoint.place, deadline), endpoint.place)
        opening = handshake(endpoint)
        try:
            for call, reply in zip(opening, link.exchange(opening, deadline), strict=True):
                call.result(reply)
        except BaseException:
            link.close()
            raise
        return link

    def usable(self) -> bool:
        """Whether the idle connection can take a call: anything to read now is its end, or bytes
        that nobody asked for."""
        return self._open and not self._poll.poll(0)

    def exchange(self, calls: Sequence[Call[Any]], deadline: Deadline) -> list[Reply]:
        """Send calls and receive their replies, both at once: a server that answers before it has
        read everything never finds us deaf."""
        exchange = Exchange(calls)
        try:
            outbox = Outbox(self._conversation.begin(exchange))
            while not exchange.complete:
                outbox.send(self._socket)
                if self._wait(bool(outbox), deadline):
                    self._receive()
        except BaseException:
            self.close()
            raise
        if not outbox.sent:  # refused before it was out, so the stream is out of step
            self.close()
        return exchange.replies

    def close(self) -> None:
        self._open = False
        self._socket.close()

    def _wait(self, sending: bool, deadline: Deadline) -> bool:
        """Wait until there is something to do; whether there may be something to read."""
        left = deadline.left()  # first of all: there may always be something to read
        if undelivered(self._socket):
            return True
        self._poll.modify(self._socket, select.POLLIN | (select.POLLOUT if sending else 0))
        start = time.perf_counter()
        while self._quick and not sending and time.perf_counter() - start < AWAKE_SECONDS:
            if self._poll.poll(0):
                return True
            os.sched_yield()
        # An hour is short enough for the C int that poll takes; the caller comes again.
        events = self._poll.poll(min(left, 3600) * 1000)
        self._quick = time.perf_counter() - start < AWAKE_SECONDS
        return any(event & ~select.POLLOUT for _, event in events)

    def _receive(self) -> None:
        try:
            nbytes = self._socket.recv_into(self._conversation.get_buffer())
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionFailed(f"the connection to {self._place} broke: {error}") from error
        if not nbytes:
            raise ConnectionFailed(f"{self._place} closed the connection")
        self._conversation.received(nbytes)
