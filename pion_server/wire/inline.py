"""Inline commands: a line typed by hand (telnet, netcat), split as Redis splits it.

Words are separated by blanks. "..." knows the escapes \\n \\r \\t \\b \\a and \\xHH, any other
escaped character stands for itself; '...' knows only \\'. A closing quote must end its word.
"""

from __future__ import annotations

import re

from pion_server.errors import ProtocolError

# Possessive repeats: a backslash that began an escape must not be taken again as a plain one.
_WORD = re.compile(
    rb"""
    (?P<plain>  [^ \n\r\t"']*+ )
    (?: " (?P<double> (?: \\. | [^"\\] )*+ ) " | ' (?P<single> (?: \\' | [^'] )*+ ) ' )?
    (?= \s | \Z )
    """,
    re.VERBOSE | re.DOTALL,
)
_BLANKS = re.compile(rb"\s*")
_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_CONTROL = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"b": b"\b", b"a": b"\a"}


def split(line: bytes) -> list[bytes]:
    """The words of an inline command; raises ProtocolError on unbalanced quotes."""
    words: list[bytes] = []
    at = _skip_blanks(line, 0)
    while at < len(line):
        word = _WORD.match(line, at)
        if word is None:
            raise ProtocolError("unbalanced quotes in request")
        double = _ESCAPE.sub(_unescape, word["double"] or b"")
        single = (word["single"] or b"").replace(b"\\'", b"'")
        words.append(word["plain"] + double + single)
        at = _skip_blanks(line, word.end())
    return words


def _skip_blanks(line: bytes, at: int) -> int:
    blanks = _BLANKS.match(line, at)
    assert blanks is not None  # the pattern matches the empty string
    return blanks.end()


def _unescape(escape: re.Match[bytes]) -> bytes:
    code, character = escape.groups()
    if code is not None:
        return bytes.fromhex(code.decode())
    return _CONTROL.get(character, character)
