"""The vocabulary both sides speak: what a request is made of, and what a reply may be."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pion_server.errors import PionError

# One argument or bulk string. Small ones are bytes, large ones a memoryview (format "B",
# C-contiguous) over a buffer of their own.
Payload: TypeAlias = bytes | memoryview

_INTEGER = re.compile(rb"0|-?[1-9][0-9]{0,18}")


def decimal(text: Payload) -> int | None:
    """A decimal of at most 19 digits, or None: no `+`, `-0`, blanks or leading zeros, as in Redis.
    No more of a long text is looked at."""
    return int(text) if _INTEGER.fullmatch(text) else None


@dataclass(frozen=True, slots=True)
class Status:
    """A simple string: `+OK`."""

    text: str


OK = Status("OK")


@dataclass(frozen=True, slots=True)
class Stream:
    """A bulk string whose bytes are made while it is sent.

    `pieces` is iterated once, lazily, as the peer drains: it must yield exactly `nbytes` bytes, in
    pieces small enough (about 1 MB where bytes are computed; any size where they are views of
    stored rows) that the event loop stays responsive. It must not fail.
    """

    nbytes: int
    pieces: Iterable[memoryview]


# Python -> RESP: None is null, bool #t/#f (RESP2 :1/:0), int :, float , (RESP2 a bulk), bytes,
# memoryview, str (as UTF-8) and Stream $, Status +, PionError -, a sequence *, a mapping %
# (RESP2: a flat array).
Reply: TypeAlias = (
    "bool | int | float | str | bytes | memoryview | Status | Stream | PionError"
    " | Sequence[Reply] | Mapping[str, Reply] | None"
)
