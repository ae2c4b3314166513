"""Invariant: the server starts with a clear word or not at all, and ends when it is told to, with
status 0, whatever its clients are doing.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from pion_server.config import Config

PATIENCE = 20.0
BULK = b"x" * (32 << 20)


def run(*args: str) -> subprocess.CompletedProcess[str]:
    """A server that is expected to end by itself."""
    command = [sys.executable, "-m", "pion_server", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def last_line(ended: subprocess.CompletedProcess[str]) -> str:
    """What it said in the end; before may come a warning, where the machine allows few files."""
    return ended.stderr.splitlines()[-1]


def idle(wire: Any) -> None:
    """A client that has said what it wanted."""
    assert wire.ask("PING") == b"+PONG\r\n"


def uploading(wire: Any) -> None:
    """Half of a value is in."""
    wire.write(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % len(BULK) + BULK[: 1 << 20])


def not_reading(wire: Any) -> None:
    """A long reply is on its way, and nobody takes it."""
    assert wire.ask("SET", "k", BULK) == b"+OK\r\n"
    wire.write(wire.request("GET", "k") * 10)
    wire.expect(b"$")


def converting(wire: Any) -> None:
    """A write is being computed off the event loop."""
    wire.write(wire.request("V.CREATE", "s", 4096))
    wire.write(wire.request("V.STOREBATCH", "s", 0, 0, 2048, BULK))


CLIENTS: list[Callable[[Any], None]] = [idle, uploading, not_reading, converting]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_it_stops_when_told(start_pion: Any, dial: Any, signum: signal.Signals) -> None:
    server = start_pion()
    for act in CLIENTS:
        act(dial(server.port))
    server.process.send_signal(signum)
    assert server.process.wait(PATIENCE) == 0
    log = server.log.read_text()
    assert "pion-server stopped" in log
    assert "Traceback" not in log
    with pytest.raises(ConnectionRefusedError):
        dial(server.port)


def test_a_reply_that_is_being_read_comes_whole(start_pion: Any, dial: Any) -> None:
    server = start_pion()
    wire = dial(server.port)
    assert wire.ask("SET", "k", BULK) == b"+OK\r\n"
    wire.send("GET", "k")
    wire.expect(b"$%d\r\n" % len(BULK))
    server.process.terminate()
    assert wire.rest() == BULK + b"\r\n"
    assert server.process.wait(PATIENCE) == 0


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = run("--port", str(port))
    assert ended.returncode == 1
    said = last_line(ended)
    assert said.startswith(f"pion-server: cannot listen on 127.0.0.1:{port}: ")
    assert "in use" in said.lower()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.invalid"])
def test_an_open_door_is_refused(host: str) -> None:
    ended = run("--host", host, "--port", "0")
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"pion-server: refusing to listen on {host} without a password")
    assert "--requirepass" in ended.stderr


def test_a_host_that_does_not_exist() -> None:
    ended = run("--host", "192.0.2.7", "--port", "0", "--requirepass", "x")
    assert ended.returncode == 1
    assert last_line(ended).startswith("pion-server: cannot listen on 192.0.2.7:0: ")


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--port", "70000"], "--port: should be less than or equal to 65535"),
        (["--port", "-1"], "--port"),
        (["--port", "x"], "--port"),
        (["--max-memory", "lots"], "--max-memory: not a size; one is for example"),
        (["--max-memory", "8gbb"], "--max-memory: not a size; one is for example"),
        (["--max-memory", "-1"], "--max-memory"),
        (["--workers", "0"], "--workers"),
        (["--log-level", "loud"], "--log-level"),
        (["--attention", "abacus"], "--attention"),
        (["--attend-slots", "0"], "--attend-slots"),
        (["--attend-memory", "-1"], "--attend-memory"),
        (["--wal-fsync", "always"], "--wal-fsync is about the log in --data-dir"),
        (["--nonsense"], "--nonsense"),
    ],
    ids=str,
)
def test_an_option_that_makes_no_sense(args: list[str], word: str) -> None:
    ended = run(*args)
    assert ended.returncode == 2
    assert word in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


def test_help_names_every_option_and_fits_a_terminal() -> None:
    ended = run("--help")
    assert ended.returncode == 0
    named = set(re.findall(r"--([a-z0-9-]+)", ended.stdout))
    assert {field.replace("_", "-") for field in set(Config.model_fields) - {"max_bulk"}} <= named
    assert max(map(len, ended.stdout.splitlines())) <= 80


def test_options_of_existing_scripts_are_taken(start_pion: Any, dial: Any) -> None:
    said = ("--kvcache", "--independent-workers", "--metal-attention", "-w", "1")
    server = start_pion(*said, "--max-memory", "1gb", "--log-level", "debug")
    assert dial(server.port).ask("PING") == b"+PONG\r\n"


def test_a_server_that_runs_has_not_imported_mlx() -> None:
    code = (
        "import sys, pion_server.net.server, pion_server.__main__\n"
        "from pion_server.commands import load_families; load_families()\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('mlx', 'mlx_lm', 'torch')])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
