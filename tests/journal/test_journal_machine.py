"""Invariant: after any mix of writes, snapshots, crashes and power cuts, the state is that of the
mutations up to some one, and none that was acknowledged (and promised) is missing.

The oracle is the store itself, fed with the same mutations and no journal.
"""

from __future__ import annotations

import random
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from driver import Driver, state_after, state_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from memory_disk import MemoryDisk
from stories import NARROW, WIDE, block

from pion_server.errors import Misconf, PionError
from pion_server.store import mutations as m

NAMESPACES = [b"a", b"b"]
SIDS = [b"a_pk", b"a_pv", b"b_pk", b"s"]
ROW_BYTES = {NARROW: [8, 8], WIDE: [12, 16]}

# The threads of a journal whose disk has stopped are gone, as in a dead process.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

namespaces = st.sampled_from(NAMESPACES)
sids = st.sampled_from(SIDS)
schemas = st.sampled_from([NARROW, WIDE])
dbs = st.sampled_from([0, 9])
keys = st.sampled_from([b"k", b"l", b"x-kv_bytes", b"x-metadata"])
policies = st.sampled_from(["always", "everysec", "no"])
seeds = st.integers(0, 2**32 - 1)


@st.composite
def rows(draw: st.DrawFn) -> m.StoreRows:
    sizes = draw(st.sampled_from([[8, 8], [12, 16]]))
    blocks = draw(
        st.lists(
            st.tuples(sids, st.integers(0, 1), st.integers(0, 9), st.integers(1, 9)),
            min_size=1,
            max_size=3,
        )
    )
    seed = draw(seeds)
    return m.StoreRows(
        tuple(
            block(sid, layer, start, count, sizes[layer], seed + i)
            for i, (sid, layer, start, count) in enumerate(blocks)
        )
    )


mutations = st.one_of(
    st.builds(m.CreateSession, sids, schemas),
    rows(),
    rows(),
    st.builds(
        m.RegisterPrefix,
        namespaces,
        schemas,
        schemas,
        st.none() | st.builds(m.Declaration, st.integers(1, 2), st.integers(1, 9)),
        st.none() | st.sampled_from([b"f", b"g"]),
        st.none() | st.builds(m.BlockTable, st.just(4), st.just(np.arange(3, dtype=np.uint64))),
        parent=st.none() | namespaces,
    ),
    st.builds(m.DropPrefix, namespaces),
    st.builds(m.DropSession, sids),
    st.builds(m.StoreState, namespaces, st.integers(0, 2), st.binary(max_size=30)),
    st.builds(m.DropState, namespaces, st.none() | st.integers(0, 2)),
    st.builds(m.SetKey, dbs, keys, st.binary(max_size=30), st.none() | st.integers(1, 99)),
    st.builds(m.SetExpiry, dbs, keys, st.none() | st.integers(1, 99)),
    st.builds(m.DeleteKeys, dbs, st.lists(keys, max_size=3).map(tuple)),
    st.builds(m.FlushDb, st.none() | dbs),
)


class JournalMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.disk = MemoryDisk()
        self.driver: Any = None
        self.saving: Future[None] | None = None

    @initialize(policy=policies)
    def open(self, policy: Any) -> None:
        self.driver = Driver(self.disk, policy=policy)
        self.policy, self.promised = policy, 0

    @rule(wanted=st.lists(mutations, min_size=1, max_size=12), wait=st.booleans())
    def write(self, wanted: list[m.Mutation], wait: bool) -> None:
        for mutation in wanted:
            with suppress(PionError):  # of the store; there is no oracle for those here
                self.driver.send(mutation)
        assert self.driver.journal.refusal() is None
        if wait:
            self.driver.settle()
            assert self.driver.acknowledged == len(self.driver.log)

    @rule(name=st.none() | st.just("copy"))
    def begin_to_save(self, name: str | None) -> None:
        """And let whatever comes next happen meanwhile."""
        self.finish_saving()
        self.saving = self.driver.journal.save(name)

    @rule()
    def finish_saving(self) -> None:
        if self.saving is not None:
            self.saving.result(20)
        self.saving = None

    @rule(policy=policies)
    def close_and_open(self, policy: Any) -> None:
        self.driver.journal.close()
        assert self.driver.acknowledged == len(self.driver.log)
        self.disk = self.disk.after()
        self.reopen(policy, len(self.driver.log))

    @rule(policy=policies)
    def kill_and_open(self, policy: Any) -> None:
        acknowledged = self.driver.acknowledged
        self.crash(self.disk.after())
        self.reopen(policy, acknowledged)

    @rule(policy=policies, seed=seeds)
    def cut_the_power_and_open(self, policy: Any, seed: int) -> None:
        promised = self.driver.acknowledged if self.policy == "always" else self.promised
        self.crash(self.disk.after(random.Random(seed)))
        self.reopen(policy, promised)

    def crash(self, found: MemoryDisk) -> None:
        self.disk.stopped = True
        with suppress(SystemExit, Misconf):
            self.driver.journal.close()
        self.disk = found

    def reopen(self, policy: Any, promised: int) -> None:
        self.saving = None
        self.driver = Driver(self.disk, self.driver.log, policy)
        assert len(self.driver.log) >= promised
        state, whole = state_of(self.driver.store), state_after(self.driver.log)
        if state != whole:  # only a power cut under `no`, which may cost units, and then says so
            assert self.policy == "no"
            assert self.driver.report.damage
            assert all(whole["units"].get(unit) == value for unit, value in state["units"].items())
            self.driver.journal.close()
            self.disk = MemoryDisk()
            self.driver = Driver(self.disk, policy=policy)
        # Opening syncs what it finds.
        self.policy, self.promised = policy, len(self.driver.log)

    @invariant()
    def memory_is_what_was_applied(self) -> None:
        if self.driver is not None:
            assert state_of(self.driver.store) == state_after(self.driver.log)

    def teardown(self) -> None:
        if self.driver is not None:
            self.close_and_open("no")
            self.driver.journal.close()


TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
