"""A cursor over a command's arguments: every value is taken by name, so every refusal names it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from pion_server.errors import PionError
from pion_server.wire.values import Payload, decimal

# Long enough for any key an engine makes, short enough that names never become the payload.
MAX_NAME = 4096
_NUMBER = re.compile(rb"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")

Option: TypeAlias = "Callable[[Arguments], Any]"


class Arguments:
    """The arguments after the command's name, taken from the left. Names begin with `prefix`."""

    def __init__(self, args: list[Payload], prefix: bytes) -> None:
        self._args = args
        self._prefix = prefix
        self._next = 0

    def __bool__(self) -> bool:
        return self._next < len(self._args)

    def take(self, what: str) -> Payload:
        """The next argument as it came; raises PionError where there is none."""
        if self._next >= len(self._args):
            raise PionError(f"{what} is missing")
        self._next += 1
        return self._args[self._next - 1]

    def blob(self, what: str) -> memoryview:
        """The next argument as raw bytes, by reference."""
        return memoryview(self.take(what))

    def name(self, what: str) -> bytes:
        """The name of a session or namespace: any bytes within the prefix, 1 to MAX_NAME."""
        value = self.take(what)
        if not 1 <= len(value) <= MAX_NAME:
            raise PionError(f"{what} must be 1 to {MAX_NAME} bytes long, got {len(value)}")
        return within(self._prefix, bytes(value))

    def text(self, what: str) -> str:
        """The next argument as ASCII text."""
        value = self.take(what)
        if len(value) <= MAX_NAME and bytes(value).isascii():
            return bytes(value).decode("ascii")
        raise PionError(f"{what} must be plain ASCII text")

    def keyword(self, what: str) -> str:
        """The next argument as an upper-case word."""
        return self.text(what).upper()

    def integer(self, what: str, low: int, high: int) -> int:
        """A decimal integer, low <= value <= high."""
        value = self.take(what)
        number = decimal(value)
        if number is None or not low <= number <= high:
            words = f"{what} must be an integer between {low} and {high}"
            raise PionError(f"{words}, got {shown(value)}")
        return number

    def number(self, what: str, high: float) -> float:
        """A decimal number without a sign, at most `high`."""
        value = self.take(what)
        if len(value) <= 40 and _NUMBER.fullmatch(value):
            number = float(bytes(value))
            if number <= high:
                return number
        raise PionError(f"{what} must be a number between 0 and {high:g}, got {shown(value)}")

    def options(self, known: Mapping[str, Option]) -> dict[str, Any]:
        """All that is left, as KEYWORD value ... in any order, each at most once."""
        found: dict[str, Any] = {}
        while self:
            word = self.keyword("option")
            if word not in known:
                raise PionError(f"unknown option '{word[:40]}'; known here: {', '.join(known)}")
            if word in found:
                raise PionError(f"option {word} is given twice")
            found[word] = known[word](self)
        return found

    def end(self) -> None:
        """Refuse anything that is left."""
        if self:
            raise PionError(f"unexpected argument {shown(self.take('argument'))}")


def within(prefix: bytes, name: bytes) -> bytes:
    """The name, if it begins with the prefix; raises PionError otherwise."""
    if not name.startswith(prefix):
        raise PionError(f"names begin with {shown(prefix)} here (--ns-prefix), got {shown(name)}")
    return name


def shown(value: Payload) -> str:
    """An argument as a person can read it in an error: short, quoted, printable."""
    return repr(bytes(value[:40]))[1:] + ("..." if len(value) > 40 else "")
