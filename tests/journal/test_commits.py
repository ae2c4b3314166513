"""Invariant: a reply leaves when its record is as safe as the policy says, in order, and never
before; where that will never be, every waiting reply says so instead of hanging.
"""

from __future__ import annotations

import errno

import pytest
from driver import Driver, key, until
from memory_disk import Gate, MemoryDisk

from pion_server.errors import Misconf
from pion_server.journal.commits import Commits


def test_replies_leave_in_order_once_their_records_are_safe() -> None:
    driver = Driver(MemoryDisk())
    commits, left = Commits(driver.journal), []
    gate = Gate(driver.disk, "sync")
    for number in range(1, 6):
        driver.send(key(number))
        commits.wait(number, lambda lost, number=number: left.append((number, lost)))
    assert gate.reached.wait(20)
    commits.advance()
    assert left == []
    gate.opened.set()
    driver.settle()
    assert left == []  # it is the event loop that lets go of them
    commits.advance()
    assert left == [(number, None) for number in range(1, 6)]
    commits.wait(5, lambda lost: left.append((5, lost)))  # safe already
    assert left[-1] == (5, None)
    assert len(left) == 6
    driver.journal.close()


def test_where_nothing_is_written_any_more_nobody_waits() -> None:
    driver = Driver(MemoryDisk())
    driver.do(key(0))
    commits, left = Commits(driver.journal), []
    Gate(driver.disk, "sync", errno.EIO)
    for number in (2, 3):
        driver.send(key(number))
        commits.wait(number, left.append)
    until(driver.journal.is_final)
    commits.advance()
    assert [type(lost) for lost in left] == [Misconf, Misconf]
    commits.wait(4, left.append)
    assert len(left) == 3
    with pytest.raises(Misconf):
        driver.journal.close()
