"""`make demo` shows what it claims, and leaves nothing running, however it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from pion_vllm_mlx.demo.prompts import QUESTIONS, SYSTEM, encode

COMMAND = [sys.executable, "-m", "pion_vllm_mlx.demo"]


def test_the_demo(smollm2: Any) -> None:
    environment = {**os.environ, "MODEL": smollm2.folder}
    done = run(env=environment)
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


@pytest.mark.parametrize("model", ["no/such-model", "/no/such/folder", "empty", "of nobody's kind"])
def test_a_model_that_cannot_be_loaded(tmp_path: Path, model: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "of nobody's kind").mkdir()
    (tmp_path / "of nobody's kind" / "config.json").write_text('{"model_type": "abacus"}')
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    model = str(tmp_path / model) if (tmp_path / model).is_dir() else model
    done = run(model, env=environment)
    assert done.returncode == 1
    assert f"demo: mlx-lm cannot load {model}" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_room_for_the_model(tmp_path: Path) -> None:
    (tmp_path / "pion").write_text("a file where the folder should be")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("MODEL", None)
    done = run(env=environment)
    assert done.returncode == 1
    assert f"demo: the demo's model needs 540 MB in {tmp_path / 'pion'}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_chat_form_without_a_system_role(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    form = (
        "{% for message in messages %}"
        "{% if message['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
    )
    monkeypatch.setattr(smollm2.tokenizer._tokenizer, "chat_template", form)
    prefix, suffixes = encode(smollm2.tokenizer)
    whole = smollm2.tokenizer.decode(prefix + suffixes[1])
    assert SYSTEM in whole
    assert QUESTIONS[1] in whole
    assert len(prefix) > 400


def run(*model: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *model], env=env, capture_output=True, text=True)
