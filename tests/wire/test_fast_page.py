"""Invariant: docs/FASTLANE.md says what is spoken: its frames are what both ends make of what it
says they are, and its numbers are those of the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pion_server.wire.fast import COMMANDS
from pion_server.wire.fast_encode import encode_fast_reply, encode_fast_request
from pion_server.wire.fast_replies import FastReplyDecoder
from pion_server.wire.fast_requests import FastRequestDecoder
from pion_server.wire.limits import Limits

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "FASTLANE.md").read_text()
REQUESTS, REPLIES = (
    [bytes.fromhex(line) for line in block.splitlines()]
    for block in re.findall(r"```\n(5eca.*?)```", PAGE, re.DOTALL)
)


def test_the_requests(requests_of: Callable[..., list[Any]]) -> None:
    words = [["AUTH", b"secret"], ["ATTEND.PREFIX.LOOKUP", b"s", b"0"]]
    assert [b"".join(encode_fast_request(each)) for each in words] == REQUESTS
    decoded = requests_of(FastRequestDecoder(Limits()), b"".join(REQUESTS))
    assert decoded == [[b"AUTH", b"secret"], [b"ATTEND.PREFIX.LOOKUP", b"s", b"0"]]


def test_the_replies(replies_of: Callable[..., list[Any]]) -> None:
    decoded = replies_of(FastReplyDecoder(Limits()), b"".join(REPLIES))
    assert [b"".join(encode_fast_reply(each)) for each in decoded] == REPLIES
    assert [str(decoded[0].text), str(decoded[1]), decoded[2]] == ["OK", "no", [1, None]]


def test_the_numbers() -> None:
    listed = re.findall(r"^\| 0x([0-9A-F]{2}) \| `(.+)` \|$", PAGE, re.MULTILINE)
    assert {int(number, 16): name for number, name in listed} == COMMANDS
