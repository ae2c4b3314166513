"""Invariant: what is acknowledged is where the policy says, in the order it was applied; and what
cannot be written is refused in words, while the event loop never waits for the disk.

Attacked with disks that are slow, full, broken, or whose files are taken away.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from driver import FOLDER, Driver, key, reopened, until
from memory_disk import Gate, MemoryDisk
from stories import block, register, story

from pion_server.errors import Misconf
from pion_server.journal import wal
from pion_server.journal.disk import Buffer
from pion_server.journal.recovery import recover
from pion_server.journal.wal import Policy
from pion_server.store import mutations as m

POLICIES: list[Policy] = ["always", "everysec", "no"]
SYNC_SECONDS = wal.SYNC_SECONDS  # that of the server; conftest.py makes it short for the tests


@pytest.mark.parametrize("policy", POLICIES)
def test_everything_is_there_again(policy: Policy) -> None:
    driver = Driver(MemoryDisk(), policy=policy)
    driver.do(*story())
    reopened(driver.disk, driver.log)  # as after SIGKILL
    driver.journal.close()
    reopened(driver.disk, driver.log)


def test_waiting_writes_share_one_sync() -> None:
    driver = Driver(MemoryDisk())
    gate = Gate(driver.disk, "sync")
    driver.send(key(0))
    assert gate.reached.wait(20)
    for i in range(1, 500):
        driver.send(key(i))
    assert driver.acknowledged == 0
    driver.disk.trace.clear()
    gate.opened.set()
    driver.settle()
    assert driver.acknowledged == 500
    assert driver.disk.trace.count("sync") == 2
    assert driver.disk.trace.count("writev") == 1
    driver.journal.close()
    reopened(driver.disk, driver.log)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_event_loop_never_touches_the_disk(policy: Policy) -> None:
    driver = Driver(MemoryDisk(), policy=policy)
    here = threading.current_thread()
    touched = []
    driver.disk.gate = lambda name: (
        touched.append(name) if threading.current_thread() is here else None
    )
    driver.do(*story())
    driver.save()
    assert driver.journal.wal_bytes == driver.journal.backlog_bytes == 0
    driver.journal.compact_due()
    driver.journal.refusal()
    assert touched == []
    driver.journal.close()


def test_with_always_nothing_is_acknowledged_before_it_would_survive_a_power_cut() -> None:
    driver = Driver(MemoryDisk())
    cuts: list[tuple[int, MemoryDisk]] = []
    driver.journal.watch(
        lambda: cuts.append((driver.acknowledged, driver.disk.after(random.Random(len(cuts)))))
    )
    log = story()
    for mutation in log:
        driver.send(mutation)
        if random.random() < 0.5:
            until(lambda: driver.acknowledged == len(driver.log))
    until(lambda: driver.acknowledged == len(log))
    driver.journal.close()
    for acknowledged, disk in cuts:
        assert recover(disk, FOLDER).last >= acknowledged
    assert max(acknowledged for acknowledged, _ in cuts) == len(log)


def test_everysec_acknowledges_first_and_syncs_soon_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wal, "SYNC_SECONDS", 1.0)  # or a busy machine takes it for a slow sync
    driver = Driver(MemoryDisk(), policy="everysec")
    gate = Gate(driver.disk, "sync")
    driver.do(*story()[:5])
    assert driver.acknowledged == 5
    gate.opened.set()
    until(lambda: recover(driver.disk.after(random.Random(1)), FOLDER).last == 5)
    driver.journal.close()


def test_everysec_is_no_more_than_a_second() -> None:
    """A write may be acknowledged just after a sync has begun. The next one begins in SYNC_SECONDS,
    and nothing is acknowledged any more once it takes as long again."""
    assert 2 * SYNC_SECONDS <= 1


def test_everysec_stops_acknowledging_when_a_sync_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wal, "SYNC_SECONDS", 0.3)
    driver = Driver(MemoryDisk(), policy="everysec")
    gate = Gate(driver.disk, "sync")
    driver.do(key(0))
    assert gate.reached.wait(20)
    time.sleep(0.4)
    driver.send(key(1))
    driver.send(key(2))
    time.sleep(0.02)
    assert driver.acknowledged == 1
    gate.opened.set()
    driver.settle()
    assert driver.acknowledged == 3
    driver.journal.close()


def survives_power_cuts(driver: Driver) -> bool:
    cuts = (driver.disk.after(random.Random(seed)) for seed in range(5))
    return all(recover(cut, FOLDER).last == len(driver.log) for cut in cuts)


def test_everysec_syncs_a_segment_that_is_finished_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wal, "SYNC_SECONDS", 0.3)  # time enough to begin a second segment
    driver = Driver(MemoryDisk(), policy="everysec")
    gate = Gate(driver.disk, "rename")  # the snapshot will not be there for now
    for i, mutation in enumerate(story()):
        driver.send(mutation)
        if i == 9:
            saved = driver.journal.save()
    until(lambda: len(driver.disk.segments()) == 2)
    until(lambda: survives_power_cuts(driver))
    gate.opened.set()
    saved.result(20)
    assert survives_power_cuts(driver)
    driver.journal.close()


@pytest.mark.parametrize("first", POLICIES)
def test_what_a_killed_process_had_not_synced_is_synced_by_the_next(first: Policy) -> None:
    driver = Driver(MemoryDisk(), policy=first)
    driver.do(*story())
    again = Driver(driver.disk.after(), driver.log)
    assert survives_power_cuts(again)
    for each in (driver, again):
        each.journal.close()


def test_a_torn_tail_is_cut_off_for_good_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(MemoryDisk())
    driver.do(*story())
    driver.journal.close()
    disk = driver.disk.after()
    (name,) = disk.segments()
    size = len(disk.content(name))
    disk.content(name).extend(bytes(driver.disk.content(name)[-500:-30]))
    again = Driver(disk, driver.log)
    assert again.report.torn_bytes == 470
    (warning,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert "470 bytes of unfinished records are cut off" in warning.message
    assert len(disk.content(name)) == size
    again.do(key(1))
    again.journal.close()
    reopened(disk, again.log)
    assert recover(disk.after(), FOLDER).report.torn_bytes == 0


def test_no_never_syncs_but_at_the_end() -> None:
    driver = Driver(MemoryDisk(), policy="no")
    driver.disk.trace.clear()
    driver.do(*story())
    assert "sync" not in driver.disk.trace
    driver.journal.close()
    assert recover(driver.disk.after(random.Random(1)), FOLDER).last == len(driver.log)


def test_large_payloads_reach_the_disk_by_reference() -> None:
    class Watching(MemoryDisk):
        written: list[Buffer]

        def writev(self, fd: int, buffers: Sequence[Buffer]) -> int:
            self.written = [*getattr(self, "written", []), *buffers]
            return super().writev(fd, buffers)

    disk = Watching()
    driver = Driver(disk)
    rows = m.StoreRows((block(b"a_pk", 0, 0, 50_000, 8, 1), block(b"a_pv", 0, 0, 50_000, 8, 2)))
    value = memoryview(np.arange(1 << 17, dtype=np.uint8).data)
    driver.do(register(b"a"), rows, m.SetKey(0, b"large", value))
    for payload in (rows.blocks[0].data, rows.blocks[1].data, value):
        same = [each for each in disk.written if np.shares_memory(np.asarray(each), payload)]
        assert sum(map(len, same)) == len(payload)
    driver.journal.close()
    reopened(disk, driver.log)


@pytest.mark.parametrize("step", [1, 7, 100])
def test_a_disk_that_takes_a_little_at_a_time_gets_everything(step: int) -> None:
    disk = MemoryDisk()
    disk.largest_write = step
    driver = Driver(disk)
    driver.do(*story())
    driver.journal.close()
    reopened(disk, driver.log)


# -- a full disk -----------------------------------------------------------------------------


def fill(driver: Driver) -> None:
    for i in range(1000):
        driver.send(key(i, size=30))
        until(lambda: driver.acknowledged == len(driver.log) or driver.journal.refusal())


def full(policy: Policy = "always") -> Driver:
    """A driver whose disk has just become full."""
    driver = Driver(MemoryDisk(), policy=policy)
    driver.disk.room = 4000
    with pytest.raises(Misconf, match=r"reads go on: the log cannot be written \(No space left"):
        fill(driver)
    return driver


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_disk_refuses_writes_until_there_is_room(policy: Policy) -> None:
    driver = full(policy)
    waiting = len(driver.log)
    assert driver.acknowledged < waiting
    assert not driver.journal.is_final()
    assert driver.journal.backlog_bytes > 0
    driver.disk.room = None
    driver.settle()
    assert driver.acknowledged == waiting
    assert driver.journal.refusal() is None
    assert driver.journal.backlog_bytes == 0
    driver.do(key(9999))
    driver.journal.close()
    reopened(driver.disk, driver.log)


def test_half_a_record_is_cut_off_a_full_disk_again() -> None:
    driver = full()
    found = recover(driver.disk.after(), FOLDER)
    assert found.last == driver.acknowledged
    assert found.report.torn_bytes == 0
    driver.disk.room = None
    driver.settle()
    driver.journal.close()


def test_half_a_record_that_cannot_be_cut_off_at_once_is_cut_off_before_the_next() -> None:
    driver = Driver(MemoryDisk())
    driver.do(key(0))
    gate = Gate(driver.disk, "truncate", errno.EIO)
    driver.disk.room = driver.disk._used() + 20
    driver.send(key(1))
    assert gate.reached.wait(20)
    found = recover(driver.disk.after(), FOLDER)
    assert (found.last, found.report.torn_bytes) == (1, 20)
    driver.disk.room = None
    time.sleep(0.01)
    assert driver.acknowledged == 1
    gate.opened.set()
    driver.settle()
    driver.do(key(2))
    driver.journal.close()
    reopened(driver.disk, driver.log)


def test_closing_on_a_full_disk_says_that_something_is_missing() -> None:
    driver = full()
    acknowledged = driver.acknowledged
    with pytest.raises(Misconf, match="No space left"):
        driver.journal.close()
    reopened(driver.disk, driver.log[:acknowledged])


# -- a disk that breaks ----------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["always", "everysec"])
def test_an_error_of_a_sync_is_for_good(policy: Policy) -> None:
    driver = Driver(MemoryDisk(), policy=policy)
    driver.do(*story()[:4])
    gate = Gate(driver.disk, "sync", errno.EIO)
    driver.send(key(0))
    until(driver.journal.is_final)
    gate.opened.set()  # the disk seems well again
    with pytest.raises(Misconf, match=r"could not be synced \(as the test says\)"):
        driver.send(key(1))
    acknowledged = driver.acknowledged
    assert acknowledged <= 5
    if policy == "always":
        assert acknowledged == 4
    driver.store.apply(key(2))
    driver.journal.append(key(2))  # what cannot be refused is dropped, not hoarded
    time.sleep(0.01)
    assert driver.journal.backlog_bytes == 0
    assert driver.acknowledged == acknowledged
    with pytest.raises(Misconf):
        driver.journal.save()
    with pytest.raises(Misconf):
        driver.journal.close()
    assert "truncate" not in driver.disk.trace
    reopened(driver.disk, driver.log)


def test_a_defect_of_the_thread_refuses_writes_instead_of_hanging_them() -> None:
    driver = Driver(MemoryDisk())
    driver.do(key(0))
    driver.journal.append("not a mutation")  # type: ignore[arg-type]
    until(driver.journal.is_final)
    assert "defect of the server" in str(driver.journal.refusal())
    with pytest.raises(Misconf):
        driver.journal.close()
    reopened(driver.disk, driver.log)


# -- files that are taken away ---------------------------------------------------------------


def test_a_removed_segment_is_noticed_and_a_snapshot_makes_up_for_it() -> None:
    driver = Driver(MemoryDisk())
    driver.do(*story())
    (name,) = driver.disk.segments()
    del driver.disk.files[FOLDER / name]
    assert not driver.journal.compact_due()
    driver.send(key(0))
    until(driver.journal.refusal)
    with pytest.raises(Misconf, match="a file of the log was removed"):
        driver.send(key(1))
    assert driver.acknowledged == len(driver.log) - 1
    assert driver.journal.compact_due()
    driver.save()
    assert driver.journal.refusal() is None
    assert driver.acknowledged == len(driver.log)
    driver.do(key(2))
    reopened(driver.disk, driver.log)
    driver.journal.close()


def test_a_segment_removed_while_its_snapshot_is_taken_is_not_forgotten() -> None:
    driver = Driver(MemoryDisk())
    driver.do(*story())
    gate = Gate(driver.disk, "rename")
    saved = driver.journal.save()
    assert gate.reached.wait(20)
    driver.do(key(0))
    del driver.disk.files[FOLDER / driver.disk.segments()[-1]]
    driver.send(key(1))
    until(driver.journal.refusal)
    gate.opened.set()
    saved.result(20)
    assert driver.journal.refusal() is not None
    assert driver.acknowledged == len(driver.log) - 1
    driver.save()
    assert driver.journal.refusal() is None
    assert driver.acknowledged == len(driver.log)
    reopened(driver.disk, driver.log)
    driver.journal.close()


def test_a_folder_that_comes_back_is_used_again() -> None:
    driver = Driver(MemoryDisk())
    driver.do(*story())
    gate = Gate(driver.disk, "create", errno.ENOENT)
    driver.disk.files.clear()
    driver.send(key(0))
    until(driver.journal.refusal)
    gate.opened.set()
    until(driver.journal.compact_due)
    driver.save()
    driver.settle()
    driver.do(key(1))
    reopened(driver.disk, driver.log)
    driver.journal.close()


def test_the_caller_is_told_of_every_change() -> None:
    driver = full()
    told: list[tuple[int, bool]] = []
    driver.journal.watch(
        lambda: told.append((driver.acknowledged, driver.journal.refusal() is None))
    )
    driver.disk.room = None
    until(lambda: driver.acknowledged == len(driver.log))
    driver.journal.close()
    assert told[-1] == (len(driver.log), True)
