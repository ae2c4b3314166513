"""Invariant: nobody meets a prefix that is not wholly there, or that is somebody else's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

NewName = Callable[[], bytes]
LAYERS, TOKENS = 2, 3
ROW = b"\1\2\3\4"
DECLARED = ("LAYERS", LAYERS, "TOKENS", TOKENS)
SIDES = (b"_pk", b"_pv")
CELLS = list(product(SIDES, range(LAYERS)))


def register(raw: Any, ns: bytes, *options: Any) -> Any:
    return raw.ask("KV.PREFIX.REGISTER", ns, 1, "fp32", *options)


def fill(raw: Any, ns: bytes, tokens: int = TOKENS, layers: int = LAYERS) -> None:
    blobs = [ROW * tokens] * (2 * layers)
    assert raw.ask("KV.PREFIX.STORE", ns, 0, tokens, "DATA", *blobs) == "+OK"


def is_hit(raw: Any, ns: bytes) -> bool:
    """What LOOKUP, MATCH and FETCH say, which must be one thing."""
    looked_up = raw.ask("KV.PREFIX.LOOKUP", ns)
    assert looked_up in ("+HIT", "+MISS")
    hit = looked_up == "+HIT"
    assert raw.ask("KV.PREFIX.MATCH", 1, ns) == int(hit)
    assert (raw.ask("KV.PREFIX.FETCH", ns) is not None) == hit
    return hit


@pytest.mark.parametrize("there", list(product([False, True], repeat=len(CELLS))), ids=str)
def test_a_declared_prefix_is_a_hit_when_every_layer_of_both_sides_is_in(
    raw: Any, new_name: NewName, there: tuple[bool, ...]
) -> None:
    ns = new_name()
    register(raw, ns, *DECLARED)
    assert not is_hit(raw, ns)
    for (side, layer), wanted in zip(CELLS, there, strict=True):
        if wanted:
            raw.ask("V.STOREBATCH", ns + side, layer, 0, TOKENS, ROW * TOKENS)
    assert is_hit(raw, ns) == all(there)


@pytest.mark.parametrize("lacking", range(TOKENS))
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_one_row_that_is_not_there_makes_it_a_miss(
    raw: Any, new_name: NewName, cell: tuple[bytes, int], lacking: int
) -> None:
    ns = new_name()
    register(raw, ns, *DECLARED)
    for side, layer in CELLS:
        for row in range(TOKENS + 1):  # one more than declared, so that counting rows is not enough
            if ((side, layer), row) != (cell, lacking):
                assert not is_hit(raw, ns)
                raw.ask("V.STOREBATCH", ns + side, layer, row, 1, ROW)
    assert not is_hit(raw, ns)
    raw.ask("V.STOREBATCH", ns + cell[0], cell[1], lacking, 1, ROW)
    assert is_hit(raw, ns)


def test_a_prefix_that_arrives_in_parts_is_a_hit_with_the_last_one(
    raw: Any, new_name: NewName
) -> None:
    ns = new_name()
    register(raw, ns, *DECLARED)
    for start, (low, high) in product(range(TOKENS), [(1, 2), (0, 1)]):
        assert not is_hit(raw, ns)
        words = ("LAYERS", low, high, "DATA", ROW, ROW)
        assert raw.ask("KV.PREFIX.STORE", ns, start, 1, *words) == "+OK"
    assert is_hit(raw, ns)


def test_declaring_more_opens_it_again_and_declaring_less_closes_it(
    raw: Any, new_name: NewName
) -> None:
    ns = new_name()
    register(raw, ns, *DECLARED)
    fill(raw, ns)
    for layers, tokens in [(LAYERS, TOKENS + 1), (LAYERS + 1, TOKENS)]:
        assert register(raw, ns, "LAYERS", layers, "TOKENS", tokens) == "+OK"
        assert not is_hit(raw, ns)
    assert register(raw, ns, "LAYERS", 1, "TOKENS", 2) == "+OK"
    assert is_hit(raw, ns)
    head = raw.map(raw.ask("KV.PREFIX.FETCH", ns)[0])
    assert (head[b"layers"], head[b"tokens"], head[b"end"]) == (1, 2, 2)


def test_without_a_declaration_it_is_a_hit_at_once(raw: Any, new_name: NewName) -> None:
    """As long as layer 0 of its K side is; without a row there is nothing to fetch."""
    ns = new_name()
    register(raw, ns)
    assert raw.ask("KV.PREFIX.LOOKUP", ns) == "+HIT"
    assert raw.ask("KV.PREFIX.MATCH", 1, ns) == 1
    assert raw.ask("KV.PREFIX.FETCH", ns) is None
    raw.ask("V.STOREBATCH", ns + b"_pk", 0, 0, 2, ROW * 2)
    assert raw.ask("KV.PREFIX.FETCH", ns).startswith("-ERR layer 0: rows 0 to 1 are not stored")
    raw.ask("V.STOREBATCH", ns + b"_pv", 0, 0, 2, ROW * 2)
    assert raw.map(raw.ask("KV.PREFIX.FETCH", ns)[0])[b"tokens"] == 2


def test_registering_again_keeps_rows_and_declaration(raw: Any, new_name: NewName) -> None:
    ns = new_name()
    register(raw, ns, *DECLARED, "FINGERPRINT", "aa")
    fill(raw, ns)
    before = raw.ask("KV.PREFIX.FETCH", ns)
    assert register(raw, ns) == "+OK"
    assert register(raw, ns, "PREFILL_MS", 5, "FINGERPRINT", "AA") == "+OK"
    assert raw.ask("KV.PREFIX.FETCH", ns) == before


def test_a_schema_declares_its_number_of_layers(raw: Any, new_name: NewName) -> None:
    ns, word = new_name(), "fmt=fp32,dim=1"
    sides = ("K", 2, word, word, "V", 2, word, word)
    assert raw.ask("KV.PREFIX.REGISTER.SCHEMA", ns, *sides, "TOKENS", 1) == "+OK"
    fill(raw, ns, tokens=1, layers=1)
    assert not is_hit(raw, ns)
    raw.ask("KV.PREFIX.STORE", ns, 0, 1, "LAYERS", 1, 2, "DATA", ROW, ROW)
    assert is_hit(raw, ns)


def test_match_counts_up_to_the_first_that_is_no_hit(raw: Any, new_name: NewName) -> None:
    names = [new_name() for _ in range(4)]
    for ns in names:
        register(raw, ns, *DECLARED, "FINGERPRINT", "aa")
        fill(raw, ns)
    open_one = new_name()
    register(raw, open_one, *DECLARED, "FINGERPRINT", "aa")
    for stop in (open_one, new_name()):
        for at in range(len(names) + 1):
            chain = [*names[:at], stop, *names[at:]]
            assert raw.ask("KV.PREFIX.MATCH", len(chain), *chain) == at
    assert raw.ask("KV.PREFIX.MATCH", 4, *names, "FINGERPRINT", "aa") == 4
    assert raw.ask("KV.PREFIX.MATCH", 2, *names[:2]) == 2


def test_match_is_as_long_as_a_very_long_chain(raw: Any, new_name: NewName) -> None:
    ns = new_name()
    register(raw, ns)
    assert raw.ask("KV.PREFIX.MATCH", 20_000, *[ns] * 20_000) == 20_000


# Stored fingerprint, asked fingerprint, whether they agree.
FINGERPRINTS = [
    (None, None, True),
    ("aa01", None, True),
    ("aa01", "aa01", True),
    ("aa01", "AA01", True),
    ("ff" * 64, "ff" * 64, True),
    ("aa01", "aa02", False),
    ("aa01", "aa", False),
    ("aa01", "aa0100", False),
    (None, "aa01", False),
]


@pytest.mark.parametrize("sealed", [False, True], ids=["open", "sealed"])
@pytest.mark.parametrize(("stored", "asked", "agree"), FINGERPRINTS)
def test_another_fingerprint_is_a_mismatch_and_never_rows(
    raw: Any, new_name: NewName, stored: str | None, asked: str | None, agree: bool, sealed: bool
) -> None:
    ns = new_name()
    register(raw, ns, *DECLARED, *(("FINGERPRINT", stored) if stored else ()))
    if sealed:
        fill(raw, ns)
    option = ("FINGERPRINT", asked) if asked else ()
    answers = [
        raw.ask("KV.PREFIX.LOOKUP", ns, *option),
        raw.ask("KV.PREFIX.FETCH", ns, *option),
        register(raw, ns, *DECLARED, *option),
    ]
    assert [str(answer).startswith("-MISMATCH ") for answer in answers] == [not agree] * 3
    assert raw.ask("KV.PREFIX.MATCH", 1, ns, *option) == int(agree and sealed)
    if agree:
        assert answers[0] == ("+HIT" if sealed else "+MISS")
        assert (answers[1] is not None) == sealed
        assert answers[2] == "+OK"


def test_a_name_that_nobody_holds_is_a_miss_with_any_fingerprint(
    raw: Any, new_name: NewName
) -> None:
    ns = new_name()
    assert raw.ask("KV.PREFIX.LOOKUP", ns, "FINGERPRINT", "aa") == "+MISS"
    assert raw.ask("KV.PREFIX.FETCH", ns, "FINGERPRINT", "aa") is None
    assert raw.ask("KV.PREFIX.MATCH", 1, ns, "FINGERPRINT", "aa") == 0


def test_drop_frees_both_sides_and_the_name(raw: Any, new_name: NewName) -> None:
    ns, info = new_name(), raw.ask("KV.PREFIX.INFO")
    register(raw, ns, *DECLARED, "FINGERPRINT", "aa")
    fill(raw, ns)
    assert raw.ask("KV.PREFIX.DROP", ns, new_name(), ns) == 1
    assert raw.ask("KV.PREFIX.LOOKUP", ns) == "+MISS"
    for side in SIDES:
        assert raw.ask("V.FETCH", ns + side, 0, 0).startswith("-ERR unknown session")
    after = raw.ask("KV.PREFIX.INFO")
    assert [line for line in info.splitlines() if b"fetches" not in line] == [
        line for line in after.splitlines() if b"fetches" not in line
    ]
    assert raw.ask("KV.PREFIX.REGISTER", ns, 7, "bf16", "FINGERPRINT", "bb") == "+OK"


def test_info_counts_what_is_held(start_pion: Any, connect: Any) -> None:
    raw = connect(start_pion().port)
    register(raw, b"a", *DECLARED)
    register(raw, b"b")
    raw.ask("V.CREATE", b"c", 4)
    fill(raw, b"a")
    fill(raw, b"b", tokens=5)
    raw.ask("V.FETCH", b"a_pk", 0, 0)
    raw.ask("KV.PREFIX.FETCH", b"a")
    fields = dict(line.split(b":") for line in raw.ask("KV.PREFIX.INFO").splitlines())
    expected = {
        b"registered_prefixes": 2,
        b"total_prefix_tokens": 8,
        b"vstore_sessions": 5,
        b"vstore_total_fetches": 1 + 2 * LAYERS,
        b"vstore_bytes": 4 * 2 * LAYERS * (TOKENS + 5),
    }
    assert {name: int(fields[name]) for name in expected} == expected


@pytest.mark.parametrize("registered", [None, "aa"])
def test_rows_for_another_fingerprint_are_not_stored(
    raw: Any, new_name: NewName, registered: str | None
) -> None:
    ns = new_name()
    register(raw, ns, *DECLARED, *(("FINGERPRINT", registered) if registered else ()))
    blobs = [ROW * TOKENS] * (2 * LAYERS)
    refused = raw.ask("KV.PREFIX.STORE", ns, 0, TOKENS, "FINGERPRINT", "bb", "DATA", *blobs)
    assert refused.startswith("-MISMATCH")
    assert not is_hit(raw, ns)
    if registered:
        store = ("KV.PREFIX.STORE", ns, 0, TOKENS, "FINGERPRINT", registered, "DATA", *blobs)
        assert raw.ask(*store) == "+OK"
        assert is_hit(raw, ns)
