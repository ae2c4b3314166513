"""Invariant: a type checker knows the parameters and the result of every method of both clients."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_mypy_sees_the_types_of_methods() -> None:
    command = [sys.executable, "-m", "mypy", "--strict", str(HERE / "typing_cases.py")]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
