"""What README, SERVE and MLX_PATCH say to copy works as it stands there, but for model and port."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pion_vllm_mlx.processes import pion_server

ROOT = Path(__file__).parents[3]
MODEL = "mlx-community/Llama-3.2-1B-Instruct-4bit"


@pytest.mark.parametrize("page", ["README.md", "docs/SERVE.md", "docs/MLX_PATCH.md"])
def test_the_page(page: str, smollm2: Any) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert MODEL in code
    with pion_server() as port:
        code = code.replace(MODEL, smollm2.folder).replace("127.0.0.1:1974", f"127.0.0.1:{port}")
        code = code.replace("PionPromptCache(model,", f"PionPromptCache(model, port={port},")
        answer, _, stats = run(code).partition("\n{")
        assert answer.strip()
        assert stats == "" or "'stores': 1" in stats
        if page == "README.md":  # "every later one, in any process, restores"
            again, _, stats = run(code).partition("\n{")
            assert again == answer
            assert "'hit_rate': 1.0" in stats


def run(code: str) -> str:
    """What the snippet prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "going on without Pion" not in done.stderr
    return done.stdout
