"""Redis' glob patterns as compiled regular expressions over bytes.

`*` any run, `?` any byte, `[a-c]` and `[^a-c]` a class (a range may be given backwards, a missing
`]` is implied), `\\x` the byte x itself: the semantics of stringmatchlen in Redis' util.c, but for
bytes above 127 in a range, whose order there depends on the platform.

Matching takes at most len(pattern) * len(text) steps whatever the pattern: what stands between two
stars has a fixed width, so its first match is as good as any and is never taken back. That is said
with atomic groups, `(?>.*?piece)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from pion_server.errors import PionError

# Compiling takes about a microsecond a byte, on the event loop.
MAX_PATTERN = 4096


@lru_cache(maxsize=64)
def compile_glob(pattern: bytes, ignore_case: bool = False) -> re.Pattern[bytes]:
    """The expression whose `fullmatch` tells whether a name matches. Raises PionError on a pattern
    longer than MAX_PATTERN bytes."""
    if len(pattern) > MAX_PATTERN:
        raise PionError(f"a pattern must be at most {MAX_PATTERN} bytes long, got {len(pattern)}")
    pieces = [b""]
    for atom in _atoms(pattern):
        if atom == b"*":
            pieces.append(b"")
        else:
            pieces[-1] += atom
    first, *rest = pieces
    if rest:
        *middle, last = rest
        first += b"".join(b"(?>.*?%s)" % piece for piece in middle if piece) + b".*" + last
    return re.compile(first, re.DOTALL | (re.IGNORECASE if ignore_case else 0))


def _atoms(pattern: bytes) -> Iterator[bytes]:
    """The pattern's elements from the left: `*`, or an expression for exactly one byte."""
    at = 0
    while at < len(pattern):
        byte = pattern[at : at + 1]
        at += 1
        if byte == b"*":
            yield byte
        elif byte == b"?":
            yield b"."
        elif byte == b"[":
            atom, at = _byte_class(pattern, at)
            yield atom
        else:
            if byte == b"\\" and at < len(pattern):
                byte = pattern[at : at + 1]
                at += 1
            yield re.escape(byte)


def _byte_class(pattern: bytes, at: int) -> tuple[bytes, int]:
    """The class that starts behind its `[`, and where the pattern goes on."""
    negated = pattern[at : at + 1] == b"^"
    at += negated
    ranges: list[tuple[int, int]] = []
    while at < len(pattern) and pattern[at] != ord("]"):
        if pattern[at] == ord("\\") and at + 1 < len(pattern):
            ranges.append((pattern[at + 1], pattern[at + 1]))
            at += 2
        elif at + 2 < len(pattern) and pattern[at + 1] == ord("-"):
            low, high = sorted((pattern[at], pattern[at + 2]))
            ranges.append((low, high))
            at += 3
        else:
            ranges.append((pattern[at], pattern[at]))
            at += 1
    if not ranges:
        return (b"." if negated else b"(?!)"), at + 1
    body = b"".join(b"\\x%02x-\\x%02x" % span for span in ranges)
    return b"[%s%s]" % (b"^" if negated else b"", body), at + 1
