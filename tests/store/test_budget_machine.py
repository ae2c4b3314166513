"""Invariant: whatever was written, read, held and dropped before, make_room and trim choose exactly
the units that a naive model chooses, and with them gone the write fits: whole units, no parent
before its child, nothing under lease while anything else is left, nothing that the write needs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pion_server.codecs.table import by_name
from pion_server.errors import OutOfMemory, PionError
from pion_server.store.budget import Budget, make_room, trim
from pion_server.store.mutations import (
    CreateSession,
    DropPrefix,
    Mutation,
    RegisterPrefix,
    RowBlock,
    SetKey,
    StoreRows,
    StoreState,
)
from pion_server.store.prefixes import sides
from pion_server.store.schema import LayerFormat, Schema
from pion_server.store.state import sessions_of
from pion_server.store.store import LEASE_MS, Store
from pion_server.store.units import CHUNK_KEYS, Unit, key_unit

SCHEMA = Schema.same(LayerFormat(by_name("fp16"), 50))
NAMESPACES = [b"%d" % i for i in range(6)]
CHUNKS = [b"chunk%d-" % i for i in range(3)]
KEYS = [b"x", b"y", *(chunk + half for chunk in CHUNKS for half in CHUNK_KEYS)]

namespaces = st.sampled_from(NAMESPACES)
writes = st.one_of(
    st.builds(
        RegisterPrefix,
        namespaces,
        st.just(SCHEMA),
        st.just(SCHEMA),
        parent=st.none() | namespaces,
    ),
    st.builds(CreateSession, st.sampled_from([b"s", b"t"]), st.just(SCHEMA)),
    st.builds(StoreState, namespaces, st.integers(0, 2), st.binary(max_size=3000)),
    st.builds(SetKey, st.just(0), st.sampled_from(KEYS), st.binary(max_size=3000)),
    st.builds(
        lambda ns, start, count: StoreRows(
            tuple(
                RowBlock(sid, 0, start, count, memoryview(bytes(count * 100))) for sid in sides(ns)
            )
        ),
        namespaces,
        st.integers(0, 20),
        st.integers(1, 20),
    ),
)


class BudgetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = Store()
        self.now = 0
        self.leased_until: dict[Unit, int] = {}

    @initialize(first=st.lists(writes, max_size=12))
    def fill(self, first) -> None:
        for mutation in first:
            self.write(mutation)

    @rule(mutation=writes)
    def write(self, mutation) -> None:
        """Without a limit."""
        if self.possible(mutation):
            self.store.apply(mutation)

    @rule(seconds=st.integers(0, 8))
    def wait(self, seconds) -> None:
        self.now += 1000 * seconds
        self.store.recency.tell(self.now)

    @precondition(lambda self: len(self.store.recency))
    @rule(data=st.data(), hold=st.booleans())
    def use(self, data, hold) -> None:
        unit = data.draw(st.sampled_from(list(self.store.recency)))
        if hold:
            self.store.lease(unit, self.now)
            self.leased_until[unit] = self.now + LEASE_MS
        else:
            self.store.recency.touch(unit)

    @precondition(lambda self: len(self.store.recency))
    @rule(data=st.data())
    def drop(self, data) -> None:
        self.evict(data.draw(st.sampled_from(list(self.store.recency))))

    def evict(self, unit: Unit) -> None:
        assert self.store.apply(unit)
        self.leased_until.pop(unit, None)

    @rule(mutation=writes, data=st.data(), together=st.none() | writes)
    def write_within_a_budget(self, mutation, data, together) -> None:
        mutations = [each for each in (mutation, together) if each and self.possible(each)]
        plans = [self.store.plan(each) for each in mutations]
        growth = sum(plan.growth for plan in plans)
        sessions = sum(plan.sessions for plan in plans)
        budget = self.limits(data, growth, sessions)
        spared = {unit for plan in plans for unit in plan.uses | plan.needs}
        expected = self.victims(
            self.store.bytes_used + growth - budget.memory if growth > 0 else 0,
            self.store.session_count + sessions - budget.sessions if sessions else 0,
            spared,
        )
        if expected is None:
            with pytest.raises(OutOfMemory):
                make_room(self.store, budget, *mutations)
            return
        assert make_room(self.store, budget, *mutations) == expected
        if not sessions:
            self.leases_were_the_last_resort(expected, spared)
        for unit in expected:
            self.evict(unit)
        for each in mutations:
            if self.possible(each):
                self.store.apply(each)
        assert growth <= 0 or self.store.bytes_used <= budget.memory
        assert not sessions or self.store.session_count <= budget.sessions

    @rule(data=st.data(), seldom=st.integers(0, 5))
    def start_again_with_less(self, data, seldom) -> None:
        if seldom:
            return
        budget = self.limits(data, 0, 0)
        over = (
            self.store.bytes_used - budget.memory,
            self.store.session_count - budget.sessions,
        )
        chosen = trim(self.store, budget)
        assert chosen == self.victims(*over, set())
        for unit in chosen:
            self.evict(unit)
        assert self.store.bytes_used <= budget.memory
        assert self.store.session_count <= budget.sessions

    # The model

    def possible(self, mutation: Mutation) -> bool:
        try:
            self.store.plan(mutation)
        except PionError:
            return False
        return True

    def limits(self, data: Any, growth: int, sessions: int) -> Budget:
        """From ample to hopeless."""
        used, count = self.store.bytes_used + growth, self.store.session_count + sessions
        memory = used - data.draw(st.sampled_from([0, 0, 1, used // 3, used // 2, used - 1]))
        return Budget(max(1, memory), max(1, count - data.draw(st.sampled_from([0, 0, 0, 1, 3]))))

    def victims(self, nbytes: int, sessions: int, spared: set[Unit]) -> list[Unit] | None:
        """Which units should go to save that much, in order; None where it is never enough."""
        gone: list[Unit] = []
        while nbytes > 0 or sessions > 0:
            ready = (
                unit
                for unit in self.store.recency
                if unit not in spared
                and unit not in gone
                and (nbytes > 0 or sessions_of(unit))
                and not self.has_child(unit, gone)
            )
            unit = next(ready, None)
            if unit is None:
                return None
            gone.append(unit)
            nbytes -= self.store.size(unit)
            sessions -= sessions_of(unit)
        return gone

    def has_child(self, unit: Unit, gone: list[Unit]) -> bool:
        return isinstance(unit, DropPrefix) and any(
            self.store.parent(ns) == unit.namespace and DropPrefix(ns) not in gone
            for ns in self.store.prefixes
        )

    def leases_were_the_last_resort(self, gone: list[Unit], spared: set[Unit]) -> None:
        """Where something under lease had to go, nothing else was there that could have."""
        if any(map(self.is_held, gone)):
            for unit in set(self.store.recency) - set(gone) - spared:
                assert self.is_held(unit) or self.has_child(unit, [])

    def is_held(self, unit: Unit) -> bool:
        return self.leased_until.get(unit, -1) > self.now

    @invariant()
    def no_half_of_anything(self) -> None:
        store = self.store
        assert set(store.sessions) - {b"s", b"t"} == {
            sid for ns in store.prefixes for sid in sides(ns)
        }
        for prefix in store.prefixes.values():
            assert prefix.keys.row_bytes == prefix.values.row_bytes
        assert store.bytes_used == sum(map(store.size, store.recency))
        assert store.session_count == sum(map(sessions_of, store.recency))

    @invariant()
    def everything_can_go(self) -> None:
        assert set(self.store.recency.victims(lambda unit: False)) == set(self.store.recency)


TestBudgetMachine = BudgetMachine.TestCase
TestBudgetMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("half", CHUNK_KEYS)
def test_a_unit_of_two_keys_is_named_by_either(half: bytes) -> None:
    assert key_unit(2, b"k" + half) == key_unit(2, b"k" + CHUNK_KEYS[0])
    assert key_unit(2, half).keys == CHUNK_KEYS
