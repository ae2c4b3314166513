"""From a request to a reply: every refusal that does not depend on the command happens here.

Nothing a client sends gets past as an exception: a PionError becomes the error reply, and a defect
of ours is logged with its traceback and answered `-ERR internal error`; the connection lives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from pion_server.attention.table import namespace_of
from pion_server.commands import load_families
from pion_server.commands.arguments import MAX_NAME
from pion_server.commands.context import Context, Server
from pion_server.commands.plain import wrong_arity
from pion_server.commands.registry import TABLE, Access, Command, Home, Job
from pion_server.errors import Elsewhere, NoAuth, PionError
from pion_server.team import Directory, Listing
from pion_server.tenants import Client, Tenant
from pion_server.wire.values import Payload, Reply

log = logging.getLogger(__name__)
T = TypeVar("T")


class Dispatcher:
    """Runs commands against one server. Not thread-safe: it lives on the event loop."""

    def __init__(self, server: Server) -> None:
        load_families()
        self.server = server

    def dispatch(self, client: Client, args: list[Payload]) -> Reply | Job:
        """The reply to one request (never empty), or the job that will make it."""
        tenant, client.last_active = client.tenant, time.time()
        if tenant is not None:
            tenant.stats.commands += 1
        try:
            command = find(args)
            client.last_command = command.name
            if tenant is None and Access.NO_AUTH not in command.access:
                raise NoAuth("Authentication required.")
            if tenant is not None and self.server.team is not None:
                refuse_what_lives_elsewhere(tenant, command, args)
                if command.home is Home.FIRST and self.server.team.index:
                    return self._pass_on(tenant, client.db, command, args)
            logged = command.access & (Access.WRITE | Access.UNLOGGED) == Access.WRITE
            if tenant is not None and logged:
                tenant.refuse_lost_writes()
        except PionError as refusal:
            return refusal.as_value()
        result = guarded(lambda: command.handler(Context(self.server, client, tenant), args[1:]))
        if isinstance(result, Elsewhere):  # another worker was faster just now
            return Elsewhere(result.worker, command.name)
        return guarded_job(result, command.access) if isinstance(result, Job) else result

    def _pass_on(self, tenant: Tenant, db: int, command: Command, args: list[Payload]) -> Job:
        """Worker 0 has the plain keys. No later command need wait: what is passed on stays in
        order, and no other command is about keys."""
        assert self.server.team is not None
        repeatable = Access.WRITE not in command.access
        work = self.server.team.ask_first(tenant.name, db, args, repeatable)
        return Job(work, lambda reply: reply)


def _find_state(directory: Directory, sid: bytes) -> Listing | None:
    return directory.find(sid) or directory.find(namespace_of(sid))


Find: TypeAlias = Callable[[Directory, bytes], Listing | None]
# The arguments of a request that name something, the command's name included, and who knows where
# it is.
NAMES: dict[Home, tuple[slice, Find]] = {
    Home.SESSION: (slice(1, 2), lambda directory, sid: directory.find_session(sid)),
    Home.STATE: (slice(1, 2), _find_state),
    Home.NAMESPACE: (slice(1, 2), lambda directory, name: directory.find(name)),
    Home.NAMESPACES: (slice(1, None), lambda directory, name: directory.find(name)),
}


def refuse_what_lives_elsewhere(tenant: Tenant, command: Command, args: list[Payload]) -> None:
    """Raise Elsewhere where another worker holds what the command is about. Names that are none are
    left to the command."""
    directory = tenant.directory
    if directory is None or command.home not in NAMES:
        return
    places, find = NAMES[command.home]
    for name in args[places]:
        listing = find(directory, bytes(name)) if len(name) <= MAX_NAME else None
        if listing is not None:
            raise Elsewhere(listing.worker, command.name)


def find(args: list[Payload]) -> Command:
    """The table's row for a request; raises PionError on an unknown name or a wrong arity."""
    name = bytes(args[0][:128]).upper().decode("latin-1")
    command = TABLE.get(name)
    if command is None:
        raise PionError(unknown_command(args))
    if not command.accepts(len(args)):
        raise wrong_arity(command.name)
    return command


def unknown_command(args: list[Payload]) -> str:
    """Redis' words for it, which some clients parse."""
    shown, room = "", 128
    for arg in args[1:]:
        if len(shown) >= room:
            break
        shown += f"'{bytes(arg[: room - len(shown)]).decode(errors='backslashreplace')}' "
    name = bytes(args[0][:128]).decode(errors="backslashreplace")
    return f"unknown command '{name}', with args beginning with: {shown}"


def guarded_job(job: Job, access: Access) -> Job:
    """The job with its end guarded; made of an error in `work`, the reply is that error."""

    def finish(made: Any) -> Reply:
        return made if isinstance(made, PionError) else guarded(lambda: job.finish(made))

    return Job(job.work, finish, access)


def guarded(run: Callable[[], T]) -> T | PionError:
    """What `run` returns, or the error it raised as a value."""
    try:
        return run()
    except PionError as refusal:
        return refusal.as_value()
    except Exception:
        log.exception("a command failed; this is a defect of the server")
        return PionError("internal error")
