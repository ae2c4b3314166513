"""Invariant: a compiled pattern matches what the definition of its elements says, one by one, and
takes no more steps than pattern times text.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion_server.commands.glob import MAX_PATTERN, compile_glob
from pion_server.errors import PionError

ALPHABET = b"ab-]^[\\*?\n\xff"
TEXT = st.lists(st.sampled_from(ALPHABET), max_size=6).map(bytes)
PATTERN = st.lists(st.sampled_from(ALPHABET + b"*["), max_size=8).map(bytes)


def matches(pattern: bytes, text: bytes) -> bool:
    """The definition, slow and plain: the first element, then the rest."""
    if not pattern:
        return not text
    head, rest = pattern[:1], pattern[1:]
    if head == b"*":
        return matches(rest, text) or (bool(text) and matches(pattern, text[1:]))
    if not text:
        return False
    if head == b"?":
        return matches(rest, text[1:])
    if head == b"[":
        chosen, rest = in_class(rest, text[0])
        return chosen and matches(rest, text[1:])
    if head == b"\\" and rest:
        head, rest = rest[:1], rest[1:]
    return head == text[:1] and matches(rest, text[1:])


def in_class(pattern: bytes, byte: int) -> tuple[bool, bytes]:
    """Whether the class, given behind its `[`, has the byte; and what follows the class."""
    negated = pattern.startswith(b"^")
    pattern = pattern[negated:]
    found = False
    while pattern and not pattern.startswith(b"]"):
        low = high = pattern[0]
        taken = 1
        if low == ord("\\") and len(pattern) > 1:
            low = high = pattern[1]
            taken = 2
        elif len(pattern) > 2 and pattern[1] == ord("-"):
            low, high = sorted((low, pattern[2]))
            taken = 3
        found = found or low <= byte <= high
        pattern = pattern[taken:]
    return found != negated, pattern[1:]


@given(PATTERN, TEXT)
def test_the_definition(pattern: bytes, text: bytes) -> None:
    assert bool(compile_glob(pattern).fullmatch(text)) == matches(pattern, text)


@given(PATTERN.filter(lambda pattern: not set(pattern) & set(b"[\\")), TEXT)
def test_case_can_be_ignored(pattern: bytes, text: bytes) -> None:
    ignoring = compile_glob(pattern, ignore_case=True)
    assert bool(ignoring.fullmatch(text)) == matches(pattern.lower(), text.lower())


@pytest.mark.parametrize("piece", [b"*a", b"*a*", b"*?", b"*[a-b]", b"*a?", b"**a"])
def test_a_pattern_made_to_backtrack_ends(piece: bytes) -> None:
    """Trying every way to spread the stars would take longer than the universe is old."""
    assert compile_glob(piece * 300).fullmatch(b"a" * 3000)
    assert not compile_glob(piece * 300 + b"b").fullmatch(b"a" * 3000)
    assert not compile_glob(piece * 300 + b"b*").fullmatch(b"a" * 3000)


def test_an_endless_pattern_is_refused() -> None:
    assert compile_glob(b"a" * MAX_PATTERN).fullmatch(b"a" * MAX_PATTERN)
    with pytest.raises(PionError, match="at most 4096 bytes"):
        compile_glob(b"a" * (MAX_PATTERN + 1))
