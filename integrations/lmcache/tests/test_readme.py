"""Invariant: what the README says to copy works as it stands there, and its table of options is the
options. That its configurations store and find chunks is shown by test_two_processes.py.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pion_lmcache.options import Options

from integrations.lmcache.tests import readme
from pion_server.__main__ import parser

NEEDS = "needs lmcache (Linux): make lmcache"


def test_the_file_and_the_environment_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = pytest.importorskip("lmcache.v1.config", reason=NEEDS)
    file = tmp_path / "lmcache.yaml"
    file.write_text(readme.blocks("yaml", "remote_storage_plugins")[0])
    by_file = config.LMCacheEngineConfig.from_file(str(file))
    (exports,) = readme.blocks("sh", "export PYTHONHASHSEED=0")
    shown = subprocess.run(
        ["bash", "-ec", f"{exports}\nenv -0"], capture_output=True, text=True, check=True
    )
    for line in shown.stdout.split("\0"):
        name, _, value = line.partition("=")
        if name.startswith("LMCACHE_"):
            monkeypatch.setenv(name, value)
    by_environment = config.LMCacheEngineConfig.from_env()
    for name in (*readme.WHERE, "chunk_size", "local_cpu", "max_local_cpu_size"):
        assert getattr(by_file, name) == getattr(by_environment, name)


def test_the_command_of_vllm() -> None:
    (command,) = readme.blocks("sh", "vllm serve")
    words = shlex.split(command.replace("\\\n", ""))
    assert words[:2] == ["PYTHONHASHSEED=0", "LMCACHE_CONFIG_FILE=lmcache.yaml"]
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer == {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


@pytest.mark.parametrize("command", readme.blocks("sh", "lmcache server"))
def test_the_commands_of_the_multiprocess_mode(command: str) -> None:
    commands = pytest.importorskip("lmcache.cli.commands", reason=NEEDS)
    config = pytest.importorskip("lmcache.v1.distributed.config", reason=NEEDS)
    words = shlex.split(command)[1:]
    top = argparse.ArgumentParser()
    commands.register_commands(top.add_subparsers(), words)
    given = config.parse_args_to_config(top.parse_args(words))
    assert len(given.l2_adapter_config.adapters) == 1


def test_the_command_of_the_server() -> None:
    (block,) = readme.blocks("sh", "pion-server")
    (line,) = (line for line in block.splitlines() if line.startswith("pion-server"))
    parser().parse_args(shlex.split(line, comments=True)[1:])


def test_the_example_in_python(pion: Any) -> None:
    (example,) = readme.blocks("python", "PionStore", pion.port)
    rows = np.random.default_rng(0).standard_normal((5, 128), dtype=np.float32)
    names = {"v": rows, "buffer": np.zeros((5, 128), np.float32)}
    exec(example, names)
    sent = rows.astype(np.float16).astype(np.float32)
    assert np.array_equal(names["v"], sent)
    assert np.array_equal(names["buffer"], sent)


def test_the_table_of_options() -> None:
    table = re.findall(r"^\| `(\w+)` \| `?([^`|]*?)`? \|", readme.TEXT, re.MULTILINE)
    documented = {name: None if default == "none" else default for name, default in table}
    actual = {
        name: None
        if field.default is None
        else f"{field.default:g}"
        if isinstance(field.default, float)
        else str(field.default)
        for name, field in Options.model_fields.items()
    }
    assert documented == actual
