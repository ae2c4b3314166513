"""A call: the arguments that go out, how the reply is read, and where it may be received.

Calls are values without I/O. Both clients run them, alone or in a pipeline; one call may be run any
number of times unless its sink writes into a buffer that is still in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

import numpy as np

from pion_server.client.buffers import Buffer, raw, writable
from pion_server.errors import PionError, ProtocolError
from pion_server.wire.encode import Argument
from pion_server.wire.replies import Sink
from pion_server.wire.values import OK, Payload, Reply, Status

T = TypeVar("T")
# Names of keys, sessions and namespaces: any bytes; text goes out as UTF-8.
Name: TypeAlias = bytes | str


@dataclass(frozen=True, slots=True, repr=False)
class Call(Generic[T]):
    """One request and the reading of its reply."""

    args: tuple[Argument, ...]
    parse: Callable[[Reply], T]
    sink: Sink | None = None
    retry: bool = True  # running it twice leaves the same state and the same answer

    @property
    def name(self) -> str:
        """The command's name: all of a call that is fit for logs."""
        return str(self.args[0])

    def result(self, reply: Reply) -> T:
        """The reply as this call's value. Raises what the server answered as an error, and
        ProtocolError on a reply that the command cannot have."""
        if isinstance(reply, PionError):
            raise reply
        try:
            return self.parse(reply)
        except (LookupError, TypeError, ValueError) as error:
            raise ProtocolError(f"the reply does not fit {self.name}") from error

    def __repr__(self) -> str:
        return f"<Call {self.name}, {len(self.args) - 1} arguments>"


def words(*values: Name | float | Buffer) -> tuple[Argument, ...]:
    """Python values as arguments: buffers by reference, numpy's scalars as numbers."""
    return tuple(_word(value) for value in values)


def _word(value: Name | float | Buffer) -> Argument:
    if isinstance(value, bytes | str | int | float):
        return value
    if isinstance(value, np.generic):
        return _word(value.item())
    return raw(value)


def option(keyword: str, *values: Name | float | Buffer | None) -> tuple[Argument, ...]:
    """`KEYWORD value ...`, or nothing where the first value is None."""
    given = tuple(value for value in values if value is not None)
    return words(keyword, *given) if given else ()


def span(keyword: str, value: tuple[int, int] | None) -> tuple[Argument, ...]:
    """`KEYWORD start end`, half-open, or nothing."""
    return words(keyword, *value) if value is not None else ()


def unexpected(reply: Reply) -> NoReturn:
    """The server speaks RESP but not this command; the reply's content stays out of the message."""
    raise ProtocolError(f"a reply of type {type(reply).__name__} does not fit the command")


def done(reply: Reply) -> None:
    """`+OK`."""
    if reply != OK:
        unexpected(reply)


def status(reply: Reply) -> str:
    """`+WORD`."""
    return reply.text if isinstance(reply, Status) else unexpected(reply)


def integer(reply: Reply) -> int:
    """`:n`."""
    return reply if isinstance(reply, int) else unexpected(reply)


def flag(reply: Reply) -> bool:
    """`:0` or `:1`."""
    return bool(integer(reply))


def bulk(reply: Reply) -> Payload:
    """A bulk string: bytes where it is small, a memoryview where it is large."""
    return reply if isinstance(reply, bytes | memoryview) else unexpected(reply)


def optional_bulk(reply: Reply) -> Payload | None:
    """A bulk string or null."""
    return None if reply is None else bulk(reply)


def text(reply: Reply) -> str:
    """A bulk string in UTF-8."""
    return bytes(bulk(reply)).decode()


def array(reply: Reply) -> Sequence[Reply]:
    """An array."""
    return reply if isinstance(reply, list) else unexpected(reply)


def bulks(reply: Reply) -> list[memoryview]:
    """An array of bulk strings."""
    return [memoryview(bulk(item)) for item in array(reply)]


def mapping(reply: Reply) -> Mapping[str, Any]:
    """A map."""
    return reply if isinstance(reply, Mapping) else unexpected(reply)


def lines(reply: Reply) -> dict[str, str]:
    """The `field:value` lines of a bulk string; headings and empty lines are passed over."""
    pairs = (line.partition(":") for line in text(reply).splitlines())
    return {field: value for field, colon, value in pairs if colon}


def received_into(
    into: Buffer | None, parse: Callable[[Reply], T]
) -> tuple[Callable[[Reply], T], Sink | None]:
    """`parse` and the sink of a call whose one bulk goes into the caller's buffer.

    The buffer must have the size of the bulk exactly: a reply of another size is received apart, so
    the connection stays in step, and is a PionError.
    """
    if into is None:
        return parse, None
    target = writable(into)

    def sink(index: int, nbytes: int) -> memoryview | None:
        return target if nbytes == len(target) else None

    def check(reply: Reply) -> T:
        if isinstance(reply, bytes | memoryview) and len(reply) != len(target):
            raise PionError(
                f"the reply has {len(reply)} bytes, the buffer to receive into has {len(target)}"
            )
        return parse(reply)

    return check, sink
