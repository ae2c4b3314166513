"""Invariant: whichever disk operation fails, or is the last one, nothing acknowledged is lost.

One run with every kind of mutation and two SAVEs in it; then again and again, with the first
operation failing, the second, and so on until a run is clean. The same for dying at it, for power
cuts, and for the recovery that follows.
"""

from __future__ import annotations

import errno
import random
from contextlib import suppress

import pytest
from driver import FOLDER, Driver, state_after, state_of
from memory_disk import Fault, MemoryDisk
from stories import story

from pion_server.errors import Misconf, PionError
from pion_server.journal.journal import Journal
from pion_server.journal.recovery import recover

# A thread of the journal that meets a disk which has stopped is gone, as in a dead process.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

STORY = story()
SAVES = {8: None, 16: "copy"}


def run(disk: MemoryDisk, policy: str = "always") -> Driver | None:
    """The whole story on a disk that may fail. A write that is refused is tried again by its
    client, like a SAVE. None where the journal could not be opened."""
    try:
        driver = Driver(disk, policy=policy)  # type: ignore[arg-type]
    except PionError:
        return None
    for i, mutation in enumerate(STORY):
        if i in SAVES:
            save_twice(driver, SAVES[i])
        while not driver.journal.is_final() and not disk.stopped:
            try:
                driver.do(mutation)
            except Misconf:
                continue
            break
    return driver


def save_twice(driver: Driver, name: str | None) -> None:
    for _ in range(2):
        try:
            driver.save(name)
        except PionError:
            continue
        except SystemExit:
            pass
        return


def clean_trace(policy: str = "always") -> list[str]:
    driver = run(MemoryDisk(), policy)
    assert driver is not None
    driver.journal.close()
    assert driver.acknowledged == len(STORY)
    return list(driver.disk.trace)  # type: ignore[attr-defined]


def end(driver: Driver) -> None:
    """Let go of a journal whose disk may be dead."""
    with suppress(Misconf, SystemExit):
        driver.journal.close()


def check(disk: MemoryDisk, log: list[object], acknowledged: int, context: object) -> None:
    found = recover(disk, FOLDER)
    assert found.last >= acknowledged, context
    assert state_of(found.store) == state_after(log[: found.last]), context  # type: ignore[arg-type]
    assert found.report.damage == [], context


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_any_operation_may_fail_once(code: int) -> None:
    at = 0
    failed = True
    while failed:
        at += 1
        disk = MemoryDisk()
        disk.fault = Fault(at, code)
        driver = run(disk)
        failed = len(disk.trace) >= at
        if driver is None:
            driver = run(disk)  # whoever starts it tries again
            assert driver is not None
        what = disk.trace[at - 1] if failed else "nothing"
        assert state_of(driver.store) == state_after(driver.log), (at, what)
        if driver.journal.is_final():
            assert what == "sync"
            assert "could not be synced" in str(driver.journal.refusal())
        else:
            assert driver.log == STORY, (at, what)
            assert driver.acknowledged == len(STORY), (at, what)
        acknowledged = driver.acknowledged
        end(driver)
        check(disk.after(), driver.log, acknowledged, (at, what))
    assert at > 100


@pytest.mark.parametrize("policy", ["always", "no"])
def test_the_process_may_die_at_any_operation(policy: str) -> None:
    total = len(clean_trace(policy))
    for at in range(1, total + 1):
        disk = MemoryDisk()
        disk.fault = Fault(at)
        try:
            driver = run(disk, policy)
        except SystemExit:  # while opening
            driver = None
        log, acknowledged = (driver.log, driver.acknowledged) if driver else ([], 0)
        if driver is not None:
            end(driver)
        check(disk.after(), log, acknowledged, (at, disk.trace[-1]))


class TwoFaults(MemoryDisk):
    """Fails at one operation and stops at a later one."""

    def __init__(self, fails_at: int, code: int, stops_at: int) -> None:
        super().__init__()
        self.fault = Fault(fails_at, code)
        self.gate = lambda _: self._next(fails_at, stops_at)

    def _next(self, fails_at: int, stops_at: int) -> None:
        if len(self.trace) >= fails_at:
            self.fault = Fault(stops_at)


def fail_then_die(fails_at: int, code: int, stops_at: int) -> None:
    disk = TwoFaults(fails_at, code, stops_at)
    try:
        driver = run(disk)
    except SystemExit:
        driver = None
    log, acknowledged = (driver.log, driver.acknowledged) if driver else ([], 0)
    if driver is not None:
        end(driver)
    check(disk.after(), log, acknowledged, (fails_at, stops_at, disk.trace[-1]))


LONG = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("runs", [100, pytest.param(5000, marks=LONG)])
def test_an_operation_may_fail_and_the_process_die_later(runs: int) -> None:
    dice = random.Random(runs)
    total = len(clean_trace())
    for _ in range(runs):
        first, last = sorted(dice.sample(range(1, total + 10), 2))
        fail_then_die(first, dice.choice([errno.EIO, errno.ENOSPC]), last)


def test_the_power_may_be_cut_at_any_operation() -> None:
    total = len(clean_trace())
    for at in range(1, total + 1):
        disk = MemoryDisk()
        disk.fault = Fault(at)
        try:
            driver = run(disk)
        except SystemExit:
            continue
        assert driver is not None
        log, acknowledged = driver.log, driver.acknowledged
        end(driver)
        for seed in range(3):
            found = recover(disk.after(random.Random(seed)), FOLDER)
            # Unsynced pages may leave damage, but never in what was acknowledged.
            assert found.last >= acknowledged, (at, seed)
            state = state_of(found.store)
            whole = state_after(log[: found.last])
            assert state == whole or found.report.damage, (at, seed)
            assert all(
                whole["units"].get(unit) == value for unit, value in state["units"].items()
            ), (at, seed)


def test_recovery_may_be_cut_short_at_any_operation() -> None:
    """Two crashes in a row: the second while the first is being recovered from."""
    first = MemoryDisk()
    first.fault = Fault(len(clean_trace()) - 30)
    driver = run(first)
    assert driver is not None
    log, acknowledged = driver.log, driver.acknowledged
    end(driver)
    at, again = 0, True
    while again:
        at += 1
        disk = first.after()
        disk.fault = Fault(at)
        with suppress(SystemExit):
            Journal.open(FOLDER, "always", disk)[0].close()
        again = len(disk.trace) >= at
        check(disk.after(), log, acknowledged, (at, disk.trace[-1]))
    assert at > 10


def damaged() -> tuple[MemoryDisk, list[str]]:
    """A log with a record that cannot be read, and the operations of recovering from it."""
    driver = run(MemoryDisk())
    assert driver is not None
    driver.journal.close()
    disk = driver.disk.after()  # type: ignore[attr-defined]
    name = disk.segments()[-1]
    at = disk.content(name).find(bytes(STORY[21].blocks[0].data))  # type: ignore[union-attr]
    disk.content(name)[at] ^= 1
    healed = disk.after()
    Driver(healed, STORY).journal.close()
    return disk, healed.trace


def test_healing_after_damage_may_be_cut_short_at_any_operation() -> None:
    disk, trace = damaged()
    whole = state_of(recover(disk.after(), FOLDER).store)
    assert whole != state_after(STORY)
    for at in range(1, len(trace) + 1):
        for fault in (Fault(at), Fault(at, errno.EIO)):
            broken = disk.after()
            broken.fault = fault
            with suppress(SystemExit, PionError):
                Journal.open(FOLDER, "always", broken)[0].close()
            driver = Driver(broken.after(), STORY)
            assert state_of(driver.store)["units"] == whole["units"], (fault, trace[at - 1])
            driver.journal.close()


def test_no_descriptor_is_left_open_whatever_fails() -> None:
    for at in range(1, len(clean_trace()) + 1):
        disk = MemoryDisk()
        disk.fault = Fault(at, errno.EIO)
        driver = run(disk)
        if driver is not None:
            end(driver)
        what = disk.trace[at - 1]
        assert not disk.open_files or what == "close", (at, what)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_process_may_die_twice_anywhere() -> None:
    total = len(clean_trace())
    for first_at in range(1, total + 1):
        first = MemoryDisk()
        first.fault = Fault(first_at)
        try:
            driver = run(first)
        except SystemExit:
            continue
        assert driver is not None
        log, acknowledged = driver.log, driver.acknowledged
        end(driver)
        at, again = 0, True
        while again:
            at += 1
            disk = first.after()
            disk.fault = Fault(at)
            with suppress(SystemExit):
                Journal.open(FOLDER, "always", disk)[0].close()
            again = len(disk.trace) >= at
            check(disk.after(), log, acknowledged, (first_at, at))
