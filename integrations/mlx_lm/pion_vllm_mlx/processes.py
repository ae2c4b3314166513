"""Child processes that never outlive this one, whichever way it ends, and a local pion-server."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pion_server.client import Client, ConnectionFailed, DeadlineExceeded, NoAuth

# Below those that systems give to outgoing connections, which would take the next one.
PORTS = range(16384, 32000)
START_S = 20.0
STOP_S = 5.0


class StartError(Exception):
    """A child process did not come up; the message is for the person who started us."""


@contextmanager
def child(*arguments: str, stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """`python -m <arguments>`, ended when the block is left, or this process is killed.

    In a process group of its own: Ctrl-C reaches this process only, and it ends the child.
    """
    command = [sys.executable, "-m", "pion_vllm_mlx.leash", *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=stdout, text=True, process_group=0
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def pion_server(*options: str, port: int = 0) -> Iterator[int]:
    """A pion-server with `options`, on a free port unless one is named, which is yielded once the
    server answers."""
    port = port or free_port()
    arguments = ("pion_server", "--port", str(port), "--log-level", "warning", *options)
    with child(*arguments) as process:
        _wait_until_it_answers(process, port)
        yield port


def free_port() -> int:
    """A TCP port of this machine that nobody listens on, nor on the next one, where a server has
    its binary lane."""
    while True:
        port = random.choice(PORTS)
        with suppress(OSError), socket.socket() as probe, socket.socket() as beside:
            probe.bind(("127.0.0.1", port))
            beside.bind(("127.0.0.1", port + 1))
            return port


def _wait_until_it_answers(process: subprocess.Popen[str], port: int) -> None:
    give_up = time.monotonic() + START_S
    with Client(f"pion://127.0.0.1:{port}", timeout=1) as client:
        while process.poll() is None and time.monotonic() < give_up:
            with suppress(ConnectionFailed, DeadlineExceeded):
                with suppress(NoAuth):  # which is an answer too
                    client.ping()
                return
            time.sleep(0.05)
    raise StartError("pion-server did not start")
