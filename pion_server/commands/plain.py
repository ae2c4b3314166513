"""What the plain-Redis families share: Redis' way with integers and words, and its error texts.

Clients of Redis compare these texts, so they are Redis 7.0's own, unlike the ones of arguments.py.
"""

from __future__ import annotations

from pion_server.commands.context import Context
from pion_server.errors import PionError
from pion_server.store.keys import Entry
from pion_server.wire.values import Payload, decimal

# What INFO and HELLO tell: clients choose features by it, and 7.0's are the ones that are here.
REDIS_VERSION = "7.0.15"
MAX_INTEGER = 2**63 - 1
MIN_INTEGER = -(2**63)
# No word that any command knows is longer; a longer argument is not copied to find that out.
_MAX_WORD = 64


def integer(value: Payload) -> int:
    """A signed 64-bit integer, written the one way Redis takes."""
    number = decimal(value)
    if number is None or not MIN_INTEGER <= number <= MAX_INTEGER:
        raise PionError("value is not an integer or out of range")
    return number


def word(value: Payload) -> str:
    """An argument that chooses something, in upper case. Bytes that no word has stay unlike any."""
    return bytes(value[:_MAX_WORD]).upper().decode("latin-1")


def shown_word(value: Payload) -> str:
    """An argument as Redis repeats it in an error: as it is, cut."""
    return bytes(value[:128]).decode(errors="backslashreplace")


def syntax_error() -> PionError:
    return PionError("syntax error")


def wrong_arity(name: str) -> PionError:
    return PionError(f"wrong number of arguments for '{name.lower()}' command")


def live(ctx: Context, key: Payload) -> Entry | None:
    """The key's entry in the client's database; None where it is absent or its deadline passed."""
    return ctx.store.key(ctx.client.db, ctx.key(key), ctx.now_ms())


def deadline(value: Payload, scale: int, since_ms: int, least: int, name: str) -> int:
    """An expiry argument, counted in units of `scale` milliseconds from `since_ms`, as milliseconds
    since the epoch. Raises PionError where it is below `least` or the deadline overflows."""
    number = integer(value)
    if number < least or not MIN_INTEGER <= number * scale <= MAX_INTEGER - since_ms:
        raise PionError(f"invalid expire time in '{name.lower()}' command")
    return number * scale + since_ms
