"""mlx_lm.server, one request after the other, goes on from caches whose prefix is elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI
from pion_vllm_mlx.attention.stage2 import NO_INPROC
from pion_vllm_mlx.processes import free_port

SCRIPT = str(Path(__file__).parent / "support" / "stage2_server.py")
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


@contextmanager
def serving(port: int, *options: str) -> Iterator[OpenAI]:
    """A client of the script, which it may have to wait for."""
    listening = free_port()
    command = [sys.executable, SCRIPT, str(port), "--port", str(listening), *options]
    process = subprocess.Popen(command, env={**os.environ, NO_INPROC: "1"})
    url = f"http://127.0.0.1:{listening}/v1"
    try:
        yield OpenAI(base_url=url, api_key="none", max_retries=100, timeout=120)
    finally:
        process.terminate()
        process.wait()


def test_requests_with_a_seed_are_answered(smollm2: Any, port: int) -> None:
    """Which mlx_lm.server does not put into a batch."""
    with serving(port, "--model", smollm2.folder, "--log-level", "WARNING") as client:
        for _ in range(2):
            answer = client.chat.completions.create(
                model="default_model", messages=QUESTION, max_tokens=20, temperature=0, seed=1
            )
            assert answer.choices[0].message.content == "The capital of France is Paris."
            assert answer.usage is not None
            details = answer.usage.prompt_tokens_details
            assert details is not None
            assert details.cached_tokens == answer.usage.prompt_tokens - 8
