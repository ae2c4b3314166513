"""Invariant: a declared namespace is a hit exactly when every declared row of every layer of both
sides is in; a refused mutation changes nothing at all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from pion_server.codecs.table import by_name
from pion_server.errors import Mismatch, PionError
from pion_server.store.mutations import (
    BlockTable,
    CreateSession,
    Declaration,
    DropPrefix,
    DropSession,
    Mutation,
    RegisterPrefix,
    RowBlock,
    SetKey,
    StoreRows,
)
from pion_server.store.schema import LayerFormat, Schema
from pion_server.store.session import SESSION_BYTES
from pion_server.store.store import Store

K = Schema.same(LayerFormat(by_name("fp16"), 4))
V = Schema.same(LayerFormat(by_name("fp32"), 3))
TWO_LAYERS = Schema.each((LayerFormat(by_name("fp16"), 4), LayerFormat(by_name("bf16"), 2)))
LAYERS, TOKENS = 3, 5


def rows(sid: bytes, layer: int, start: int, count: int, row_bytes: int) -> RowBlock:
    data = bytes((start + i) % 251 for i in range(count) for _ in range(row_bytes))
    return RowBlock(sid, layer, start, count, memoryview(data))


def k_rows(layer: int, start: int, count: int, ns: bytes = b"ns") -> RowBlock:
    return rows(ns + b"_pk", layer, start, count, 8)


def v_rows(layer: int, start: int, count: int, ns: bytes = b"ns") -> RowBlock:
    return rows(ns + b"_pv", layer, start, count, 12)


def whole() -> Iterator[RowBlock]:
    for layer in range(LAYERS):
        yield k_rows(layer, 0, TOKENS)
        yield v_rows(layer, 0, TOKENS)


def register(**changes: Any) -> RegisterPrefix:
    return RegisterPrefix(**{"namespace": b"ns", "keys": K, "values": V, **changes})


def snapshot(store: Store) -> object:
    """Everything the store holds, as plain values."""
    sessions = {
        sid: (
            session.schema,
            session.unit,
            session.row_bytes,
            [
                {
                    row: bytes(session.layer(layer).pieces(row, row + 1)[0])
                    for row in range(64)
                    if session.layer(layer).covers(row, row + 1)
                }
                for layer in range(session.layers)
            ],
        )
        for sid, session in store.sessions.items()
    }
    prefixes = {
        ns: (
            p.keys_sid,
            p.values_sid,
            p.declared,
            p.fingerprint,
            p.prefill_ms,
            p.blocks and (p.blocks.block_size, p.blocks.hashes.tolist()),
            p.sorted_hashes.tolist(),
            p.sealed,
        )
        for ns, p in store.prefixes.items()
    }
    keys = {name: store.keys.get(0, name, 0) for name in store.keys.scan(0, 0, 1000, 0)[1]}
    return sessions, prefixes, keys, list(store.recency), store.bytes_used


def hit(store: Store) -> bool:
    prefix = store.prefix(b"ns")
    return prefix is not None and prefix.sealed


# One row at a time: first, in the middle and last, of any layer, of either side.
HOLES = list(product(("keys", "values"), range(LAYERS), (0, TOKENS // 2, TOKENS - 1)))


@pytest.mark.parametrize(("side", "layer", "row"), HOLES)
def test_one_missing_row_is_no_hit_until_it_comes(side: str, layer: int, row: int) -> None:
    store = Store()
    store.apply(register(declared=Declaration(LAYERS, TOKENS)))
    sid = b"ns_pk" if side == "keys" else b"ns_pv"
    for block in whole():
        if (block.sid, block.layer) != (sid, layer):
            store.apply(StoreRows((block,)))
            continue
        make = k_rows if side == "keys" else v_rows
        for start, end in ((0, row), (row + 1, TOKENS)):
            if start < end:
                store.apply(StoreRows((make(layer, start, end - start),)))
    assert not hit(store)
    assert store.match([b"ns"], None, 0) == 0
    store.apply(StoreRows((make(layer, row, 1),)))
    assert hit(store)
    assert store.match([b"ns"], None, 0) == 1


def test_rows_beyond_the_declaration_do_not_stand_in_for_missing_ones() -> None:
    store = Store()
    store.apply(register(declared=Declaration(LAYERS, TOKENS)))
    for layer in range(LAYERS + 1):
        store.apply(StoreRows((k_rows(layer, 1, TOKENS), v_rows(layer, 1, TOKENS))))
    assert not hit(store)


def test_an_undeclared_namespace_is_a_hit_at_once_and_as_long_as_its_k_side() -> None:
    store = Store()
    store.apply(register())
    assert hit(store)
    store.apply(StoreRows((k_rows(0, 0, 4), k_rows(2, 0, 4))))
    prefix = store.prefixes[b"ns"]
    assert (prefix.tokens, prefix.layers) == (4, 3)
    assert store.prefix_tokens == 4


def test_a_later_declaration_is_judged_anew() -> None:
    store = Store()
    store.apply(register())
    assert hit(store)
    store.apply(register(declared=Declaration(LAYERS, TOKENS)))
    assert not hit(store)
    store.apply(StoreRows(tuple(whole())))
    assert hit(store)
    store.apply(register(declared=Declaration(LAYERS, TOKENS + 1)))
    assert not hit(store)
    store.apply(register(declared=Declaration(1, 1)))
    assert hit(store)


def test_a_dropped_namespace_comes_back_empty() -> None:
    store = Store()
    store.apply(register(declared=Declaration(LAYERS, TOKENS)))
    store.apply(StoreRows(tuple(whole())))
    assert store.apply(DropPrefix(b"ns")) == 1
    assert (store.sessions, store.prefixes, store.bytes_used) == ({}, {}, 0)
    store.apply(register(declared=Declaration(LAYERS, TOKENS)))
    assert not hit(store)


def test_register_again_keeps_rows_and_replaces_only_what_it_names() -> None:
    store = Store()
    table = BlockTable(256, np.array([9, 3, 7], np.uint64))
    store.apply(register(fingerprint=b"f", blocks=table, prefill_ms=12.5))
    store.apply(StoreRows((k_rows(0, 0, 2),)))
    before = snapshot(store)
    assert store.apply(register()) == 0
    assert snapshot(store) == before
    store.apply(register(fingerprint=b"f", prefill_ms=0.0))
    prefix = store.prefixes[b"ns"]
    assert (prefix.prefill_ms, prefix.blocks) == (0.0, table)
    assert prefix.sorted_hashes.tolist() == [3, 7, 9]
    assert prefix.tokens == 2


def test_register_adopts_bare_sessions_with_their_rows() -> None:
    store = Store()
    store.apply(CreateSession(b"ns_pk", K))
    store.apply(StoreRows((k_rows(0, 0, 3),)))
    used = store.bytes_used
    assert store.apply(register()) == 1
    assert store.bytes_used == used + SESSION_BYTES + len(b"ns_pv")
    assert list(store.recency) == [DropPrefix(b"ns")]
    assert store.prefixes[b"ns"].tokens == 3
    store.apply(DropPrefix(b"ns"))
    assert store.bytes_used == 0


def full_store() -> Store:
    store = Store()
    store.apply(SetKey(0, b"key", b"value"))
    store.apply(CreateSession(b"bare", TWO_LAYERS))
    store.apply(CreateSession(b"half_pv", TWO_LAYERS))
    store.apply(register(fingerprint=b"f", declared=Declaration(2, 2), prefill_ms=3.0))
    store.apply(StoreRows((k_rows(0, 0, 4), v_rows(1, 2, 2), rows(b"bare", 0, 5, 6, 8))))
    return store


GOOD = k_rows(0, 0, 9)
LONG, SHORT = memoryview(bytes(33)), memoryview(bytes(31))
REFUSED: dict[str, tuple[Mutation, type[PionError], str]] = {
    "unknown session": (StoreRows((GOOD, rows(b"no", 0, 0, 1, 8))), PionError, "session 'no'"),
    "no such layer": (StoreRows((GOOD, rows(b"bare", 2, 0, 1, 8))), PionError, "layer 2"),
    "negative layer": (StoreRows((GOOD, k_rows(-1, 0, 1))), PionError, "got -1"),
    "too long": (StoreRows((GOOD, RowBlock(b"ns_pk", 0, 0, 4, LONG))), PionError, "got 33"),
    "too short": (StoreRows((GOOD, RowBlock(b"ns_pk", 0, 0, 4, SHORT))), PionError, "got 31"),
    "negative start": (StoreRows((GOOD, k_rows(0, -1, 1))), PionError, "from -1"),
    "no rows": (StoreRows((GOOD, k_rows(0, 0, 0))), PionError, "at least one"),
    "too far": (StoreRows((GOOD, k_rows(0, 2**31 - 1, 2))), PionError, "2147483647"),
    "other session layout": (CreateSession(b"bare", K), PionError, "KV.PREFIX.DROP"),
    "other side layout": (CreateSession(b"ns_pk", V), PionError, "KV.PREFIX.DROP"),
    "other namespace layout": (register(keys=V, prefill_ms=1.0), PionError, "KV.PREFIX.DROP"),
    "other fingerprint": (register(fingerprint=b"g", prefill_ms=1.0), Mismatch, "KV.PREFIX.DROP"),
    "bare side of another layout": (
        RegisterPrefix(b"half", K, K, prefill_ms=1.0),
        PionError,
        "layout",
    ),
    "no tokens": (register(declared=Declaration(1, 0), prefill_ms=1.0), PionError, "TOKENS"),
    "no layers": (register(declared=Declaration(0, 1), prefill_ms=1.0), PionError, "layer"),
    "more layers than the schema has": (
        RegisterPrefix(b"new", TWO_LAYERS, K, Declaration(3, 1)),
        PionError,
        "schema of 2 layers",
    ),
    "half a namespace": (DropSession(b"ns_pk"), PionError, "both sides"),
    "no such db": (SetKey(16, b"k", b"v"), PionError, "out of range"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_mutation_changes_nothing(case: str) -> None:
    mutation, error, words = REFUSED[case]
    store = full_store()
    before = snapshot(store)
    with pytest.raises(PionError, match=words) as caught:
        store.apply(mutation)
    assert type(caught.value) is error
    assert snapshot(store) == before


def test_a_fingerprint_cannot_be_given_to_rows_of_unknown_origin() -> None:
    store = Store()
    store.apply(register())
    with pytest.raises(Mismatch):
        store.apply(register(fingerprint=b"f"))
    assert store.match([b"ns"], None, 0) == 1
    assert store.match([b"ns"], b"f", 0) == 0


def test_a_match_ends_at_the_first_namespace_that_is_no_hit() -> None:
    store = Store()
    chain = [b"%d" % i for i in range(5)]
    for ns in chain:
        declared = Declaration(1, 1) if ns == b"3" else None
        store.apply(register(namespace=ns, fingerprint=b"f", declared=declared))
    assert store.match(chain, None, 0) == 3
    assert store.match(chain, b"f", 0) == 3
    assert store.match(chain, b"g", 0) == 0
    assert store.match([b"4", b"nowhere", b"0"], None, 0) == 1
