"""Limits of the wire, as named constants with a reason; a decoder takes them as one value."""

from __future__ import annotations

from dataclasses import dataclass

# A line (`*3`, `$5`, an inline command) longer than this is an attack or a mistake; Redis' figure.
MAX_LINE = 64 * 1024
# Redis' bound on the arguments of one command.
MAX_ARGS = 1024 * 1024
# Bulks from here up get a buffer of their own, and are received into it and sent from it by
# reference; below, a copy is cheaper than the bookkeeping.
BY_REFERENCE = 16 * 1024
# How much of a declared length is reserved before its bytes arrive; the buffer grows as they do.
RESERVE = 64 * 1024 * 1024
# Nesting of a reply; ours has two levels, anything deep is an attack on the stack.
MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Limits:
    """What one decoder accepts."""

    max_args: int = MAX_ARGS
    max_bulk: int = 4 << 30
    refusal: str = "invalid"  # the word for what goes beyond them, as Redis has it


# Before AUTH a stranger can make the server hold at most 160 KB; Redis' figures.
BEFORE_AUTH = Limits(max_args=10, max_bulk=16 * 1024, refusal="unauthenticated")
