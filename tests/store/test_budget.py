"""Invariant: with make_room before each mutation the store never exceeds its budget, and what it
lets go is whole units, children before parents, else least recently used first."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pion_server.codecs.table import by_name
from pion_server.errors import OutOfMemory, PionError
from pion_server.store.budget import Budget, make_room, trim
from pion_server.store.keys import KEY_BYTES
from pion_server.store.mutations import (
    BlockTable,
    CreateSession,
    DeleteKeys,
    DropPrefix,
    DropSession,
    DropState,
    Mutation,
    RegisterPrefix,
    RowBlock,
    SetKey,
    StoreRows,
    StoreState,
)
from pion_server.store.prefixes import sides
from pion_server.store.schema import LayerFormat, Schema
from pion_server.store.session import SESSION_BYTES
from pion_server.store.store import LEASE_MS, Store
from pion_server.store.units import Unit, key_unit

ROW = 1000
SCHEMA = Schema.same(LayerFormat(by_name("fp16"), ROW // 2))


def block(sid: bytes, start: int, count: int, layer: int = 0) -> RowBlock:
    return RowBlock(sid, layer, start, count, memoryview(bytes(count * ROW)))


def register(
    ns: bytes, blocks: BlockTable | None = None, parent: bytes | None = None
) -> RegisterPrefix:
    return RegisterPrefix(ns, SCHEMA, SCHEMA, blocks=blocks, parent=parent)


def both_sides(ns: bytes, start: int, count: int) -> StoreRows:
    return StoreRows(tuple(block(sid, start, count) for sid in sides(ns)))


def run(store: Store, budget: int, *mutations: Mutation) -> int:
    """What the server does for each command; returns the number of units evicted."""
    evicted = 0
    for mutation in mutations:
        victims = make_room(store, Budget(budget), mutation)
        for unit in victims:
            assert store.apply(unit)
        store.apply(mutation)
        assert store.bytes_used <= budget
        evicted += len(victims)
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
    budget = store.bytes_used + KEY_BYTES
    assert run(store, budget, SetKey(0, b"k", bytes(5000))) == 1
    assert list(store.prefixes) == [b"a", b"c"]
    assert run(store, budget, SetKey(0, b"l", bytes(12_000))) == 1
    assert list(store.prefixes) == [b"a"]


USES = {
    "session": lambda store: store.session(b"a_pk"),
    "prefix": lambda store: store.prefix(b"a"),
    "view": lambda store: store.view(b"a_pv", 0, 0, 5),
    "gather": lambda store: store.gather(b"a_pk", 0, [4, 0]),
    "match": lambda store: store.match([b"a"], None, 0),
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
    assert store.match(chain, None, 0) == 4
    run(store, store.bytes_used, SetKey(0, b"k", bytes(15_000)))
    assert store.match(chain, None, 0) == 2


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
    with pytest.raises(OutOfMemory, match="over the memory limit of"):
        make_room(store, Budget(used), StoreRows((block(b"a_pk", 0, 60),)))
    with pytest.raises(OutOfMemory):
        make_room(store, Budget(used), SetKey(0, b"k", bytes(used)))
    assert (list(store.recency), store.bytes_used) == (before, used)


def test_nothing_is_evicted_for_a_write_that_will_be_refused() -> None:
    store = filled(b"a", b"b")
    used = store.bytes_used
    bad = RowBlock(b"b_pk", 0, 0, 9, memoryview(bytes(9 * ROW - 1)))
    with pytest.raises(PionError, match="got 8999"):
        make_room(store, Budget(used, 1), StoreRows((block(b"a_pk", 0, 9), bad)))
    assert store.bytes_used == used


def test_storing_the_same_again_and_shrinking_evict_nothing() -> None:
    store = filled(b"a", b"b")
    store.apply(SetKey(0, b"k", bytes(10)))
    used = store.bytes_used
    assert run(store, used, both_sides(b"a", 0, 5), SetKey(0, b"k", bytes(10))) == 0
    for mutation in (SetKey(0, b"k", b""), DeleteKeys(0, (b"k",)), DropPrefix(b"a")):
        assert make_room(store, Budget(1, 1), mutation) == []
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
    assert make_room(store, Budget(), StoreRows((block(b"a_pk", 0, 10_000),))) == []


def test_room_for_several_mutations_is_room_for_all_of_them() -> None:
    """Also where one of them alone would be the least recently used by the time of the next."""
    store = Store()
    for name in (b"leased", b"b"):
        store.apply(SetKey(0, name, bytes(1000)))
    store.lease(key_unit(0, b"leased"), 0)
    both = [SetKey(0, b"b", bytes(1200)), SetKey(0, b"c", bytes(700))]
    assert make_room(store, Budget(store.bytes_used), *both) == [key_unit(0, b"leased")]
    with pytest.raises(OutOfMemory):
        make_room(store, Budget(store.bytes_used), *both, SetKey(0, b"d", bytes(500)))


# Leases


def test_what_is_under_lease_goes_last_and_then_it_does_go() -> None:
    store = filled(b"a", b"b", b"c")
    store.match([b"a"], None, 1000)
    store.prefix(b"b")
    limit = Budget(store.bytes_used)
    order = [DropPrefix(ns) for ns in (b"c", b"b", b"a")]
    for count, unit in enumerate(order, start=1):
        size = sum(map(store.size, order[:count])) - KEY_BYTES - len(b"k")
        victims = make_room(store, limit, SetKey(0, b"k", bytes(size)))
        assert victims == order[:count], unit


def test_a_lease_ends() -> None:
    store = filled(b"a", b"b")
    store.match([b"a"], None, 1000)
    store.recency.tell(1001 + LEASE_MS)
    store.prefix(b"b")
    assert make_room(store, Budget(1 << 20, 4), register(b"c")) == [DropPrefix(b"a")]


def test_a_read_does_not_shorten_a_lease() -> None:
    store = filled(b"a", b"b")
    store.match([b"a"], None, 1000)
    store.prefix(b"a")
    store.recency.tell(1000 + LEASE_MS // 2)
    store.prefix(b"b")
    assert make_room(store, Budget(1 << 20, 4), register(b"c")) == [DropPrefix(b"b")]


# Pairs


@pytest.mark.parametrize("used", [b"c-kv_bytes", b"c-metadata"])
def test_the_two_keys_of_a_chunk_are_used_held_and_evicted_together(used: bytes) -> None:
    store = Store()
    for name in (b"c-kv_bytes", b"c-metadata", b"other"):
        store.apply(SetKey(3, name, bytes(100)))
    store.key(3, used, 0)
    assert run(store, store.bytes_used, SetKey(3, b"new", bytes(100))) == 1
    assert store.keys.count(3) == 3
    assert store.key(3, b"other", 0) is None
    assert run(store, store.bytes_used, SetKey(3, b"newer", bytes(KEY_BYTES + 300))) == 2
    assert store.keys.count(3) == 1


def test_of_a_chunk_one_key_may_be_deleted_and_the_other_still_counts() -> None:
    store = Store()
    for name in (b"c-kv_bytes", b"c-metadata"):
        store.apply(SetKey(0, name, bytes(100)))
    store.apply(DeleteKeys(0, (b"c-kv_bytes",)))
    unit = key_unit(0, b"c-metadata")
    assert (list(store.recency), store.size(unit)) == ([unit], store.bytes_used)
    store.apply(DeleteKeys(0, (b"c-metadata",)))
    assert (len(store.recency), store.bytes_used) == (0, 0)


# Families


def family(*edges: tuple[bytes, bytes | None]) -> Store:
    """Namespaces of 2 * 5 rows each with their parents, stored in this order."""
    store = Store()
    for ns, parent in edges:
        store.apply(register(ns, parent=parent))
        store.apply(both_sides(ns, 0, 5))
    return store


def evicted_in_order(store: Store) -> list[bytes]:
    everything = trim(store, Budget(1))
    return [unit.namespace for unit in everything if isinstance(unit, DropPrefix)]


def test_leaves_go_first_and_then_the_least_recently_used() -> None:
    store = family((b"r", None), (b"x", b"r"), (b"y", b"r"), (b"x1", b"x"), (b"lone", None))
    assert evicted_in_order(store) == [b"y", b"x1", b"x", b"r", b"lone"]
    store.prefix(b"x1")
    assert evicted_in_order(store) == [b"y", b"lone", b"x1", b"x", b"r"]


def test_a_dropped_parent_leaves_its_children() -> None:
    store = family((b"r", None), (b"x", b"r"), (b"lone", None))
    store.apply(DropPrefix(b"r"))
    assert store.parent(b"x") == b"r"
    assert evicted_in_order(store) == [b"x", b"lone"]
    store.apply(register(b"r"))
    assert evicted_in_order(store) == [b"x", b"lone", b"r"]


def test_the_parent_of_a_newcomer_is_not_evicted_for_it() -> None:
    store = filled(b"a", b"b")
    limit = Budget(store.bytes_used, 4)
    assert make_room(store, limit, register(b"n", parent=b"a")) == [DropPrefix(b"b")]


def test_a_circle_of_parents_is_refused() -> None:
    store = family((b"1", None), (b"2", b"1"), (b"3", b"2"))
    for ns, parent in ((b"1", b"3"), (b"1", b"1"), (b"2", b"3"), (b"new", b"new")):
        with pytest.raises(PionError, match="PARENT"):
            store.apply(register(ns, parent=parent))
    assert evicted_in_order(store) == [b"3", b"2", b"1"]


# Sessions


def test_the_number_of_sessions_is_a_limit_of_its_own() -> None:
    store = filled(b"a", b"b")
    store.apply(SetKey(0, b"oldest of all", b""))
    store.apply(CreateSession(b"s", SCHEMA))
    cases: list[tuple[int, Mutation, list[Unit]]] = [
        (7, register(b"c"), []),
        (6, register(b"c"), [DropPrefix(b"a")]),
        (5, register(b"c"), [DropPrefix(b"a")]),
        (4, register(b"c"), [DropPrefix(b"a"), DropPrefix(b"b")]),
        (2, register(b"c"), [DropPrefix(b"a"), DropPrefix(b"b"), DropSession(b"s")]),
        (5, CreateSession(b"t", SCHEMA), [DropPrefix(b"a")]),
        (1, CreateSession(b"s", SCHEMA), []),
        (1, register(b"a"), []),
        (1, both_sides(b"a", 0, 9), []),
        (1, StoreState(b"n", 0, b"state"), []),
    ]
    for limit, mutation, expected in cases:
        assert make_room(store, Budget(0, limit), mutation) == expected
    with pytest.raises(OutOfMemory, match="1 over the limit of 1 sessions"):
        make_room(store, Budget(0, 1), register(b"c"))


def test_both_limits_at_once() -> None:
    store = Store()
    store.apply(SetKey(0, b"old", bytes(5000)))
    for ns in (b"a", b"b"):
        store.apply(register(ns))
    store.apply(SetKey(0, b"young", bytes(5000)))
    limit = Budget(store.bytes_used, 4)
    assert make_room(store, limit, register(b"c")) == [key_unit(0, b"old"), DropPrefix(b"a")]


# Recurrent states


def test_states_of_a_namespace_come_and_go_with_it() -> None:
    for early in (True, False):
        store = Store()
        for mutation in [register(b"n"), StoreState(b"n", 0, bytes(9000))][:: -1 if early else 1]:
            store.apply(mutation)
        assert list(store.recency) == [DropPrefix(b"n")]
        assert store.size(DropPrefix(b"n")) == store.bytes_used > 9000
        assert run(store, store.bytes_used, SetKey(0, b"k", bytes(9000))) == 1
        assert store.recurrent_state(b"n", 0) is None


def test_states_of_their_own_are_a_unit_and_using_one_spares_all() -> None:
    store = Store()
    for sid in (b"a", b"b"):
        for layer in range(3):
            store.apply(StoreState(sid, layer, bytes(1000)))
    assert store.recurrent_state(b"a", 1) == bytes(1000)
    assert store.recurrent_state(b"a", 3) is None
    assert make_room(store, Budget(store.bytes_used), SetKey(0, b"k", b"")) == [DropState(b"b")]


def test_a_state_does_not_push_out_the_others_of_its_session() -> None:
    store = Store()
    store.apply(StoreState(b"a", 0, bytes(1000)))
    store.apply(SetKey(0, b"k", bytes(2000)))
    limit = Budget(store.bytes_used)
    assert make_room(store, limit, StoreState(b"a", 1, bytes(1000))) == [key_unit(0, b"k")]


# Start-up


def test_trimming_takes_what_eviction_would_have_taken() -> None:
    store = filled(b"a", b"b", b"c")
    assert trim(store, Budget()) == trim(store, Budget(store.bytes_used, 6)) == []
    assert trim(store, Budget(store.bytes_used - 1)) == [DropPrefix(b"a")]
    assert trim(store, Budget(0, 3)) == [DropPrefix(b"a"), DropPrefix(b"b")]
    for unit in trim(store, Budget(2 * SESSION_BYTES + 9)):
        store.apply(unit)
    assert (store.bytes_used, len(store.recency)) == (0, 0)
