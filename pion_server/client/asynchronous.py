"""`AsyncClient`: awaited calls, pipelined in order over one connection, each under a deadline.

Any number of calls may be awaited at once. It belongs to the event loop that first uses it. A call
that is given up, by its deadline or by cancellation, closes the connection: its reply may be on
its way into the caller's buffer, its request half out. The others that were sent then run again on
a new connection if that is safe (see `Call.retry`), and raise ConnectionFailed if not. So give
calls with impatient deadlines a client of their own. A broken connection is otherwise treated as
`Client` treats it: calls are repeated once, if it had worked before and if that is safe; and so is
an answer that another worker has to be asked.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, Self, TypeVar, cast

from pion_server.client.calls import Call, pion_workers
from pion_server.client.connecting import connect_async, unreachable
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
from pion_server.client.url import DEFAULT_URL, Endpoint, Place, parse_url
from pion_server.errors import ConnectionFailed, PionError
from pion_server.wire.values import Reply

T = TypeVar("T")
# Large payloads are handed to the transport in slices, each once the one before has drained: some
# event loops copy what the socket does not take at once, and this bounds that copy.
SLICE = 1 << 20


class AsyncClient(Commands):
    """A client of one server; one coroutine a command (pion_server/client/methods.py).

    `timeout` is the deadline of a call in seconds. Calls raise ConnectionFailed, DeadlineExceeded,
    or the error that the server answered, all of them PionError: Elsewhere too where
    `auto_redirect` is off.
    """

    def __init__(
        self,
        url: str | Endpoint = DEFAULT_URL,
        *,
        timeout: float = 5.0,
        auto_redirect: bool = True,
    ) -> None:
        self._endpoint = url if isinstance(url, Endpoint) else parse_url(url)
        self._timeout = timeout
        self._hops = HOPS if auto_redirect else 0
        self._closed = False
        self._links: dict[int | None, Link] = {}  # by worker
        # Held while a connection to that worker is opened; the others are not to wait for it.
        self._opening: dict[int | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._endpoints: dict[int, Endpoint] = {}  # of workers that were asked

    async def execute(self, call: Call[T], *, timeout: float | None = None) -> T:
        """Run a call and await its value, for `timeout` seconds instead of the client's."""
        (reply,) = await self._run([call], timeout)
        return call.result(reply)

    async def pipeline(
        self, calls: Sequence[Call[T]], *, timeout: float | None = None
    ) -> list[T | PionError]:
        """Run calls in one write and one round trip. A call that the server refused has its error
        in the list, in its place; only what ends all of them is raised."""
        if not calls:
            return []
        replies = await self._run(calls, timeout)
        return [outcome(call, reply) for call, reply in zip(calls, replies, strict=True)]

    async def close(self) -> None:
        """Close the connection; one that is just being opened first gets there, or fails. Calls
        in flight and later ones raise ConnectionFailed."""
        self._closed = True
        await asyncio.gather(*map(self._hang_up, list(self._opening)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncClient of {self._endpoint.place}>"

    async def _run(self, calls: Sequence[Call[Any]], timeout: float | None) -> list[Reply]:
        seconds = self._timeout if timeout is None else timeout
        deadline = Deadline(seconds, partial(describe, calls, self._endpoint))
        try:
            async with asyncio.timeout(deadline.left()):
                return await self._settle(calls, deadline)
        except TimeoutError:
            raise deadline.exceeded() from None

    async def _settle(self, calls: Sequence[Call[Any]], deadline: Deadline) -> list[Reply]:
        replies = await self._exchange(DOOR, calls, deadline)
        for _ in range(self._hops):
            for worker, positions in redirected(replies).items():
                again = [calls[position] for position in positions]
                answers = await self._ask(worker, again, deadline)
                for position, reply in zip(positions, answers, strict=True):
                    replies[position] = reply
        return replies

    async def _ask(
        self, worker: int, calls: Sequence[Call[Any]], deadline: Deadline
    ) -> list[Reply]:
        """What that worker answers; why there is no answer, where it cannot be reached."""
        try:
            return await self._exchange(worker, calls, deadline)
        except ConnectionFailed as error:
            self._endpoints.pop(worker, None)
            return [error] * len(calls)

    async def _exchange(
        self, worker: int | None, calls: Sequence[Call[Any]], deadline: Deadline
    ) -> list[Reply]:
        may_repeat = safe_to_repeat(calls)
        while True:
            link = await self._ready(worker, deadline)
            proven = link.proven
            try:
                replies = await link.exchange(calls)
            except Unsent:
                continue
            except GivenUp:
                if not may_repeat:
                    raise
            except ConnectionFailed:
                if not (proven and may_repeat):
                    raise
                may_repeat = False
            else:
                link.proven = True
                return replies

    async def _ready(self, worker: int | None, deadline: Deadline) -> Link:
        endpoint = await self._endpoint_of(worker, deadline)
        if link := self._usable(worker):
            return link
        async with self._opening[worker]:
            link = self._usable(worker)  # by now, if another call has opened it
            if link is None:
                link = self._links[worker] = await Link.open(endpoint, deadline)
            return link

    def _usable(self, worker: int | None) -> Link | None:
        """The connection to that worker that calls can be sent over, where there is one."""
        if self._closed:
            raise ConnectionFailed(CLOSED)
        link = self._links.get(worker)
        return None if link is None or link.lost else link

    async def _hang_up(self, worker: int | None) -> None:
        async with self._opening[worker]:
            if link := self._links.get(worker):
                link.lose(CLOSED)
                await link.closed.wait()

    async def _endpoint_of(self, worker: int | None, deadline: Deadline) -> Endpoint:
        """Where a worker is reached, as the server says."""
        if worker is DOOR:
            return self._endpoint
        if worker not in self._endpoints:
            call = pion_workers()
            (reply,) = await self._exchange(DOOR, [call], deadline)
            self._endpoints[worker] = endpoint_of(worker, call.result(reply), self._endpoint)
        return self._endpoints[worker]


class GivenUp(ConnectionFailed):
    """The connection was closed because another call on it was given up."""


class Unsent(ConnectionFailed):
    """The connection was lost before any of the call was sent."""


class InFlight(Exchange):
    """An exchange whose caller waits for a future."""

    def __init__(self, calls: Sequence[Call[Any]]) -> None:
        super().__init__(calls)
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finished(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def failed(self, error: Exception) -> None:
        if not self.over.done():
            self.over.set_exception(error)


class Link(asyncio.BufferedProtocol):
    """One connection. Once it is lost it stays lost."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._conversation: Conversation[InFlight] = Conversation(place.lane)
        self._turn = asyncio.Lock()
        self._sending: InFlight | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self.lost = ""  # why
        self.closed = asyncio.Event()
        self.proven = False  # it has carried a call to its end

    @classmethod
    async def open(cls, endpoint: Endpoint, deadline: Deadline) -> Link:
        """Connect and shake hands. Raises ConnectionFailed, or the server's refusal."""
        place = endpoint.place
        sock = await connect_async(place, deadline)
        link = cls(place)
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: link,
                sock=sock,
                ssl=place.tls,
                server_hostname=place.host if place.tls else None,
            )
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError):  # of the TLS handshake
                raise unreachable(place, error) from error
            raise
        opening = handshake(endpoint)
        try:
            for call, reply in zip(opening, await link.exchange(opening), strict=True):
                call.result(reply)
        except BaseException:
            link.lose("the handshake failed")
            raise
        return link

    async def exchange(self, calls: Sequence[Call[Any]]) -> list[Reply]:
        """Send calls and wait for their replies. Leaving earlier loses the connection."""
        flight = InFlight(calls)
        try:
            async with self._turn:  # requests leave whole, one after the other
                if self.lost:
                    raise Unsent(self.lost)
                self._sending = flight
                try:
                    await self._send(flight)
                finally:
                    self._sending = None
            await flight.over
        finally:
            if not flight.complete and flight in self._conversation.waiting:
                flight.over.cancel()
                self.lose(f"another call to {self._place} was given up", GivenUp)
        return flight.replies

    async def _send(self, flight: InFlight) -> None:
        """All of the request, unless the flight is over before: then `flight.over` says how."""
        for payload in self._conversation.begin(flight):
            view = memoryview(payload)
            for start in range(0, len(view), SLICE):
                if flight.complete:
                    self.lose("a request was refused before it was out")
                if self.lost:
                    return
                self._transport.write(view[start : start + SLICE])
                await self._writable.wait()

    def lose(self, reason: str, error: type[ConnectionFailed] = ConnectionFailed) -> None:
        """Close the connection now, and tell everyone who waits for a reply."""
        if self.lost:
            return
        self.lost = reason
        self._transport.abort()
        self._writable.set()
        for flight in self._conversation.waiting:
            flight.failed(error(reason))
        self._conversation.waiting.clear()

    # -- the transport's calls ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio.Transport, though they behave as one.
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._conversation.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self._conversation.received(nbytes)
        except Exception as error:  # a sink is the caller's code
            if self._conversation.waiting:
                self._conversation.waiting[0].failed(error)
            self.lose(f"the connection to {self._place} is out of step: {error}")
        if self._sending is not None and self._sending.complete:
            self._writable.set()  # a sender that still waits here was refused

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        why = f"the connection to {self._place} broke: {exc}"
        self.lose(why if exc else f"{self._place} closed the connection")
        self.closed.set()
