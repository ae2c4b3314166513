"""One small error tree, used at both ends of the wire.

Each class knows the RESP prefix it travels under, so the server turns an exception into an error
reply with `wire()`, and the client turns the reply back into the same class with `from_wire()`.
A message is one sentence for the person who can act on it.
"""

from __future__ import annotations

import re
from typing import ClassVar, Self


class PionError(Exception):
    """Root of the tree; on the wire `-<PREFIX> <message>`."""

    prefix: ClassVar[str] = "ERR"

    def wire(self) -> str:
        """The text behind `-`: one line, since CR or LF would break the frame."""
        text = " ".join(str(self).splitlines())
        return f"{self.prefix} {text}"

    def as_value(self) -> Self:
        """The error without its traceback and causes. Those hold on to the frames that it came
        through, one of which will hold the error: the request in their hands would stay in memory
        until a garbage collection.
        """
        self.__cause__ = self.__context__ = None
        return self.with_traceback(None)


class ProtocolError(PionError):
    """The bytes are not RESP. The stream has lost its frame boundaries: reply, then close."""

    def wire(self) -> str:
        return "ERR Protocol error: " + super().wire().removeprefix("ERR ")


class NoAuth(PionError):
    """A command came before a needed AUTH."""

    prefix = "NOAUTH"


class WrongPass(PionError):
    """AUTH with a wrong user or password."""

    prefix = "WRONGPASS"


class NoProto(PionError):
    """HELLO asked for a protocol version that is not spoken here."""

    prefix = "NOPROTO"


class Mismatch(PionError):
    """Fingerprints differ: the stored prefix is of another model, layout or token sequence."""

    prefix = "MISMATCH"


class OutOfMemory(PionError):
    """One value does not fit the memory budget even with everything else evicted."""

    prefix = "OOM"


class Misconf(PionError):
    """Writes are refused because they could not be made durable; reads go on."""

    prefix = "MISCONF"


class ColdMiss(PionError):
    """The attention state was put away for other states, or its rows have changed since: bring it
    back with KV.PREFIX.WARM and ask again."""

    prefix = "COLDMISS"


class Elsewhere(PionError):
    """The session or namespace lives on another worker of the server; nothing was done here."""

    _words = re.compile(r"(?:(\S+) )?session lives on worker (\d{1,6})")

    def __init__(self, worker: int, command: str = "") -> None:
        super().__init__(f"{command} session lives on worker {worker}".lstrip())
        self.worker = worker

    @classmethod
    def parse(cls, message: str) -> Elsewhere | None:
        """The error that has this message, if one does: it has no prefix of its own."""
        match = cls._words.fullmatch(message)
        return cls(int(match[2]), match[1] or "") if match else None


class ConnectionFailed(PionError):
    """Client side: the server could not be reached, or the connection broke."""


class DeadlineExceeded(PionError):
    """Client side: the call's deadline passed; the connection was closed."""


_BY_PREFIX: dict[str, type[PionError]] = {
    cls.prefix: cls
    for cls in (
        PionError,
        NoAuth,
        WrongPass,
        NoProto,
        Mismatch,
        OutOfMemory,
        Misconf,
        ColdMiss,
    )
}


def from_wire(text: str) -> PionError:
    """The exception for an error reply's text (without the leading `-`).

    An unknown prefix keeps its word in the message, so nothing the server said is lost.
    """
    prefix, _, message = text.partition(" ")
    cls = _BY_PREFIX.get(prefix)
    if cls is PionError and (elsewhere := Elsewhere.parse(message)):
        return elsewhere
    return cls(message) if cls else PionError(text)
