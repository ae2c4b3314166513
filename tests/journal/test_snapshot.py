"""Invariant: a snapshot is the state of one moment, whatever happens while it is written, and at
any time one whole snapshot is there.

That no operation of SAVE may fail, or be the last one, in a harmful way is in test_faults.py.
"""

from __future__ import annotations

import errno
import gc
import sys
from collections import Counter

import numpy as np
import pytest
from driver import FOLDER, Driver, key, reopened, state_after, state_of, until
from memory_disk import Gate, MemoryDisk
from stories import NARROW, WIDE, block, prefix_rows, register, story

from pion_server.errors import PionError
from pion_server.journal import journal, snapshot
from pion_server.journal.recovery import recover
from pion_server.journal.snapshot import capture
from pion_server.store import mutations as m
from pion_server.store.store import Store

# Applied after `story()`, these change or drop every unit that it leaves.
UPHEAVAL = [
    prefix_rows(b"b", 70, start=1),
    register(b"a", tokens=9),
    m.StoreRows((block(b"s", 0, 0, 9, 12, 71), block(b"s", 1, 9, 1, 16, 72))),
    m.StoreRows((block(b"a_pk", 7, 0, 1, 8, 73),)),
    m.StoreState(b"alone", 0, b"newest"),
    m.StoreState(b"alone", 2, b"another"),
    m.DropState(b"alone", 0),
    m.StoreState(b"a", 1, b"newer"),
    m.SetKey(0, b"last", b"changed"),
    m.SetExpiry(3, b"timed", 1 << 59),
    m.DropPrefix(b"b"),
    m.DropPrefix(b"child"),
    m.DropSession(b"s"),
    m.CreateSession(b"s", NARROW),
    m.DropState(b"alone"),
    m.FlushDb(None),
    m.DropPrefix(b"a"),
    m.SetKey(9, b"afterwards", b"x"),
]


def test_a_capture_is_a_moment() -> None:
    store = Store()
    for mutation in story():
        store.apply(mutation)
    before = state_of(store)
    moment = capture(store)
    for mutation in UPHEAVAL:
        store.apply(mutation)
    assert state_of(store) != before
    assert state_after(moment.mutations()) == before
    assert state_after(moment.mutations()) == before  # it is not used up


def test_a_capture_takes_no_more_for_more_layers() -> None:
    """On the event loop, everybody waits for it."""
    made = []
    for layers in (1, 200):
        store = Store()
        for i in range(50):
            sid = b"session %d" % i
            store.apply(m.CreateSession(sid, NARROW))
            store.apply(m.StoreRows(tuple(block(sid, n, 0, 1, 8, n) for n in range(layers))))
            for n in range(layers):
                store.apply(m.StoreState(sid, n, b"state"))
        gc.collect()
        before = sys.getallocatedblocks()
        moment = capture(store)
        made.append(sys.getallocatedblocks() - before)
        assert len(moment.sessions) == 50
        del moment
    assert abs(made[0] - made[1]) < 20, made


def test_a_capture_copies_no_payload() -> None:
    store = Store()
    rows = [block(b"a_pk", layer, 0, 20_000, 8, layer) for layer in range(3)]
    value, state = bytes(100_000), memoryview(bytes(200_000))
    store.apply(register(b"a"))
    store.apply(m.StoreRows(tuple(rows)))
    store.apply(m.SetKey(0, b"k", value))
    store.apply(m.StoreState(b"a", 0, state))
    taken = list(capture(store).mutations())
    stored = [b.data for each in taken if isinstance(each, m.StoreRows) for b in each.blocks]
    assert all(np.shares_memory(a, b.data) for a, b in zip(stored, rows, strict=True))
    assert [each.value for each in taken if isinstance(each, m.SetKey)] == [value]
    assert next(each.value for each in taken if isinstance(each, m.SetKey)) is value
    assert np.shares_memory(next(e.data for e in taken if isinstance(e, m.StoreState)), state)


def test_the_order_of_eviction_survives_however_many_units_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshot, "SORTED_AT_ONCE", 7)
    driver = Driver(MemoryDisk())
    driver.do(*(key(i) for i in range(50)), *story())
    for i in (3, 30, 12, 48, 7):
        driver.store.key(0, b"key %d" % i, 0)
    order = state_of(driver.store)["order"]
    driver.save()
    driver.journal.close()
    assert state_of(recover(driver.disk.after(), FOLDER).store)["order"] == order


@pytest.mark.parametrize("operation", ["create", "writev", "sync", "rename", "sync_folder"])
def test_writes_go_on_while_a_snapshot_is_written(operation: str) -> None:
    driver = Driver(MemoryDisk(), policy="no")
    driver.do(*story())
    gate = Gate(driver.disk, operation)
    saved = driver.journal.save()
    assert gate.reached.wait(20)
    for mutation in UPHEAVAL:
        driver.send(mutation)
    gate.opened.set()
    saved.result(20)
    driver.settle()
    reopened(driver.disk, driver.log)
    driver.journal.close()
    reopened(driver.disk, driver.log)


def test_writes_between_snapshots_are_in_the_next_one() -> None:
    driver = Driver(MemoryDisk())
    for i, mutation in enumerate(story()):
        driver.do(mutation)
        driver.save()
        assert driver.disk.segments() == []
        assert driver.journal.wal_bytes == 0
        reopened(driver.disk, driver.log)
        assert recover(driver.disk.after(), FOLDER).last == i + 1
    driver.journal.close()


@pytest.mark.parametrize("kept", [1.0, 0.6, 0.0])
def test_a_log_that_the_snapshot_covers_says_nothing(kept: float) -> None:
    """It is still there where SAVE came no further; after a power cut perhaps not to its end, and
    then what it says is older than the snapshot."""
    log = [
        *(key(number) for number in range(9)),
        *story(),
        m.CreateSession(b"again", NARROW),
        m.DropSession(b"again"),
        m.CreateSession(b"again", WIDE),
        *(m.SetKey(0, b"key %d" % number, b"newer") for number in range(9)),
    ]
    driver = Driver(MemoryDisk())
    driver.do(*log)
    Gate(driver.disk, "unlink", errno.EIO)
    with pytest.raises(PionError):
        driver.save()
    found = driver.disk.after()
    (name,) = found.segments()
    del found.content(name)[int(kept * len(found.content(name))) :]
    reopened(found, log)
    driver.journal.close()


def test_an_empty_state_is_saved_too() -> None:
    driver = Driver(MemoryDisk())
    driver.save()
    driver.do(key(1), m.FlushDb(None))
    driver.save()
    reopened(driver.disk, driver.log)
    driver.journal.close()


def test_large_states_are_written_and_synced_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "PIECE_BYTES", 500)
    monkeypatch.setattr(snapshot, "RECORD_BYTES", 100)
    monkeypatch.setattr(snapshot, "SYNC_BYTES", 2000)
    driver = Driver(MemoryDisk())
    driver.do(*story(), *(key(i) for i in range(20)))
    driver.disk.trace.clear()
    driver.save()
    size = len(driver.disk.content("snapshot"))
    done = Counter(driver.disk.trace)
    assert 4 < done["writev"] <= size // 500 + 2
    assert size // 4000 <= done["sync"] <= size // 2000 + 1
    reopened(driver.disk, driver.log)
    driver.journal.close()


def test_there_is_one_snapshot_at_a_time() -> None:
    driver = Driver(MemoryDisk())
    gate = Gate(driver.disk, "rename")
    saved = driver.journal.save()
    assert gate.reached.wait(20)
    assert not driver.journal.compact_due()
    with pytest.raises(PionError, match="a snapshot is being taken already"):
        driver.journal.save()
    gate.opened.set()
    saved.result(20)
    driver.save()
    driver.journal.close()


def test_a_snapshot_that_fails_leaves_everything_as_it_was() -> None:
    driver = Driver(MemoryDisk())
    driver.do(*story()[:9])
    driver.save()
    driver.do(*story()[9:])
    before = driver.disk.listing()
    for operation in ("create", "writev", "rename", "sync_folder"):
        gate = Gate(driver.disk, operation, errno.EIO)
        with pytest.raises(PionError, match=r"could not be written \(as the test says\)"):
            driver.save()
        gate.opened.set()
        reopened(driver.disk, driver.log)
        if operation != "sync_folder":  # by then the new one is there
            assert driver.disk.listing() == before
    driver.save()
    driver.do(key(1))
    reopened(driver.disk, driver.log)
    driver.journal.close()


def test_a_snapshot_for_which_there_is_no_room_is_not_begun() -> None:
    driver = Driver(MemoryDisk())
    driver.do(m.SetKey(0, b"large", bytes(5000)))
    driver.disk.room = driver.disk._used() + 3000
    driver.disk.trace.clear()
    with pytest.raises(PionError, match="of disk, 3000 are free"):
        driver.save()
    assert "create" not in driver.disk.trace
    driver.do(key(1))
    reopened(driver.disk, driver.log)
    driver.journal.close()


def test_a_snapshot_that_fills_the_disk_makes_way_for_the_log() -> None:
    driver = Driver(MemoryDisk())
    driver.do(*story())
    gate = Gate(driver.disk, "rename")
    saved = driver.journal.save()
    assert gate.reached.wait(20)
    driver.disk.room = driver.disk._used()
    driver.send(key(1))
    until(driver.journal.refusal)
    gate.opened.set()
    saved.result(20)  # its old segments go, so there is room
    driver.settle()
    assert driver.journal.refusal() is None
    reopened(driver.disk, driver.log)
    driver.journal.close()


def test_closing_gives_a_snapshot_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "PIECE_BYTES", 100)
    driver = Driver(MemoryDisk())
    driver.do(*story())
    gate = Gate(driver.disk, "create")
    saved = driver.journal.save()
    assert gate.reached.wait(20)
    driver.journal._closing.set()
    gate.opened.set()
    driver.journal.close()
    with pytest.raises(PionError, match="given up, since the server stops"):
        saved.result(20)
    assert "snapshot.tmp" not in driver.disk.listing()
    reopened(driver.disk, driver.log)


# -- a second name ---------------------------------------------------------------------------


def test_a_named_snapshot_stays_as_it_is() -> None:
    driver = Driver(MemoryDisk())
    driver.do(*story()[:9])
    driver.save("monday.snap")
    driver.do(*story()[9:])
    driver.save("tuesday")
    driver.save("tuesday")
    driver.do(key(1))
    driver.journal.close()
    for name, log in (("monday.snap", story()[:9]), ("tuesday", story())):
        restored = MemoryDisk()
        restored.files[FOLDER / "snapshot"] = driver.disk.after().files[FOLDER / name]
        reopened(restored, log)
    assert driver.disk.listing().count("snapshot.tmp") == 0
    reopened(driver.disk, driver.log)


def test_a_second_name_outlives_a_power_cut_once_it_is_acknowledged() -> None:
    driver = Driver(MemoryDisk())
    for mutation in story()[:2]:
        driver.do(mutation)
        driver.save("copy")
        shown, synced = driver.disk.files, driver.disk.synced_names
        assert synced[FOLDER / "copy"] is shown[FOLDER / "copy"]
    driver.journal.close()


ELSEWHERE = ["", ".", "..", "../x", "/etc/x", "a/b", "a\0b", ".hidden", "-x", "x y", "ü", "x" * 201]
OURS = ["lock", "snapshot", "snapshot.tmp", "wal.00000000000000000001", "quarantine"]


def test_a_second_name_that_failed_does_not_endanger_the_snapshot() -> None:
    driver = Driver(MemoryDisk())
    driver.do(*story())
    driver.save()
    renames = []

    def fail_the_second(operation: str) -> None:
        renames.extend([operation] if operation == "rename" else [])
        if operation == "rename" and len(renames) == 2:
            raise OSError(errno.EIO, "as the test says")

    driver.disk.gate = fail_the_second
    with pytest.raises(PionError):
        driver.save("copy")
    reopened(driver.disk, driver.log)
    gate = Gate(driver.disk, "writev")
    saved = driver.journal.save()
    assert gate.reached.wait(20)
    reopened(driver.disk, driver.log)  # the new one is being written, the old one is whole
    gate.opened.set()
    saved.result(20)
    driver.save("copy")
    driver.journal.close()
    assert driver.disk.listing() == ["copy", "lock", "snapshot"]


@pytest.mark.parametrize("name", [*ELSEWHERE, *OURS])
def test_a_name_outside_the_folder_or_of_the_journal_is_refused(name: str) -> None:
    driver = Driver(MemoryDisk())
    before = driver.disk.listing()
    with pytest.raises(PionError, match="must be a file name inside the data folder"):
        driver.journal.save(name)
    assert driver.disk.listing() == before
    driver.journal.close()


# -- compaction ------------------------------------------------------------------------------


def test_compaction_is_due_when_most_of_the_log_is_not_current_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal, "COMPACT_BYTES", 1000)
    driver = Driver(MemoryDisk())
    for i in range(20):
        driver.do(m.SetKey(0, b"key %d" % i, bytes(1000)))
        assert not driver.journal.compact_due()  # all of it is current
    rounds = 0
    while not driver.journal.compact_due():
        rounds += 1
        driver.do(m.SetKey(0, b"key 0", bytes(1000)))
        assert rounds < 100
    assert rounds > 15
    before = sum(len(driver.disk.content(name)) for name in driver.disk.listing())
    driver.save()
    assert sum(len(driver.disk.content(name)) for name in driver.disk.listing()) < before * 0.7
    assert not driver.journal.compact_due()
    driver.journal.close()
    again = Driver(driver.disk.after(), driver.log)
    assert not again.journal.compact_due()
    again.journal.close()


def test_a_compaction_that_failed_is_not_tried_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal, "COMPACT_BYTES", -1_000_000)
    driver = Driver(MemoryDisk())
    assert driver.journal.compact_due()
    gate = Gate(driver.disk, "rename", errno.EIO)
    with pytest.raises(PionError):
        driver.save()
    assert not driver.journal.compact_due()
    gate.opened.set()
    monkeypatch.setattr(journal.time, "monotonic", lambda: 1e12)
    assert driver.journal.compact_due()
    monkeypatch.undo()
    driver.journal.close()


def test_sessions_without_a_namespace_keep_their_own_layout() -> None:
    driver = Driver(MemoryDisk())
    driver.do(m.CreateSession(b"s", WIDE), m.CreateSession(b"empty", NARROW))
    driver.do(m.StoreRows((block(b"s", 1, 7, 3, 16, 1),)))
    driver.save()
    reopened(driver.disk, driver.log)
    driver.journal.close()
