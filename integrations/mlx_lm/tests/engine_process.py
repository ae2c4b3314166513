"""One engine process of test_two_processes.py; prints one JSON object.

    python engine_process.py store|answer <model folder> <port> < prompts.json

`store` prefills and stores every prefix; `answer` restores it and decodes greedily.
"""

# ruff: noqa: E402 - a fast BLAS must be in the process before mlx is
from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from pion_vllm_mlx import load_fast_blas

load_fast_blas()

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step
from pion_vllm_mlx import PionPromptCache

ANSWER_TOKENS = 50


def greedy(model: Any, ids: Sequence[int], caches: Any = None, count: int = ANSWER_TOKENS) -> Any:
    """Greedy token ids after `ids`, past any end-of-text token."""
    steps = generate_step(mx.array(ids), model, max_tokens=count, prompt_cache=caches)
    return [int(token) for token, _ in steps]


def main() -> None:
    """Work through the prompts, pairs of prefix and suffix, with both formats."""
    role, folder, port = sys.argv[1:]
    model = load(folder)[0]
    prompts = json.load(sys.stdin)
    result: dict[str, Any] = {}
    for vquant, count in (("native", ANSWER_TOKENS), ("fp16", 1)):
        with PionPromptCache(model, port=int(port), vquant=vquant, timeout=30) as pion:
            answers = []
            for prefix, suffix in prompts:
                namespace = pion.make_namespace("two processes", vquant, str(prefix))
                caches = pion.get_or_prefill(prefix, namespace=namespace)
                if role == "answer":
                    answers.append(greedy(model, suffix, caches, count))
                assert pion.flush()
            result[vquant] = {"answers": answers, "stats": pion.stats()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
