"""Real servers: pion-server, and a redis-server that it is compared with.

Not those of tests/conftest.py: one of LMCache's dependencies installs a package called `tests`.
"""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 30.0
# Four workers take so many.
RUN = 20


@dataclass
class Server:
    """A server process that answers on `port` of this machine."""

    command: list[str]
    port: int
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"pion://127.0.0.1:{self.port}"

    @classmethod
    def pion(cls, log: Path, *options: str, port: int | None = None) -> Server:
        """`pion-server <options>`, listening."""
        port = port or free_port()
        command = [sys.executable, "-m", "pion_server", "--port", str(port), *options]
        return cls(command, port, log, started(command, port, log))

    @classmethod
    def redis(cls, log: Path) -> Server:
        """A real redis-server without a disk, listening."""
        port = free_port()
        disk = ["--save", "", "--appendonly", "no", "--dir", str(log.parent)]
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", *disk]
        return cls(command, port, log, started(command, port, log))

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Start it again on the same port."""
        self.process = started(self.command, self.port, self.log)

    def finish(self) -> None:
        """SIGTERM, and wait; a pion-server that logged an error has a defect."""
        self.process.terminate()
        try:
            self.process.wait(START_SECONDS)
        finally:
            self.kill()
        log = self.log.read_text()
        assert " ERROR " not in log, log


def free_port() -> int:
    """The first of RUN ports that nobody has: a server also listens on some that follow its own.
    The system hands out none of these by itself."""
    while True:
        first = random.randrange(20_000, 32_000)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + RUN):
                probes.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def started(command: list[str], port: int, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink)
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return process
    process.kill()
    raise AssertionError(f"the server did not start: {log.read_text()}")
