"""Invariant: eviction takes units in the order of a naive model: of those without a child that is
still there, the one whose last use (or end of lease) is longest ago."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pion_server.store.mutations import DropPrefix, DropSession
from pion_server.store.recency import Recency
from pion_server.store.units import Unit, key_unit

UNITS: list[Unit] = [
    *(DropPrefix(b"%d" % i) for i in range(8)),
    DropSession(b"s"),
    key_unit(0, b"0"),
    key_unit(0, b"chunk-kv_bytes"),
]
units = st.sampled_from(UNITS)
prefixes = st.sampled_from(UNITS[:8])


class RecencyMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.recency = Recency()
        self.stamps: dict[Unit, tuple[int, int]] = {}
        self.parents: dict[Unit, Unit] = {}
        self.now = self.uses = 0

    @rule(unit=units)
    def add(self, unit) -> None:
        self.recency.add(unit)
        if unit not in self.stamps:
            self.use(unit, self.now)

    @rule(unit=units)
    def remove(self, unit) -> None:
        if unit in self.stamps:
            self.recency.remove(unit)
            del self.stamps[unit]
            self.parents.pop(unit, None)

    @rule(unit=units, lead=st.sampled_from([0, 0, 0, 1, 5, 20]))
    def touch(self, unit, lead) -> None:
        self.recency.touch(unit, lead)
        if unit in self.stamps and self.stamps[unit][0] <= self.now + lead:
            self.use(unit, self.now + lead)

    def use(self, unit: Unit, at: int) -> None:
        self.uses += 1
        self.stamps[unit] = (at, self.uses)

    @rule(now=st.integers(0, 60))
    def tell(self, now) -> None:
        self.recency.tell(now)
        self.now = max(self.now, now)

    @rule(unit=prefixes, parent=prefixes)
    def follow(self, unit, parent) -> None:
        """As the store's rules do: only what is there has a parent, and never in a circle."""
        circle = self.is_below(parent, unit)
        assert self.recency.descends(parent, unit) == circle
        if unit in self.stamps and not circle:
            self.recency.follow(unit, parent)
            self.parents[unit] = parent

    def is_below(self, unit: Unit, ancestor: Unit) -> bool:
        if unit == ancestor:
            return True
        return unit in self.parents and self.is_below(self.parents[unit], ancestor)

    @rule(spared=st.sets(units, max_size=3))
    def victims(self, spared) -> None:
        expected: list[Unit] = []
        left = dict(self.stamps)
        while ready := [
            unit
            for unit in left
            if unit not in spared and not any(self.parents.get(other) == unit for other in left)
        ]:
            coldest = min(ready, key=left.__getitem__)
            expected.append(coldest)
            del left[coldest]
        assert list(self.recency.victims(spared.__contains__)) == expected

    @invariant()
    def the_order_is_that_of_the_model(self) -> None:
        assert list(self.recency) == sorted(self.stamps, key=self.stamps.__getitem__)
        assert len(self.recency) == len(self.stamps)
        assert all((unit in self.recency) == (unit in self.stamps) for unit in UNITS)
        assert all(self.recency.parent(unit) == self.parents.get(unit) for unit in UNITS)


TestRecencyMachine = RecencyMachine.TestCase
TestRecencyMachine.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)


def chains(count: int, length: int) -> Recency:
    """Stored in order, so each root is the oldest unit of its chain."""
    recency = Recency()
    for chain in range(count):
        for at in range(length):
            unit = DropPrefix(b"%d/%d" % (chain, at))
            recency.add(unit)
            if at:
                recency.follow(unit, DropPrefix(b"%d/%d" % (chain, at - 1)))
    return recency


def test_a_chain_goes_from_its_end() -> None:
    recency = chains(2, 1000)
    gone = [unit.namespace for unit in recency.victims(lambda unit: False)]
    assert gone == [b"%d/%d" % (chain, at) for chain in range(2) for at in reversed(range(1000))]


def test_looking_for_a_victim_does_not_walk_the_chains() -> None:
    """Counted in comparisons of what is looked at: with a walk it would be every parent."""
    recency = chains(100, 100)
    asked: list[Unit] = []

    def spared(unit: Unit) -> bool:
        asked.append(unit)
        return False

    assert next(recency.victims(spared)) == DropPrefix(b"0/99")
    assert asked == [DropPrefix(b"0/99")]


def test_an_orphan_finds_its_parent_when_that_is_back() -> None:
    recency = chains(1, 3)
    recency.remove(DropPrefix(b"0/1"))
    assert next(recency.victims(lambda unit: False)) == DropPrefix(b"0/0")
    recency.add(DropPrefix(b"0/1"))
    recency.follow(DropPrefix(b"0/1"), DropPrefix(b"0/0"))
    gone = [unit.namespace for unit in recency.victims(lambda unit: False)]
    assert gone == [b"0/2", b"0/1", b"0/0"]


@pytest.mark.parametrize("later", [0, 9, 10, 11])
def test_a_lease_outlives_whatever_is_used_until_it_ends(later: int) -> None:
    recency = Recency()
    leased, used = DropPrefix(b"leased"), DropPrefix(b"used")
    recency.add(leased)
    recency.add(used)
    recency.touch(leased, 10)
    recency.tell(later)
    recency.touch(used)
    first = next(recency.victims(lambda unit: False))
    assert first == (used if later < 10 else leased)
