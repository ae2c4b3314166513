"""`make demo` shows what it claims, and leaves nothing running, however it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

COMMAND = [sys.executable, "-m", "pion_vllm_mlx.demo"]


def test_the_demo(smollm2: Any) -> None:
    environment = {**os.environ, "MODEL": smollm2.folder}
    done = subprocess.run(COMMAND, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "founded by Margaret Ellison" in done.stdout
    assert "12 Harbour Lane" in done.stdout
    assert "Anna Reyes" in done.stdout
    assert re.search(r"greedy tokens +identical to .+ in 3 of 3 answers", done.stdout)
    assert re.search(r"bytes moved +[0-9.]+ MB stored, [0-9.]+ MB fetched", done.stdout)
    assert "second process: question 3" in done.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 1)])
def test_stopping_it_stops_everything(smollm2: Any, number: signal.Signals, status: int) -> None:
    process = subprocess.Popen(
        [*COMMAND, smollm2.folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    children: list[psutil.Process] = []
    while len(children) < 2:  # the server, and the first engine process
        assert process.poll() is None
        time.sleep(0.05)
        children = psutil.Process(process.pid).children()
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == status
    assert "Traceback" not in errors
    assert not any(child.is_running() for child in children)


def test_a_model_that_cannot_be_loaded(tmp_path: Any) -> None:
    done = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "demo: the engine process (fill) failed" in done.stderr
