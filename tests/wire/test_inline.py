"""Invariant: an inline command is split into the words Redis makes of it.

The expected words are the answers of redis-server 7.0.15 to `EVAL 'return ARGV' 0 <line>`.
"""

from __future__ import annotations

import pytest

from pion_server.errors import ProtocolError
from pion_server.wire import inline
from pion_server.wire.limits import Limits
from pion_server.wire.requests import RequestDecoder

WORDS = [
    (b"", []),
    (b" \t ", []),
    (b"SET a b", [b"SET", b"a", b"b"]),
    (b"  SET\t\ta   b  ", [b"SET", b"a", b"b"]),
    (b'""', [b""]),
    (b"'' \"\"", [b"", b""]),
    (b'"a b" c', [b"a b", b"c"]),
    (b"'a b' c", [b"a b", b"c"]),
    (b'a"b c"', [b"ab c"]),
    (b"a'b c'", [b"ab c"]),
    (rb'"\n\r\t\b\a"', [b"\n\r\t\b\a"]),
    (rb'"\x00\xfF\x4"', [b"\x00\xffx4"]),
    (rb'"\q\\\""', [b'q\\"']),
    (rb"'\n\x41\'\\x'", [rb"\n\x41'\\x"]),
    (rb"a\n\x41", [rb"a\n\x41"]),
    (b"\"it's\" '\"'", [b"it's", b'"']),
    (b"a\x0bb \x0cc", [b"a\x0bb", b"c"]),
    (b"a\rb", [b"a", b"b"]),
    (b"\xff\xfe", [b"\xff\xfe"]),
]
UNBALANCED = [
    b'"',
    b"'",
    b'"a',
    b"'a",
    b'a"',
    b'"a"b',
    b"'a'b",
    b"\"a\"'b'",
    b'"a\\"',
    b"'a\\'",
    b"'a\\\\'",
    b'"\\',
    b'"" "',
    b'"' * 60_001,
]


@pytest.mark.parametrize(("line", "words"), WORDS)
def test_words(line: bytes, words: list[bytes]) -> None:
    assert inline.split(line) == words


@pytest.mark.parametrize("line", UNBALANCED)
def test_unbalanced_quotes(line: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^unbalanced quotes in request$"):
        inline.split(line)


def test_lines_end_with_lf_or_crlf_and_empty_ones_are_skipped() -> None:
    decoder = RequestDecoder(Limits())
    data = b"\r\n\n  \r\nPING\n ECHO 'a b'\r\n*1\r\n$4\r\nQUIT\r\nPING\r\n"
    decoder.get_buffer()[: len(data)] = data
    decoder.buffer_updated(len(data))
    requests = []
    while (request := decoder.next_request()) is not None:
        requests.append(request)
    assert requests == [[b"PING"], [b"ECHO", b"a b"], [b"QUIT"], [b"PING"]]
