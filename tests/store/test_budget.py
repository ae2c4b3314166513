"""Invariant: with make_room before each mutation the store never exceeds its budget, and what it
lets go is whole units, least recently used first."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pion_server.codecs.table import by_name
from pion_server.errors import OutOfMemory, PionError
from pion_server.store.budget import make_room
from pion_server.store.mutations import (
    BlockTable,
    CreateSession,
    DeleteKeys,
    DropPrefix,
    Mutation,
    RegisterPrefix,
    RowBlock,
    SetKey,
    StoreRows,
)
from pion_server.store.prefixes import sides
from pion_server.store.schema import LayerFormat, Schema
from pion_server.store.store import Store

ROW = 1000
SCHEMA = Schema.same(LayerFormat(by_name("fp16"), ROW // 2))


def block(sid: bytes, start: int, count: int, layer: int = 0) -> RowBlock:
    return RowBlock(sid, layer, start, count, memoryview(bytes(count * ROW)))


def register(ns: bytes, blocks: BlockTable | None = None) -> RegisterPrefix:
    return RegisterPrefix(ns, SCHEMA, SCHEMA, blocks=blocks)


def both_sides(ns: bytes, start: int, count: int) -> StoreRows:
    return StoreRows(tuple(block(sid, start, count) for sid in sides(ns)))


def run(store: Store, budget: int, *mutations: Mutation) -> int:
    """What the server's context does for each command; returns the number of units evicted."""
    evicted = 0
    for mutation in mutations:
        evicted += make_room(store, budget, mutation)
        store.apply(mutation)
        assert store.bytes_used <= budget
    return evicted


def filled(*namespaces: bytes) -> Store:
    """Namespaces of 2 * 5 rows each, registered and stored in this order."""
    store = Store()
    for ns in namespaces:
        store.apply(register(ns))
        store.apply(both_sides(ns, 0, 5))
    return store


def test_a_random_workload_never_exceeds_and_never_halves_a_prefix() -> None:
    chance, store, budget, evicted = random.Random(1), Store(), 60_000, 0
    for _ in range(3000):
        ns = b"%d" % chance.randrange(20)
        start, count = chance.randrange(8), chance.randrange(1, 8)
        key = SetKey(chance.randrange(16), ns, bytes(chance.randrange(3000)))
        choices = [[register(ns), both_sides(ns, start, count)], [key]]
        evicted += run(store, budget, *chance.choice(choices))
        store.prefix(b"%d" % chance.randrange(20))
        assert set(store.sessions) == {sid for ns in store.prefixes for sid in sides(ns)}
        for prefix in store.prefixes.values():
            assert prefix.keys.row_bytes == prefix.values.row_bytes
    assert evicted > 500


def test_the_least_recently_used_goes_first_and_no_more_than_needed() -> None:
    store = filled(b"a", b"b", b"c")
    store.view(b"a_pv", 0, 0, 1)
    budget = store.bytes_used + 1
    assert run(store, budget, SetKey(0, b"k", bytes(5000))) == 1
    assert list(store.prefixes) == [b"a", b"c"]
    assert run(store, budget, SetKey(0, b"l", bytes(12_000))) == 1
    assert list(store.prefixes) == [b"a"]


USES = {
    "session": lambda store: store.session(b"a_pk"),
    "prefix": lambda store: store.prefix(b"a"),
    "view": lambda store: store.view(b"a_pv", 0, 0, 5),
    "gather": lambda store: store.gather(b"a_pk", 0, [4, 0]),
    "match": lambda store: store.match([b"a"], None),
    "StoreRows": lambda store: store.apply(both_sides(b"a", 1, 2)),
    "RegisterPrefix": lambda store: store.apply(register(b"a")),
    "CreateSession": lambda store: store.apply(CreateSession(b"a_pk", SCHEMA)),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_of_a_prefix_spares_it(use: str) -> None:
    store = filled(b"a", b"b")
    USES[use](store)
    run(store, store.bytes_used, SetKey(0, b"k", b"v"))
    assert list(store.prefixes) == [b"a"]


def test_reading_a_key_spares_it() -> None:
    store = Store()
    for name in (b"a", b"b"):
        store.apply(SetKey(5, name, bytes(100)))
    store.key(5, b"a", 0)
    run(store, store.bytes_used, SetKey(5, b"c", b""))
    assert (store.key(5, b"a", 0) is None, store.key(5, b"b", 0) is None) == (False, True)


def test_after_a_match_the_end_of_a_chain_goes_before_its_root() -> None:
    chain = [b"0", b"1", b"2", b"3"]
    store = filled(*chain)
    assert store.match(chain, None) == 4
    run(store, store.bytes_used, SetKey(0, b"k", bytes(15_000)))
    assert store.match(chain, None) == 2


def test_what_the_write_itself_uses_is_never_evicted_for_it() -> None:
    store = filled(b"old", b"new")
    assert run(store, store.bytes_used, both_sides(b"old", 5, 1)) == 1
    assert list(store.prefixes) == [b"old"]


def test_the_rows_that_a_register_adopts_are_not_evicted_for_it() -> None:
    store = Store()
    store.apply(CreateSession(b"n_pk", SCHEMA))
    store.apply(StoreRows((block(b"n_pk", 0, 3),)))
    store.apply(SetKey(0, b"k", b"value"))
    assert run(store, store.bytes_used, register(b"n")) == 1
    assert store.prefixes[b"n"].tokens == 3


def test_nothing_is_evicted_for_a_write_that_cannot_fit() -> None:
    store = filled(b"a", b"b")
    before, used = list(store.recency), store.bytes_used
    with pytest.raises(OutOfMemory, match="--max-memory"):
        make_room(store, used, StoreRows((block(b"a_pk", 0, 60),)))
    with pytest.raises(OutOfMemory):
        make_room(store, used, SetKey(0, b"k", bytes(used)))
    assert (list(store.recency), store.bytes_used) == (before, used)


def test_nothing_is_evicted_for_a_write_that_will_be_refused() -> None:
    store = filled(b"a", b"b")
    used = store.bytes_used
    bad = RowBlock(b"b_pk", 0, 0, 9, memoryview(bytes(9 * ROW - 1)))
    with pytest.raises(PionError, match="got 8999"):
        make_room(store, used, StoreRows((block(b"a_pk", 0, 9), bad)))
    assert store.bytes_used == used


def test_storing_the_same_again_and_shrinking_evict_nothing() -> None:
    store = filled(b"a", b"b")
    store.apply(SetKey(0, b"k", bytes(10)))
    used = store.bytes_used
    assert run(store, used, both_sides(b"a", 0, 5), SetKey(0, b"k", bytes(10))) == 0
    for mutation in (SetKey(0, b"k", b""), DeleteKeys(0, (b"k",)), DropPrefix(b"a")):
        assert make_room(store, 1, mutation) == 0
    assert store.bytes_used == used


def test_an_existing_row_counts_once() -> None:
    store = filled(b"a", b"b")
    budget = store.bytes_used + 2 * ROW
    assert run(store, budget, both_sides(b"b", 2, 4)) == 0
    assert store.bytes_used == budget


def test_a_block_table_counts() -> None:
    store = filled(b"a", b"b")
    table = BlockTable(256, np.arange(600, dtype=np.uint64))
    assert run(store, store.bytes_used, register(b"b", table)) == 1
    assert run(store, store.bytes_used, register(b"b", table)) == 0
    assert list(store.prefixes) == [b"b"]


def test_no_limit_means_none() -> None:
    store = filled(b"a")
    assert make_room(store, 0, StoreRows((block(b"a_pk", 0, 10_000),))) == 0
