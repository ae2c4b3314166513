"""Invariant: what a real server has said +OK to is there after its end, whatever ended it; what it
cannot keep it refuses in words, and what was damaged it does not serve.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion_server.client import Call, Client
from pion_server.errors import DeadlineExceeded, Misconf, OutOfMemory, PionError

MB = 1 << 20
LAYOUT = [("fp16", 64), ("fp32", 32)]
ROWS = 40


def save(*path: str) -> Call[Any]:
    return Call(["KV.PREFIX.SAVE", *path], lambda reply: reply)


def rows(seed: int, layout: tuple[str, int]) -> bytes:
    """Any bytes of ROWS rows."""
    codec, dim = layout
    width = {"fp16": 2, "fp32": 4}[codec] * dim
    return np.random.default_rng(seed).bytes(ROWS * width)


def store_prefix(client: Client, name: str, seed: int, **options: Any) -> None:
    client.prefix_register_schema(name, LAYOUT, LAYOUT, tokens=ROWS, **options)
    pairs = [(rows(seed, each), rows(seed + 1, each)) for each in LAYOUT]
    client.prefix_store(name, 0, ROWS, pairs, fmt="NATIVE")


def write(client: Client) -> None:
    """Something of every kind: made, changed, partly overwritten and dropped."""
    client.set("flushed", "x")
    client.flushdb()
    store_prefix(client, "kept", 1, fingerprint="aa")
    store_prefix(client, "child", 3, parent="kept")
    store_prefix(client, "dropped", 5)
    client.prefix_drop("dropped")
    client.v_create("session", 64, "fp16")
    client.v_storebatch("session", 0, 0, ROWS, rows(7, LAYOUT[0]), fmt="NATIVE")
    client.v_storebatch("session", 3, 5, ROWS, rows(8, LAYOUT[0]), fmt="NATIVE")
    client.v_storebatch("session", 0, 10, 1, bytes(128), fmt="NATIVE")
    client.ssm_store("kept", 0, b"state" * 9)
    client.ssm_store("alone", 2, os.urandom(2 * MB))
    client.ssm_store("alone", 3, b"gone")
    client.ssm_drop("alone", 3)
    client.mset({"key": "old", "other": b"x" * 100_000})
    client.set("key", "new")
    client.expire("other", 1_000_000)
    client.set("deleted", "x")
    client.delete("deleted")


def read(client: Client) -> list[Any]:
    """All that can be read back."""
    found: list[Any] = [
        client.prefix_match(["kept", "child"]),
        client.prefix_lookup("dropped"),
        client.v_fetch("session", 0, 0, ROWS, fmt="NATIVE"),
        client.v_fetch("session", 3, 5, 5 + ROWS, fmt="NATIVE"),
        *(client.ssm_fetch(name, layer) for name in ("kept", "alone") for layer in (0, 2, 3)),
        client.mget("key", "other", "deleted", "flushed"),
        client.ttl("other") > 900_000,
        sorted(client.scan()[1]),
    ]
    for name in ("kept", "child"):
        prefix = client.prefix_fetch(name, fmt="NATIVE")
        assert prefix is not None
        found.append((prefix.tokens, prefix.rows))
    return [bytes(each) if isinstance(each, memoryview) else each for each in found]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


def started(start_pion: Callable[..., Any], folder: Path, *options: str) -> Any:
    return start_pion("--data-dir", str(folder), *options)


@pytest.mark.parametrize(
    ("policy", "end"), [("no", "kill"), ("everysec", "kill"), ("always", "stop")]
)
def test_everything_is_there_again(start_pion: Any, folder: Path, policy: str, end: str) -> None:
    options = ("--wal-fsync", policy)
    server = started(start_pion, folder, *options)
    with Client(server.url) as client:
        write(client)
        expected = read(client)
    for after_a_snapshot in (False, True):
        getattr(server, end)()
        server = started(start_pion, folder, *options)
        with Client(server.url) as client:
            assert read(client) == expected
            if not after_a_snapshot:
                client.execute(save())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(place)]
    mounted = subprocess.run(mount, capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def until(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up, "it never came about"
        time.sleep(0.05)


def fill(client: Client, values: dict[str, bytes]) -> list[str]:
    """Set keys until the disk is full; returns those that were acknowledged."""
    kept = []
    for name, value in values.items():
        try:
            client.execute(Call(["SET", name, value], lambda reply: reply), timeout=2)
        except (Misconf, DeadlineExceeded):  # one that was applied before goes on waiting
            return kept
        kept.append(name)
    pytest.fail("the disk was never full")


def test_a_full_disk(start_pion: Any, small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(4 * MB))
    server = started(start_pion, small_disk / "data")
    values = {f"key-{i}": os.urandom(300_000) for i in range(40)}
    with Client(server.url) as client, Client(server.url, timeout=2) as other:
        store_prefix(client, "kept", 1)
        kept = fill(client, values)
        for refused in (
            lambda: other.set("key", "x"),
            lambda: other.prefix_drop("kept"),
            lambda: other.ssm_store("kept", 0, b"x"),
            lambda: other.v_create("s", 8),
            lambda: other.execute(save()),
        ):
            with pytest.raises(Misconf, match="writes are refused, reads go on"):
                refused()
        assert other.prefix_match(["kept"]) == 1
        assert all(other.get(name) == values[name] for name in kept)
        (small_disk / "filler").unlink()
        until(lambda: _takes(other))
        assert other.get("afterwards") == b"x"
    server.kill()
    server = started(start_pion, small_disk / "data")
    with Client(server.url) as client:
        assert client.prefix_match(["kept"]) == 1
        assert all(client.get(name) == values[name] for name in kept)
        assert client.get("afterwards") == b"x"


def _takes(client: Client) -> bool:
    with suppress(Misconf):
        client.set("afterwards", "x")
        return True
    return False


def test_the_log_is_compacted_by_itself(start_pion: Any, folder: Path) -> None:
    server = started(start_pion, folder, "--wal-fsync", "no")
    with Client(server.url) as client:
        for number in range(16):
            client.set("large", bytes([number]) * (8 * MB))
        until(lambda: client.prefix_info()["wal_bytes"] < 64 * MB)
        client.set("small", "x")
        assert (folder / "default" / "snapshot").exists()
    server.kill()
    with Client(started(start_pion, folder).url) as client:
        assert client.get("large") == bytes([15]) * (8 * MB)
        assert client.get("small") == b"x"


def test_budgets_hold_from_the_start(start_pion: Any, folder: Path) -> None:
    server = started(start_pion, folder)
    with Client(server.url) as client:
        for number in range(20):
            store_prefix(client, f"prefix-{number}", number)
            client.set(f"key-{number}", bytes(30_000))
    server.stop()
    server = started(start_pion, folder, "--max-memory", "300000", "--max-sessions", "6")
    with Client(server.url) as client:
        info = client.info("memory")
        assert 0 < int(info["used_memory"]) <= 300_000
        there = [i for i in range(20) if client.prefix_match([f"prefix-{i}"])]
        assert there == [17, 18, 19]
        for i in there:
            assert client.prefix_fetch(f"prefix-{i}", fmt="NATIVE") is not None
        keys = [i for i in range(20) if client.exists(f"key-{i}")]
        assert keys == list(range(keys[0], 20))
        with pytest.raises(OutOfMemory):
            client.set("large", bytes(300_001))
    server.kill()
    with Client(started(start_pion, folder).url) as client:  # what went stays away
        assert [i for i in range(20) if client.prefix_match([f"prefix-{i}"])] == there


def test_what_was_evicted_stays_away(start_pion: Any, folder: Path) -> None:
    def found(client: Client) -> list[Any]:
        info = client.prefix_info()
        fields = ("registered_prefixes", "vstore_sessions", "ssm_states")
        return [*(info[field] for field in fields), client.exists("key"), client.exists("large")]

    server = started(start_pion, folder, "--max-memory", "1mb")
    with Client(server.url) as client:
        store_prefix(client, "prefix", 1)
        client.ssm_store("state", 0, b"state")
        client.v_create("session", 64)
        client.set("key", "x")
        assert found(client) == [1, 3, 1, 1, 0]
        client.set("large", bytes(998_500))  # beside which not even a key has room
        assert found(client) == [0, 0, 0, 0, 1]
    server.kill()
    with Client(started(start_pion, folder).url) as client:
        assert found(client) == [0, 0, 0, 0, 1]


def test_a_snapshot_of_a_name_starts_another_server(
    start_pion: Any, folder: Path, tmp_path: Path
) -> None:
    server = started(start_pion, folder)
    with Client(server.url) as client:
        write(client)
        expected = read(client)
        client.execute(save("nightly"))
        client.set("key", "changed afterwards")
        client.execute(save())
        for path in ("../out", "/tmp/out", "a/b", "snapshot", "wal.1", "lock", "", ".hidden"):
            with pytest.raises(PionError, match="the path must be a file name"):
                client.execute(save(path))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["data"]
    elsewhere = tmp_path / "elsewhere" / "default"
    elsewhere.mkdir(parents=True)
    shutil.copy(folder / "default" / "nightly", elsewhere / "snapshot")
    with Client(started(start_pion, tmp_path / "elsewhere").url) as client:
        assert read(client) == expected


def test_damage_is_told_and_not_served(start_pion: Any, folder: Path) -> None:
    server = started(start_pion, folder, "--wal-fsync", "always")
    with Client(server.url) as client:
        store_prefix(client, "damaged", 1)
        store_prefix(client, "whole", 3)
        client.set("key", "x")
    server.kill()
    (log,) = (folder / "default").glob("wal.*")
    data = bytearray(log.read_bytes())
    at = data.index(rows(1, LAYOUT[0]))
    data[at + 1000] ^= 1
    log.write_bytes(data)
    server = started(start_pion, folder)
    assert "what it is about is lost; kept as" in server.log.read_text()
    assert len(list((folder / "default" / "quarantine").iterdir())) >= 1
    with Client(server.url) as client:
        assert client.prefix_match(["damaged"]) == 0
        assert client.prefix_fetch("damaged") is None
        assert client.prefix_match(["whole"]) == 1
        assert client.get("key") == b"x"
        store_prefix(client, "damaged", 1)
        assert client.prefix_match(["damaged"]) == 1


def refusal(folder: Path) -> str:
    """What a server says that cannot start there."""
    command = [sys.executable, "-m", "pion_server", "--port", "0", "--data-dir", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    return ended.stderr.splitlines()[-1]


def test_a_folder_that_cannot_be_used(start_pion: Any, folder: Path) -> None:
    server = started(start_pion, folder)
    with Client(server.url) as client:
        client.set("key", "x")
    assert "is in use by another server" in refusal(folder)
    server.stop()
    (log,) = (folder / "default").glob("wal.*")
    before = log.read_bytes()
    assert "cannot be used: Not a directory" in refusal(log)
    for path in (folder, folder / "default"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in (folder / "default").iterdir()} == {0o600}
    assert log.read_bytes() == before


def test_without_a_folder_nothing_is_written(
    start_pion: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server = start_pion()
    with Client(server.url) as client:
        write(client)
        with pytest.raises(PionError, match="nothing is kept on disk"):
            client.execute(save())
        assert client.prefix_info()["wal_bytes"] == 0
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0
    assert [path.name for path in tmp_path.iterdir()] == [server.log.name]
