"""Invariant: a Unix socket is a way in for its owner's processes alone; one that a dead server left
is replaced, and nothing else in its place is touched.
"""

from __future__ import annotations

import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pion_server.client import Call, Client, ConnectionFailed
from pion_server.client.calls.base import text
from pion_server.config import Config
from pion_server.errors import NoAuth

SECONDS = 20.0
CLIENT_LIST = Call(("CLIENT", "LIST"), text)


@pytest.fixture
def path() -> Iterator[Path]:
    """Short enough for a socket, which pytest's are not everywhere."""
    with tempfile.TemporaryDirectory(prefix="pion-") as folder:
        yield Path(folder) / "socket"


def refusal(path: Path) -> str:
    command = [sys.executable, "-m", "pion_server", "--port", "0", "--unixsocket", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ended.returncode == 1
    return ended.stderr


def test_it_is_its_owners_alone_and_gone_with_the_server(start_pion: Any, path: Path) -> None:
    server = start_pion("--unixsocket", str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with Client(f"pion+unix://{path}") as client:
        client.set("k", bytes(3_000_000))
        assert len(client.get("k")) == 3_000_000
        (only,) = client.pion_workers()
        assert only.unixsocket == str(path)
        assert f"addr={path}:0 laddr={path}:0 " in client.execute(CLIENT_LIST)
    server.stop()
    assert not path.exists()
    with Client(f"pion+unix://{path}") as client, pytest.raises(ConnectionFailed, match=str(path)):
        client.ping()


def test_the_password_holds_there_too(start_pion: Any, path: Path) -> None:
    start_pion("--unixsocket", str(path), "--requirepass", "s3cret", "--host", "0.0.0.0")
    with Client(f"pion+unix://{path}") as client, pytest.raises(NoAuth):
        client.ping()
    with Client(f"pion+unix://:s3cret@{path}") as client:
        assert client.ping() == "PONG"
        assert client.pion_workers()[0].host == "127.0.0.1"


def test_clients_are_told_an_absolute_path() -> None:
    assert Config(unixsocket=Path("here")).unixsocket == Path.cwd() / "here"


def test_what_a_killed_server_left_is_replaced(start_pion: Any, path: Path) -> None:
    start_pion("--unixsocket", str(path)).kill()
    assert path.is_socket()
    start_pion("--unixsocket", str(path))
    with Client(f"pion+unix://{path}") as client:
        assert client.ping() == "PONG"


def test_a_path_that_is_in_use_is_refused(start_pion: Any, path: Path) -> None:
    start_pion("--unixsocket", str(path))
    assert f"cannot listen on {path}: Address already in use" in refusal(path)
    with Client(f"pion+unix://{path}") as client:
        assert client.ping() == "PONG"


def test_other_files_are_left_alone(path: Path) -> None:
    path.write_text("precious")
    assert f"cannot listen on {path}: Address already in use" in refusal(path)
    assert path.read_text() == "precious"
    missing = path / "no" / "folder"
    assert f"cannot listen on {missing}: " in refusal(missing)
    assert "cannot listen on /" in refusal(Path("/tmp") / ("x" * 200))


def test_redis_clients_too(start_pion: Any, path: Path) -> None:
    start_pion("--unixsocket", str(path))
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(path))
        raw.sendall(b"PING\r\n")
        assert raw.recv(100) == b"+PONG\r\n"
