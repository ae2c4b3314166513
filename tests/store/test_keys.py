"""Invariant: a key that is there during a whole SCAN is returned by it, whatever comes and goes;
one that was never there is not; and a key past its deadline is absent before it is swept."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pion_server.store.keys import Keys

keys = st.integers(0, 60).map(lambda i: b"key%d" % i)
NOW = 1000


class ScanMachine(RuleBasedStateMachine):
    """Scans are in flight all the time; every rule may fall between two of their pages."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = Keys()
        self.there: set[bytes] = set()
        self.start_scan()

    def start_scan(self) -> None:
        self.cursor = 0
        self.seen: list[bytes] = []
        self.throughout = set(self.there)
        self.ever = set(self.there)

    @initialize(count=st.integers(0, 40))
    def fill(self, count: int) -> None:
        for i in range(count):
            self.put(b"key%d" % i, None)
        self.start_scan()

    @rule(key=keys, expires=st.sampled_from([None, None, NOW + 1, NOW]))
    def put(self, key: bytes, expires: int | None) -> None:
        self.keys.put(3, key, b"v", expires)
        if expires == NOW:
            self.forget(key)
        else:
            self.there.add(key)
            self.ever.add(key)

    @rule(key=keys)
    def delete(self, key: bytes) -> None:
        self.keys.delete(3, key)
        self.forget(key)

    def forget(self, key: bytes) -> None:
        self.there.discard(key)
        self.throughout.discard(key)

    @rule()
    def sweep(self) -> None:
        for mutation in self.keys.expired(NOW, 5):
            for key in mutation.keys:
                assert key not in self.there
                assert self.keys.delete(mutation.db, key)

    @rule(key=keys)
    def put_into_another_db(self, key: bytes) -> None:
        self.keys.put(4, key, b"other", None)

    @rule(count=st.integers(1, 12))
    def next_page(self, count: int) -> None:
        self.cursor, page = self.keys.scan(3, self.cursor, count, NOW)
        assert len(page) <= count
        assert set(page) <= self.there
        self.seen += page
        if self.cursor == 0:
            self.finish()

    def finish(self) -> None:
        assert self.throughout <= set(self.seen) <= self.ever
        self.start_scan()

    @rule()
    def clear(self) -> None:
        self.keys.clear(3)
        self.there.clear()
        self.throughout.clear()

    @invariant()
    def reads_agree(self) -> None:
        for i in range(61):
            entry = self.keys.get(3, b"key%d" % i, NOW)
            assert (entry is not None) == (b"key%d" % i in self.there)

    def teardown(self) -> None:
        self.next_page(1000)
        assert self.cursor == 0


TestScanMachine = ScanMachine.TestCase
TestScanMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


def test_a_quiet_scan_returns_each_key_once_and_a_rewrite_does_not_move_it() -> None:
    held = Keys()
    names = [b"%d" % i for i in range(25)]
    for name in names:
        held.put(0, name, b"old", None)
    cursor, seen = held.scan(0, 0, 10, NOW)
    for name in names:
        held.put(0, name, b"new", None)
    while cursor:
        cursor, page = held.scan(0, cursor, 10, NOW)
        seen += page
    assert seen == names


def test_sweeping_takes_the_soonest_first_from_all_dbs() -> None:
    held = Keys()
    for db, name, deadline in [(0, b"c", 30), (1, b"a", 10), (0, b"b", 20), (2, b"later", NOW)]:
        held.put(db, name, b"", deadline)
    assert {(m.db, m.keys) for m in held.expired(40, 2)} == {(1, (b"a",)), (0, (b"b",))}
    assert {(m.db, m.keys) for m in held.expired(40, 9)} == {(1, (b"a",)), (0, (b"b", b"c"))}
    assert held.expired(9, 9) == []


def test_a_deadline_that_was_taken_away_or_moved_is_not_swept() -> None:
    held = Keys()
    for name in (b"kept", b"moved", b"replaced", b"gone"):
        held.put(0, name, b"", 10)
    held.expire(0, b"kept", None)
    held.expire(0, b"moved", 20)
    held.put(0, b"replaced", b"", None)
    held.delete(0, b"gone")
    assert held.expired(19, 9) == []
    assert [m.keys for m in held.expired(20, 9)] == [(b"moved",)]
