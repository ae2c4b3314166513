"""Invariant: whatever is asked of any command, the answer is one that its entry in the reference
allows, the connection and the server live, and what others have stored stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_server.commands import reference
from pion_server.commands.registry import SUBCOMMANDS, TABLE

reference.load_families()
ROWS = TABLE | SUBCOMMANDS
# QUIT ends the connection.
FORMS = [
    form
    for name, row in ROWS.items()
    if name != "QUIT"
    for form in reference.forms(row).split("\n")
]
Words: TypeAlias = list[bytes]

NUMBERS = [b"%d" % n for n in (0, 1, 2, 3, 4, 8, 64, -1, 2**31, 2**32, 2**63 - 1, 2**64, 10**40)]
NAMES = [b"any", b"any_pk", b"any_pv", b"other", b"", b"\xff\0\r\n"]
WORDS = [
    b"fp16",
    b"fp32",
    b"bf16",
    b"fmt=fp16,dim=2",
    b"fmt=bf16,dim=2",
    b"00ff",
    b"1.5",
    b"nan",
    b"*",
]
BLOBS = [bytes(n) for n in (4, 8, 16, 32, 20_000)]
KEYWORDS = sorted({w.encode() for form in FORMS for w in re.findall(r"[A-Z][A-Z0-9_.-]+", form)})
ANY = st.sampled_from(NUMBERS + NAMES + WORDS + BLOBS + KEYWORDS) | st.binary(max_size=9)
# What a placeholder most likely stands for, so that many requests are nearly right.
LIKELY = {
    "sid": NAMES,
    "ns": NAMES,
    "key": NAMES,
    "codec": WORDS[:3],
    "hex": [b"00ff", b"aa"],
    "blob": BLOBS,
    "hash_blob": BLOBS,
}


def word(token: str) -> st.SearchStrategy[bytes]:
    """A word for one token of a wire form."""
    name = re.sub(r"[<>\[\].]", "", token)
    if not token.strip("[").startswith("<"):
        return st.just(name.encode())
    likely = LIKELY.get(name, BLOBS if name[:2] in ("k_", "v_") else NUMBERS)
    return st.sampled_from(likely) | st.sampled_from(likely) | ANY


@st.composite
def request(draw: Callable[..., Any]) -> Words:
    """A wire form with its placeholders filled in, some options left out, sometimes broken."""
    form = draw(st.sampled_from(FORMS))
    form = re.sub(r" \[[^\[\]]*\]", lambda found: found[0] if draw(st.booleans()) else "", form)
    words = [draw(word(token)) for token in form.split() if token not in ("...", "|")]
    match draw(st.integers(0, 5)):
        case 0:
            return words[: draw(st.integers(1, len(words)))]
        case 1:
            return [*words, *draw(st.lists(ANY, max_size=4))]
        case 2:
            at = draw(st.integers(0, len(words) - 1))
            return [*words[:at], draw(ANY), *words[at + 1 :]]
        case _:
            return words


def allowed(words: Words, reply: str) -> bool:
    """Whether an error is one that the reference names for this command."""
    name = words[0].decode("latin-1").upper()
    row = TABLE.get(name)
    sub = (
        SUBCOMMANDS.get(f"{name}|{words[1].decode('latin-1').upper()}") if len(words) > 1 else None
    )
    errors = [error for each in (row, sub) if each for error in each.errors]
    return any(pattern(error).match(reply) for error in (*errors, *reference.COMMON_ERRORS))


def pattern(error: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"<[^<>]*>", ".*", re.escape(error)))


@pytest.fixture(scope="module")
def proto() -> int:
    """Where each example begins; HELLO and RESET change it on the way."""
    return 2


@pytest.fixture(scope="module")
def kept(raw: Any) -> Callable[[], Any]:
    """Somebody else's prefix, session and blocks, as they are now."""
    hashes = bytes(range(16))
    raw.ask(
        "KV.PREFIX.REGISTER", "kept", 2, "fp16", "LAYERS", 1, "TOKENS", 3, "BLOCKS", 1, 2, hashes
    )
    raw.ask("KV.PREFIX.STORE", "kept", 0, 3, "FMT", "NATIVE", "DATA", bytes(12), b"x" * 12)

    def kept() -> Any:
        raw.ask("HELLO", 2)
        fetched = raw.ask("KV.PREFIX.FETCH", "kept", "FMT", "NATIVE")
        return fetched, raw.ask("KV.PREFIX.BLOCKS", "kept"), raw.ask("V.FETCH", "kept_pv", 0, 2)

    return kept


@settings(max_examples=300, deadline=None)
@given(st.lists(request(), min_size=1, max_size=6), st.booleans())
def test_any_words(
    raw: Any, kept: Any, pion_server: Any, requests: list[Words], pipelined: bool
) -> None:
    before = kept()
    if pipelined:
        for words in requests:
            raw.send(*words)
        replies = [raw.reply() for _ in requests]
    else:
        replies = [raw.ask(*words) for words in requests]
    for words, reply in zip(requests, replies, strict=True):
        if isinstance(reply, str) and reply.startswith("-"):
            assert allowed(words, reply), (words, reply)
            assert "internal error" not in reply, words
    assert kept() == before
    assert " ERROR " not in pion_server.log.read_text()
