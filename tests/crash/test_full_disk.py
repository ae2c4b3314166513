"""Invariant: a disk that is really full costs nothing that was acknowledged, and writes go on by
themselves as soon as there is room.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from driver import Driver, state_after, state_of, until

from pion_server.errors import Misconf, PionError
from pion_server.journal.disk import Disk
from pion_server.store import mutations as m

VALUE = 100_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(tmp_path)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def key(i: int) -> m.SetKey:
    return m.SetKey(0, b"key %d" % i, os.urandom(VALUE))


def fill(driver: Driver) -> None:
    for i in range(1000):
        driver.send(key(i))
        until(lambda: driver.acknowledged == len(driver.log) or driver.journal.refusal())


def test_a_full_disk_refuses_and_then_goes_on_by_itself(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(1 << 20))
    driver = Driver(Disk(), folder=small_disk / "data")
    with pytest.raises(Misconf, match="No space left on device"):
        fill(driver)
    waiting = len(driver.log)
    assert driver.acknowledged == waiting - 1
    entry = driver.store.key(0, b"key 3", 0)
    assert entry is not None
    assert entry.value == driver.log[3].value  # type: ignore[union-attr]
    with pytest.raises(PionError):
        driver.save()
    (small_disk / "filler").unlink()
    driver.settle()
    assert driver.acknowledged == waiting
    assert driver.journal.refusal() is None
    driver.do(key(5000))
    driver.journal.close()
    again = Driver(Disk(), driver.log, folder=small_disk / "data")
    assert again.report.damage == []
    assert state_of(again.store) == state_after(driver.log)
    again.journal.close()


def test_a_snapshot_that_does_not_fit_leaves_log_and_disk_as_they_were(small_disk: Path) -> None:
    driver = Driver(Disk(), folder=small_disk / "data")
    driver.do(*(key(i) for i in range(25)))
    before = sorted(path.name for path in (small_disk / "data").iterdir())
    with pytest.raises(PionError, match="the snapshot needs about"):
        driver.save()
    assert sorted(path.name for path in (small_disk / "data").iterdir()) == before
    driver.do(m.FlushDb(0), key(1))
    driver.save()
    assert driver.journal.wal_bytes == 0
    driver.do(*(key(i) for i in range(20)))
    driver.journal.close()
    again = Driver(Disk(), driver.log, folder=small_disk / "data")
    assert state_of(again.store) == state_after(driver.log)
    again.journal.close()


def test_whoever_starts_on_a_full_disk_can_still_read(small_disk: Path) -> None:
    driver = Driver(Disk(), folder=small_disk / "data")
    driver.do(*(key(i) for i in range(20)))
    driver.journal.close()
    room = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    (small_disk / "filler").write_bytes(bytes(room))
    again = Driver(Disk(), driver.log, folder=small_disk / "data")
    assert state_of(again.store) == state_after(driver.log)
    again.send(key(77))
    until(again.journal.refusal)
    (small_disk / "filler").unlink()
    again.settle()
    assert again.acknowledged == len(again.log)
    again.journal.close()
