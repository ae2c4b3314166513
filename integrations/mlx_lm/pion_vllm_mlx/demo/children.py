"""The demo's engine processes, run from their parent."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

from pion_vllm_mlx.processes import child


class DemoError(Exception):
    """Why the demo cannot go on, for the person who started it."""


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
