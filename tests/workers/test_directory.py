"""Invariant: a reader of the shared directory never sees a name that is not listed, half an entry,
or an entry of another name; and always sees one that was listed before it looked.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pion_server.codecs.table import by_name
from pion_server.commands.dispatcher import guarded
from pion_server.errors import Elsewhere, OutOfMemory
from pion_server.store.mutations import (
    CreateSession,
    Declaration,
    DropPrefix,
    DropSession,
    DropState,
    Mutation,
    RegisterPrefix,
    RowBlock,
    StoreRows,
    StoreState,
)
from pion_server.store.schema import LayerFormat, Schema
from pion_server.team import Listing
from pion_server.tenants import Tenant
from pion_server.workers import table
from pion_server.workers.directory import SharedDirectory
from pion_server.workers.shared import Shared

KEY = bytes(16)
SCHEMA = Schema.same(LayerFormat(by_name("fp32"), 1))
ROW = memoryview(bytes(4))


def digest_of(number: int) -> bytes:
    return blake2b(b"%d" % number, digest_size=16).digest()


digests = st.integers(0, 400).map(digest_of)
listings = st.builds(
    Listing,
    worker=st.just(1),
    namespace=st.booleans(),
    sealed=st.booleans(),
    tokens=st.integers(0, 2**40),
    prefill_ms=st.none() | st.floats(0, 1e9),
    fingerprint=st.none() | st.binary(min_size=1, max_size=64),
)


class TableMachine(RuleBasedStateMachine):
    """A table and a dict that is told the same."""

    def __init__(self) -> None:
        super().__init__()
        shared = Shared.create(2, 3)
        self.own, self.reader = shared.own_table(1, 2), shared.table(1, 2)
        self.others = [shared.table(worker, tenant) for worker, tenant in ((0, 2), (1, 1))]
        self.model: dict[bytes, Listing] = {}

    @rule(digest=digests, listing=listings)
    def put(self, digest: bytes, listing: Listing) -> None:
        self.own.put(digest, listing)
        self.model[digest] = listing

    @rule(many=st.integers(0, 400), listing=listings)
    def put_many(self, many: int, listing: Listing) -> None:
        for number in range(many):
            self.put(digest_of(number), listing)

    @rule(digest=digests)
    def remove(self, digest: bytes) -> None:
        self.own.remove(digest)
        self.model.pop(digest, None)

    @rule(of=st.integers(2, 4))
    def remove_many(self, of: int) -> None:
        for digest in list(self.model)[::of]:
            self.remove(digest)

    @rule(some=st.dictionaries(digests, listings), keeps=st.booleans())
    def refill(self, some: dict[bytes, Listing], keeps: bool) -> None:
        self.model = {**(self.model if keeps else {}), **some}
        self.own.refill(self.model.items())

    @invariant()
    def the_reader_agrees(self) -> None:
        for number in range(401):
            digest = digest_of(number)
            assert self.reader.find(digest) == self.model.get(digest)
            assert (digest in self.own) == (digest in self.model)
            assert all(other.find(digest) is None for other in self.others)


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


def test_readers_beside_a_writer() -> None:
    """Processes: one that writes all the time, and two that check what they see (hammer.py)."""
    shared = Shared.create(1, 1)
    hammer = [sys.executable, str(Path(__file__).with_name("hammer.py")), str(shared.fd)]
    roles = [
        subprocess.Popen([*hammer, role], pass_fds=[shared.fd], stdout=subprocess.PIPE, text=True)
        for role in ("write", "read", "read")
    ]
    said = [role.communicate(timeout=60)[0] for role in roles]
    assert [role.returncode for role in roles] == [0, 0, 0]
    writes, *reads = (Counter(dict([line.split("=") for line in text.split()])) for text in said)
    assert int(writes["rebuilds"]) > 3
    for seen in reads:
        assert int(seen["there"]) > 1000
        assert int(seen["not_there"]) > 100, "the flickering names never were away"
        assert int(seen["flickering"]) > 100, "the flickering names never were there"


@pytest.mark.parametrize("torn", [1, 16, 40, 100, table.SLOT - 1])
def test_a_writer_that_died_in_the_middle(torn: int) -> None:
    shared = Shared.create(1, 1)
    own, reader = shared.own_table(0, 0), shared.table(0, 0)
    before = {bytes([number]) * 16: Listing(0, True, True, number) for number in range(1, 100)}
    for digest, listing in before.items():
        own.put(digest, listing)
    victim = bytes([50]) * 16
    at = own._places[victim]
    own._memory[at : at + torn] = os.urandom(torn)
    began = time.monotonic()
    found = {digest: reader.find(digest) for digest in before}
    assert time.monotonic() - began < 5
    assert found[victim] is None
    assert all(found[digest] == before[digest] for digest in before if digest != victim)
    again = shared.own_table(0, 0)
    again.refill(before.items())
    assert {digest: reader.find(digest) for digest in before} == before


def test_a_full_directory_takes_no_more_names(monkeypatch: Any) -> None:
    monkeypatch.setattr(table, "CAPACITY", 50)
    tenant = tenants_of(2)[0]
    for number in range(50):
        tenant.apply(CreateSession(b"%d" % number, SCHEMA))
    with pytest.raises(OutOfMemory, match="names"):
        tenant.apply(CreateSession(b"one more", SCHEMA))
    assert tenant.store.session_count == 50
    tenant.apply(DropSession(b"7"))
    tenant.apply(CreateSession(b"one more", SCHEMA))


# -- several workers in one process ---------------------------------------------------------------


def tenants_of(workers: int) -> list[Tenant]:
    """The same tenant on each of them."""
    shared = Shared.create(workers, 1)
    found = []
    for index in range(workers):
        shared.seat(index, os.getpid(), up=True)
        found.append(
            Tenant("t", directory=SharedDirectory(shared, index, workers, tenant=0, key=KEY))
        )
    return found


NAMES = (b"a", b"b", b"a_pk", b"b_pk_pv")
names = st.sampled_from(NAMES)
sids = names | names.map(lambda name: name + b"_pk") | names.map(lambda name: name + b"_pv")
mutations: st.SearchStrategy[Mutation] = st.one_of(
    st.builds(CreateSession, sids, st.just(SCHEMA)),
    st.builds(
        RegisterPrefix,
        names,
        st.just(SCHEMA),
        st.just(SCHEMA),
        declared=st.none() | st.builds(Declaration, st.just(1), st.integers(1, 2)),
        fingerprint=st.sampled_from([None, b"f", b"g"]),
        prefill_ms=st.sampled_from([None, 7.5]),
    ),
    st.builds(
        lambda sid, start: StoreRows((RowBlock(sid, 0, start, 1, ROW),)), sids, st.integers(0, 1)
    ),
    st.builds(DropPrefix, names),
    st.builds(DropSession, sids),
    st.builds(StoreState, names, st.integers(0, 1), st.just(b"state")),
    st.builds(DropState, names, st.none() | st.integers(0, 1)),
)


class WorkersMachine(RuleBasedStateMachine):
    """Three workers that are told anything, and start again at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.tenants = tenants_of(3)

    @rule(worker=st.integers(0, 2), mutation=mutations)
    def apply(self, worker: int, mutation: Mutation) -> None:
        refusal = guarded(lambda: self.tenants[worker].apply(mutation))
        if isinstance(refusal, Elsewhere):
            assert refusal.worker != worker
            assert self.tenants[refusal.worker].store.bytes_used

    @rule(worker=st.integers(0, 2), keeps=st.booleans())
    def start_again(self, worker: int, keeps: bool) -> None:
        old = self.tenants[worker]
        self.tenants[worker] = Tenant("t", directory=old.directory)
        if keeps:
            self.tenants[worker].store = old.store
        self.tenants[worker].join()

    @invariant()
    def all_workers_know_who_holds_what(self) -> None:
        for name in NAMES:
            prefixes = [tenant.store.prefixes.get(name) for tenant in self.tenants]
            assert sum(prefix is not None for prefix in prefixes) <= 1
            for worker, tenant in enumerate(self.tenants):
                assert tenant.directory is not None
                there = tenant.directory.find(name)
                here = prefixes[worker]
                others = [p for p in prefixes if p is not None and p is not here]
                if not others:
                    assert there is None or not there.namespace
                    continue
                assert there is not None
                assert prefixes[there.worker] is others[0]
                fields = ("sealed", "tokens", "prefill_ms", "fingerprint")
                assert all(getattr(there, f) == getattr(others[0], f) for f in fields)

    @invariant()
    def nothing_lives_on_two(self) -> None:
        for kind in ("sessions", "prefixes", "recurrent"):
            held = [name for t in self.tenants for name in getattr(t.store, kind)]
            assert len(held) == len(set(held))
        for worker, tenant in enumerate(self.tenants):
            for sid in tenant.store.sessions:
                finders = [t.directory for t in self.tenants if t is not tenant and t.directory]
                found = [finder.find_session(sid) for finder in finders]
                assert all(listing and listing.worker == worker for listing in found)


TestWorkers = WorkersMachine.TestCase
TestWorkers.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_of_two_that_recovered_the_same_one_keeps_it() -> None:
    """After a power cut that took the last second of one log, a drop among it."""
    workers = tenants_of(2)
    copies = [Tenant("t") for _ in workers]
    for copy in copies:
        copy.apply(RegisterPrefix(b"both", SCHEMA, SCHEMA))
        copy.apply(StoreState(b"both", 0, b"x"))
        copy.apply(CreateSession(b"session", SCHEMA))
    for tenant, copy in zip(workers, copies, strict=True):
        tenant.store = copy.store
        tenant.join()
    assert [tenant.store.prefix_count for tenant in workers] == [1, 0]
    assert [tenant.store.session_count for tenant in workers] == [3, 0]
    assert [tenant.store.recurrent_count for tenant in workers] == [1, 0]
    assert workers[1].store.bytes_used == 0


def test_what_a_worker_holds_that_is_away_is_no_hit_and_not_free() -> None:
    shared = Shared.create(2, 1)
    first, second = (
        Tenant("t", directory=SharedDirectory(shared, index, 2, 0, KEY)) for index in range(2)
    )
    shared.seat(0, 1, up=True)
    first.apply(RegisterPrefix(b"n", SCHEMA, SCHEMA))
    assert second.directory is not None
    assert second.directory.find(b"n") == Listing(0, namespace=True, sealed=True)
    shared.seat(0, 1, up=False)
    assert second.directory.find(b"n") == Listing(0)
    with pytest.raises(Elsewhere):
        second.apply(RegisterPrefix(b"n", SCHEMA, SCHEMA))
