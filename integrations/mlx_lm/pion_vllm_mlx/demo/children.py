"""Child processes that never outlive the demo, whichever way it ends."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pion_server.client import Client, ConnectionFailed, DeadlineExceeded, NoAuth

START_S = 20.0
STOP_S = 5.0


class DemoError(Exception):
    """Why the demo cannot go on, for the person who started it."""


@contextmanager
def child(*arguments: str, stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """`python -m <arguments>`, ended when the block is left.

    In a process group of its own: Ctrl-C reaches this process only, and it ends the child.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments], stdout=stdout, text=True, process_group=0
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
    port = port or _free_port()
    arguments = ("pion_server", "--port", str(port), "--log-level", "warning", *options)
    with child(*arguments) as process:
        _wait_until_it_answers(process, port)
        yield port


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
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
    raise DemoError("pion-server did not start")


def run_engine(role: str, model: str, port: int, on_step: Callable[[str], None]) -> dict[str, Any]:
    """Run engine.py to its end and return its result; `on_step` is told what it does."""
    arguments = ("pion_vllm_mlx.demo.engine", role, model, str(port))
    with child(*arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            message = json.loads(line)
            if "result" in message:
                result: dict[str, Any] = message["result"]
                return result
            if "error" in message:
                raise DemoError(message["error"])
            on_step(message["step"])
    raise DemoError(f"the engine process ({role}) failed")
