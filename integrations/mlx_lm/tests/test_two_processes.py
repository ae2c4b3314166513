"""A prefix prefilled in one process answers in another one exactly as if Pion were not there."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("engine_process.py")

PROMPTS = [
    (
        "You are the assistant of a small museum of clocks. The museum opens at ten and closes at "
        "five, tickets cost eight euros, and children pay half. The oldest clock was made in 1583.",
        "\nQuestion: How much is a ticket?\nAnswer:",
    ),
    (
        "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n"
        "    return a\n\n\ndef factorial(n):\n    result = 1\n",
        "    for i in range(2, n + 1):\n",
    ),
    (
        "The recipe for four people: 300 grams of flour, three eggs, half a litre of milk, a pinch "
        "of salt, and butter for the pan. Let the batter rest for half an hour. " * 3,
        "First of all",
    ),
    (
        "Translate to French.\nsea: mer\nhouse: maison\nbook: livre\nfriend: ami\n" * 6,
        "bread:",
    ),
    (
        "<|im_start|>system\nYou answer in one short sentence.<|im_end|>\n",
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    ),
]


def engine_process(role: str, folder: str, port: int, prompts: list[Any]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), role, folder, str(port)],
        input=json.dumps(prompts),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_two_processes(smollm2: Any, port: int) -> None:
    spec = importlib.util.spec_from_file_location("engine_process", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    engine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(engine)
    encode = smollm2.tokenizer.encode
    prompts = [[encode(text) for text in prompt] for prompt in PROMPTS]
    wanted = [engine.greedy(smollm2.model, prefix + suffix) for prefix, suffix in prompts]

    first = engine_process("store", smollm2.folder, port, prompts)
    second = engine_process("answer", smollm2.folder, port, prompts)

    for vquant in ("native", "fp16"):
        assert first[vquant]["stats"]["stores"] == len(prompts)
        assert second[vquant]["stats"]["hits"] == len(prompts)
        assert second[vquant]["stats"]["misses"] == 0
    assert [len(tokens) for tokens in wanted] == [engine.ANSWER_TOKENS] * len(prompts)
    assert second["native"]["answers"] == wanted
    assert second["fp16"]["answers"] == [tokens[:1] for tokens in wanted]
