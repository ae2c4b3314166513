"""Invariant: on a real file system the journal keeps to its folder, alone, and readable by nobody
else; and writes get through in whatever portions the kernel takes them.
"""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
from driver import Driver, state_after, state_of
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_disk import MemoryDisk
from stories import story

from pion_server.errors import PionError
from pion_server.journal import disk as disk_module
from pion_server.journal import segment as segment_module
from pion_server.journal.disk import SMALL, Buffer, Disk, write_all
from pion_server.journal.journal import Journal
from pion_server.journal.segment import RELEASED_FROM, RESERVED_FROM, Segment

HOLD = """
import sys
from pathlib import Path
from pion_server.journal.journal import Journal
journal, _, _ = Journal.open(Path(sys.argv[1]), "no")
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("policy", ["always", "everysec", "no"])
def test_a_real_folder_gives_everything_back(tmp_path: Path, policy: str) -> None:
    log = story()
    for stop in (10, len(log)):
        driver = Driver(Disk(), log, policy, tmp_path / "data")  # type: ignore[arg-type]
        driver.do(*log[len(driver.log) : stop])
        if stop == 10:
            driver.save("copy")
        driver.journal.close()
    last = Driver(Disk(), log, "no", tmp_path / "data")
    assert state_of(last.store) == state_after(log)
    assert last.report.damage == []
    last.journal.close()
    # No folder or file that is not the journal's: nothing is forgotten there.
    names = {path.name.split(".")[0] for path in (tmp_path / "data").iterdir()}
    assert names == {"lock", "snapshot", "copy", "wal"}


def test_nobody_else_may_read_what_is_written(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        driver = Driver(Disk(), folder=tmp_path / "new" / "data")
        driver.do(*story())
        driver.save("copy")
        driver.do(*story()[:1])
        driver.journal.close()
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").rglob("*")}
    assert modes.pop("data") == 0o700
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert len(modes) == 4
    assert set(modes.values()) == {0o600}


def test_a_folder_is_used_by_one_server_at_a_time(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    with pytest.raises(PionError, match="is in use by another server"):
        Journal.open(tmp_path, "no")
    child.kill()
    child.communicate()
    journal, _, _ = Journal.open(tmp_path, "no")
    with pytest.raises(PionError, match="is in use by another server"):
        Journal.open(tmp_path, "no")
    journal.close()
    Journal.open(tmp_path, "no")[0].close()


def test_a_path_that_is_no_folder_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PionError, match="cannot be used: "):
        Journal.open(tmp_path / "file", "no")
    with pytest.raises(PionError, match="cannot be used: Not a directory"):
        Journal.open(tmp_path / "file" / "data", "no")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without permission")
@pytest.mark.parametrize("what", ["folder", "wal", "snapshot"])
def test_a_folder_without_permission_is_refused_in_words_and_left_alone(
    tmp_path: Path, what: str
) -> None:
    folder = tmp_path / "data"
    driver = Driver(Disk(), folder=folder)
    driver.do(*story()[:9])
    driver.save()
    driver.do(*story()[9:])
    driver.journal.close()
    for path in tmp_path.parents:
        if path.stat().st_uid == 0 and path.name.startswith("pytest"):
            path.chmod(0o755)
    tmp_path.chmod(0o777)
    if what != "folder":  # the folder is nobody's own, but for one file
        for path in (folder, *folder.iterdir()):
            if not path.name.startswith(what):
                os.chown(path, 65534, 65534)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgid(65534)
        os.setuid(65534)
        try:
            Journal.open(folder, "no")
            words = "opened"
        except BaseException as error:
            words = f"{type(error).__name__}: {error}"
        os.write(write, words.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    words = os.read(read, 10_000).decode()
    os.close(read)
    assert words.startswith("PionError: the data folder"), words
    assert "cannot be used: Permission denied" in words
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name: after[name] for name in before} == before
    for path in (folder, *folder.iterdir()):
        os.chown(path, 0, 0)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 255)), max_size=20),
    st.none() | st.integers(1, 50),
    st.integers(1, 3),
    st.integers(1, 99),
)
@settings(deadline=None)
def test_every_byte_is_written_once_and_in_order(
    parts: list[tuple[int, int]], step: int | None, most_buffers: int, most_bytes: int
) -> None:
    class Picky(MemoryDisk):
        def writev(self, fd: int, buffers: Sequence[Buffer]) -> int:
            assert 0 < len(buffers) <= most_buffers
            assert sum(map(len, buffers)) <= most_bytes
            return super().writev(fd, buffers)

    disk = Picky()
    disk.largest_write = step
    fd = disk.create(Path("/f"))
    buffers = [memoryview(bytes([fill]) * size) for size, fill in parts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_module, "SMALL", 10)
        patch.setattr(disk_module, "MAX_BUFFERS", most_buffers)
        patch.setattr(disk_module, "MAX_BYTES", most_bytes)
        assert write_all(disk, fd, buffers) == sum(map(len, buffers))
    assert disk.content("f") == b"".join(buffers)


def test_what_is_to_outlive_a_power_cut_is_given_to_the_disk_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a power cut nothing else would tell."""
    asked: list[tuple[str, int]] = []

    def note(name: str, fd: int) -> None:
        asked.append((name, os.fstat(fd).st_ino))

    monkeypatch.setattr(disk_module.sys, "platform", "linux")
    for name in ("fdatasync", "fsync"):
        monkeypatch.setattr(os, name, partial(note, name), raising=False)
    disk = Disk()
    fd = disk.create(tmp_path / "f")
    disk.sync(fd)
    disk.close(fd)
    disk.sync_folder(tmp_path)
    assert asked == [
        ("fdatasync", (tmp_path / "f").stat().st_ino),
        ("fsync", tmp_path.stat().st_ino),
    ]


def test_macos_is_asked_to_empty_the_drives_cache_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fsync leaves the bytes there, to be lost in a power cut."""
    asked: list[int] = []
    monkeypatch.setattr(disk_module.sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda fd, command: asked.append(command))
    disk = Disk()
    fd = disk.create(tmp_path / "f")
    disk.sync(fd)
    disk.release(fd, 0, 1)  # nothing there
    disk.reserve(fd, 0, 1)
    disk.close(fd)
    assert asked == [51]


def test_what_is_appended_is_released_once_and_again_when_enough_came_behind_it(
    tmp_path: Path,
) -> None:
    class Counting(Disk):
        def __init__(self) -> None:
            self.released: list[tuple[int, int]] = []

        def release(self, fd: int, start: int, end: int) -> None:
            super().release(fd, start, end)
            self.released.append((start, end))

    disk = Counting()
    segment = Segment(disk, tmp_path, 1, promises=False)
    behind = 3 * RELEASED_FROM
    ends = [0]
    with patch.object(segment_module, "RELEASED_BEHIND", behind):
        for nbytes in (100, 2 * RELEASED_FROM, 50, 2 * RELEASED_FROM, 4 * RELEASED_FROM):
            segment.append([os.urandom(nbytes)])
            segment.release()
            if nbytes > 100:
                ends.append(segment.size)
    first, second = ends[1:3]
    assert disk.released == [
        (0, first),
        (first, second),
        (0, second - behind),
        (second, ends[3]),
        (second - behind, ends[3] - behind),
    ]
    segment.close()


def test_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    buffers = [bytes([i % 256]) * (SMALL + 1) for i in range(disk_module.MAX_BUFFERS + 10)]
    disk = Disk()
    fd = disk.create(tmp_path / "f")
    assert write_all(disk, fd, buffers) == sum(map(len, buffers))
    disk.close(fd)
    assert (tmp_path / "f").read_bytes() == b"".join(buffers)


def test_creating_a_file_never_empties_one_that_has_another_name(tmp_path: Path) -> None:
    disk = Disk()
    (tmp_path / "one").write_bytes(b"kept")
    disk.link(tmp_path / "one", tmp_path / "two")
    disk.close(disk.create(tmp_path / "two"))
    assert (tmp_path / "one").read_bytes() == b"kept"
    assert (tmp_path / "two").read_bytes() == b""


@pytest.mark.parametrize("kernel", ["can", "cannot", "has no such call"])
def test_room_that_is_reserved_is_behind_the_end_and_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    """It is no part of the log, and of no use once nothing more is written."""
    asked: list[tuple[int, ...]] = []

    def reserve(*arguments: int) -> int:
        asked.append(arguments)
        return -1 if kernel == "cannot" or found is None else found(*arguments)

    found = disk_module._fallocate
    monkeypatch.setattr(disk_module, "_fallocate", None if kernel[0] == "h" else reserve)
    segment = Segment(Disk(), tmp_path, 1, promises=False)
    parts = [os.urandom(nbytes) for nbytes in (100, 2 * RESERVED_FROM, 100, 3 * RESERVED_FROM, 7)]
    header = segment.path.read_bytes()
    for number in range(len(parts)):
        segment.append([parts[number]])
        assert segment.path.read_bytes() == header + b"".join(parts[: number + 1])
    segment.sync()
    segment.close()
    assert len(asked) == (0 if kernel[0] == "h" else 2)  # for the large ones
    assert segment.path.read_bytes() == header + b"".join(parts)
    assert segment.path.stat().st_blocks * 512 < segment.size + 64 * 1024
