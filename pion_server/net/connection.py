"""One client: bytes in, requests to the dispatcher, replies out in order.

Reading stops while a write of this client is being computed, and while it does not take its
replies; so a pipeline sees its own writes, and what a client is owed stays within MAX_OWED and one
reply. A client that keeps the server busy gives way to the others after each turn: MAX_WAITING
requests, or outbox.TURN bytes of replies.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, cast

from pion_server.commands.dispatcher import Dispatcher, guarded
from pion_server.commands.registry import Access, Job
from pion_server.errors import PionError, ProtocolError
from pion_server.net.awake import Awake
from pion_server.net.lobby import Lobby
from pion_server.net.outbox import GONE, PIECE, Outbox, Slot
from pion_server.tenants import Client, Tenant, dismiss
from pion_server.wire.lanes import Lane
from pion_server.wire.limits import BEFORE_AUTH, Limits
from pion_server.wire.values import Payload, Reply

log = logging.getLogger(__name__)

# Replies that may wait for one client; a longer pipeline waits in its socket.
MAX_WAITING = 1024
# Stored payload that they may refer to before no more requests are taken. Rows that were dropped or
# replaced meanwhile stay in memory for their sake, and count in nobody's memory limit.
MAX_OWED = 64 << 20
# Jobs of one client that may be under way: what their replies will hold is not known yet.
MAX_JOBS = 16
# A client that takes nothing for so long is gone, or might as well be.
STALL_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Shared:
    """What all connections of a server have in common."""

    executor: Executor  # where conversions run
    lobby: Lobby
    awake: Awake
    connections: set[Connection]


class Connection(asyncio.BufferedProtocol):
    """The protocol object of one accepted socket."""

    def __init__(self, dispatcher: Dispatcher, shared: Shared, lane: Lane) -> None:
        self._dispatcher = dispatcher
        self._server = dispatcher.server
        self._shared = shared
        self._tenant: Tenant | None = None  # whose the client was after its last request
        self._busy = False  # a write of this client is being computed
        self._jobs = 0  # of this client, under way
        self._resting = False  # there is work left for the next turn
        self._reading = True
        self._ended = False  # no further request is taken
        self._stalled: asyncio.TimerHandle | None = None
        self._lane = lane
        self.decoder = lane.requests(BEFORE_AUTH)

    # -- the transport's calls ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface, but not the base class.
        self._transport = transport = cast(asyncio.Transport, transport)
        local = transport.get_extra_info("sockname")
        self._client = Client(
            address=address(transport.get_extra_info("peername") or local),
            local_address=address(local),
        )
        transport.set_write_buffer_limits(high=PIECE)
        self._outbox = Outbox(transport, self._lane.encode_reply)
        self._shared.connections.add(self)
        self._shared.lobby.enter(self)
        self._enter()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        self._took_something()
        self._shared.lobby.leave(self)
        dismiss(self._client)
        self._shared.connections.discard(self)
        # uvloop's TLS keeps our methods: with its transport kept here, neither would ever be freed.
        self._transport = self._outbox.transport = GONE

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.decoder.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        soon = self._shared.awake.came()
        self.decoder.buffer_updated(nbytes)
        if self.decoder.in_bulk:  # a large one comes in hundreds of reads
            return
        self._pump()
        # Neither strangers nor a byte at a time keep a core busy.
        if self._tenant is not None and self.decoder.drained:
            self._shared.awake.done(soon)

    def eof_received(self) -> bool:
        """The client will send no more, but may still read: what it asked for is delivered. Not
        over TLS, where asyncio knows no closing of one side."""
        self._ended = True
        encrypted = self._transport.get_extra_info("ssl_object") is not None
        return bool(self._outbox) and not encrypted

    def pause_writing(self) -> None:
        self._outbox.writable = False
        self._stalled = asyncio.get_running_loop().call_later(STALL_SECONDS, self.abort)

    def resume_writing(self) -> None:
        self._took_something()
        self._outbox.writable = True
        self._pump()

    def _took_something(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()

    def close(self) -> None:
        """Take no more requests, and close once every reply is out."""
        self._ended = True
        self._pump()

    def abort(self) -> None:
        """Drop the client and what it was waiting for."""
        self._transport.abort()

    # -- coming in ---------------------------------------------------------------------------

    def _enter(self) -> None:
        """Where there is no lock, everybody is the same tenant, as long as there are seats."""
        everyone = self._server.tenants.open
        try:
            if everyone is not None:
                everyone.admit(self._client)
        except PionError as refusal:
            self._fill(self._outbox.reserve(), refusal.as_value())
            self.close()
        self._settle()

    def _settle(self) -> None:
        """What goes by whose the client is; nobody's is held to tight limits, in the lobby."""
        tenant = self._client.tenant
        if tenant is self._tenant:
            return
        self._tenant = tenant
        if tenant is None:
            self.decoder.limits = BEFORE_AUTH
            self._shared.lobby.enter(self)
        else:
            self.decoder.limits = Limits(max_bulk=self._server.config.max_bulk)
            self._shared.lobby.leave(self)

    # -- requests in, replies out ------------------------------------------------------------

    def _pump(self) -> None:
        if self._transport.is_closing():
            return
        try:
            while self._may_take_more() and (request := self._next_request()):
                self._answer(request)
            full = not self._has_room()
            if self._outbox.flush() or (full and self._has_room()):
                self._rest()
        except Exception:
            # A reply that breaks its own frame: nothing sane can follow on this connection.
            log.exception("closing a connection; this is a defect of the server")
            self._transport.abort()
            return
        if self._ended and not self._outbox:
            self._transport.close()
        else:
            self._read(self._may_take_more())

    def _may_take_more(self) -> bool:
        blocked = self._busy or self._resting or self._ended
        return not blocked and self._outbox.writable and self._has_room()

    def _has_room(self) -> bool:
        waiting = len(self._outbox)
        if not waiting:  # nor is a job under way, as its reply would be waited for
            return True
        if self._tenant is not None and self._tenant.is_behind():
            return False
        owed = self._outbox.owed
        return waiting < MAX_WAITING and owed < MAX_OWED and self._jobs < MAX_JOBS

    def _rest(self) -> None:
        """Let the other connections have their turn."""
        if not self._resting:
            self._resting = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._resting = False
        self._pump()

    def _next_request(self) -> list[Payload] | None:
        if self.decoder.drained:
            return None
        try:
            return self.decoder.next_request()
        except ProtocolError as error:
            self._fill(self._outbox.reserve(), error.as_value())
            self._ended = True
            return None

    def _answer(self, request: list[Payload]) -> None:
        slot, tenant = self._outbox.reserve(), self._client.tenant
        logged = tenant.logged if tenant else 0
        result = self._dispatcher.dispatch(self._client, request)
        if isinstance(result, Job):
            self._start(result, slot)
            return
        self._fill(slot, result, tenant, logged)
        self._settle()
        self._ended = self._client.closing

    def _start(self, job: Job, slot: Slot) -> None:
        self._busy = self._busy or Access.WRITE in job.access
        self._jobs += 1
        self._shared.awake.jobs += 1
        if isinstance(job.work, Future | asyncio.Future):
            work = asyncio.wrap_future(job.work)
        else:
            work = asyncio.get_running_loop().run_in_executor(self._shared.executor, job.work)
        tenant = self._client.tenant
        work.add_done_callback(lambda done: self._finish(job, slot, tenant, done))

    def _finish(
        self, job: Job, slot: Slot, tenant: Tenant | None, done: asyncio.Future[Any]
    ) -> None:
        if done.cancelled():  # the server stops
            return
        self._jobs -= 1
        self._shared.awake.jobs -= 1
        if Access.WRITE in job.access:
            self._busy = False
        logged = tenant.logged if tenant else 0
        self._fill(slot, job.finish(guarded(done.result)), tenant, logged)
        self._pump()

    def _fill(
        self, slot: Slot, reply: Reply, tenant: Tenant | None = None, logged: int = 0
    ) -> None:
        """Have a reply sent in its turn; one that acknowledges records after `logged`, once these
        are safe."""
        proto = self._client.proto
        if tenant is None or tenant.logged == logged:
            self._outbox.fill(slot, reply, proto)
            return

        def release(lost: PionError | None) -> None:
            self._outbox.fill(slot, lost or reply, proto)
            self._rest()

        tenant.when_safe(release)

    def _read(self, wanted: bool) -> None:
        if wanted != self._reading and not self._transport.is_closing():
            self._reading = wanted
            (self._transport.resume_reading if wanted else self._transport.pause_reading)()


def address(name: Any) -> str:
    """`host:port` of a socket name, IPv6 in brackets as Redis shows it; of a Unix socket
    `path:0`."""
    if not isinstance(name, tuple):
        return f"{name}:0"
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
