"""`@command(...)`: a command is a function plus a row of the table.

The table is the single source for dispatch, arity, COMMAND and docs/PROTOCOL.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import TYPE_CHECKING, Any, TypeAlias

from pion_server.wire.values import Payload, Reply

if TYPE_CHECKING:
    from pion_server.commands.context import Context


class Access(Flag):
    """What a command does, as far as the dispatcher and COMMAND care."""

    READ = auto()
    WRITE = auto()
    NO_AUTH = auto()  # allowed before AUTH
    # Writes nothing that is kept on disk, so it goes on while the log cannot be written.
    UNLOGGED = auto()


class Home(Enum):
    """Which of several workers a command is carried out on."""

    ANYWHERE = auto()  # the one that gets it
    SESSION = auto()  # the one that holds the session which its first argument names
    NAMESPACE = auto()  # the one that holds the namespace which its first argument names
    NAMESPACES = auto()  # the one that holds all the namespaces which its arguments name
    STATE = auto()  # the one that holds the namespace which the attention state named first is of
    FIRST = auto()  # worker 0, which has all plain keys: it is passed on


# Of the commands of a group, but for those that say otherwise.
HOMES = {
    "KV.PREFIX": Home.NAMESPACE,
    "SSM.PREFIX": Home.NAMESPACE,
    "V": Home.SESSION,
    "ATTEND": Home.STATE,
    "INDEX": Home.NAMESPACE,
    "Strings": Home.FIRST,
    "Keys": Home.FIRST,
}


@dataclass(frozen=True, slots=True)
class Job:
    """A reply that takes a while: `work` runs off the event loop and touches no state, or is under
    way already; `finish` takes its result back on the loop, may apply mutations, and makes the
    reply.

    While the job of a WRITE command runs, later commands of the same connection wait, so a
    pipeline sees its own writes. `access` is filled in by the dispatcher.
    """

    work: Callable[[], Any] | Future[Any] | asyncio.Future[Any]
    finish: Callable[[Any], Reply]
    access: Access = Access.READ


Handler: TypeAlias = "Callable[[Context, list[Payload]], Reply | Job]"


@dataclass(frozen=True, slots=True)
class Command:
    """A row of the table. `arity` as in Redis: counts the name; negative means at least."""

    name: str
    arity: int
    access: Access
    group: str
    syntax: str
    reply: str
    errors: tuple[str, ...]
    summary: str
    handler: Handler
    home: Home = Home.ANYWHERE

    def accepts(self, argument_count: int) -> bool:
        return argument_count == self.arity if self.arity >= 0 else argument_count >= -self.arity


TABLE: dict[str, Command] = {}
# CLIENT|SETNAME and the like, under Redis' names for them. A table apart, because a client cannot
# call them by that name.
SUBCOMMANDS: dict[str, Command] = {}


def command(
    name: str,
    *,
    arity: int,
    group: str,
    syntax: str,
    reply: str,
    access: Access = Access.READ,
    home: Home | None = None,
    errors: tuple[str, ...] = (),
) -> Callable[[Handler], Handler]:
    """Enter a handler into the table. Its docstring is the command's documentation. A name with a
    `|` is a subcommand's (commands/subcommands.py runs it).

    The handler gets the arguments after the name. It returns a Reply or a Job, or raises
    PionError, which becomes the error reply. `syntax` is the full wire form, `reply` says what
    comes back, `errors` lists error replies beyond wrong arity, as they start on the wire. `home`
    is the group's (HOMES) where it is None.
    """

    def enter(handler: Handler) -> Handler:
        table = SUBCOMMANDS if "|" in name else TABLE
        if name in table:
            raise ValueError(f"command {name} is defined twice")
        summary = " ".join((handler.__doc__ or "").split())
        where = home or HOMES.get(group, Home.ANYWHERE)
        table[name] = Command(
            name, arity, access, group, syntax, reply, errors, summary, handler, where
        )
        return handler

    return enter
