"""The demo's two engine processes: `fill` prefills and stores, `answer` restores and answers.

    python -m pion_vllm_mlx.demo.engine fill|answer <model> <port>

Each line on stdout is one JSON object for the parent: {"step": what begins now}, or at the end
{"result": ...} or {"error": why not}.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from pion_vllm_mlx.blas import load_fast_blas

MAX_TOKENS = 48
NAMESPACE = "demo"


def main() -> int:
    """Run one of the two roles in this process."""
    role, model_name, port = sys.argv[1:]
    step("loading the model")
    load_fast_blas()  # before anything imports mlx
    from mlx_lm import load

    from pion_vllm_mlx import PionPromptCache, UnsupportedCacheError
    from pion_vllm_mlx.demo.prompts import encode

    try:
        model, tokenizer, *_ = load(model_name)
    except Exception as error:  # of mlx-lm, of the hub's client, of a tokenizer: any kind
        why = " ".join(str(error).split())
        emit(error=f"mlx-lm cannot load {model_name}, as a folder or from the hub: {why}")
        return 1
    prefix, suffixes = encode(tokenizer)
    try:
        # "native" keeps the rows in the model's own dtype: the restored cache is bit-identical.
        pion = PionPromptCache(model, port=int(port), vquant="native", timeout=30)
    except UnsupportedCacheError as error:
        emit(error=str(error))
        return 1
    with pion:
        if role == "fill":
            result = fill(pion, prefix)
        else:
            result = answer(pion, model, tokenizer, prefix, suffixes)
    emit(result={**result, "stats": pion.stats()})
    return 0


def fill(pion: Any, prefix: list[int]) -> dict[str, Any]:
    """Prefill the prefix, which nobody has stored yet, and store it."""
    step(f"prefilling {len(prefix)} tokens")
    pion.get_or_prefill(prefix, namespace=NAMESPACE)
    step("storing their K/V in Pion")
    pion.flush()
    return {"tokens": len(prefix)}


def answer(
    pion: Any, model: Any, tokenizer: Any, prefix: list[int], suffixes: list[list[int]]
) -> dict[str, Any]:
    """Every question on the restored cache, and again without Pion.

    Without Pion the prefix is prefilled here and the question follows, as in the run that was
    stored: where a long prompt is cut moves the last bits of its K/V in any engine.
    """
    from pion_vllm_mlx.prefill import prefill

    def ask(make_caches: Callable[[], Any], suffix: list[int]) -> dict[str, Any]:
        return generate(model, tokenizer, make_caches, suffix)

    answers = []
    for number, suffix in enumerate(suffixes, 1):
        step(f"question {number} with Pion")
        warm = ask(lambda: pion.get_or_prefill(prefix, namespace=NAMESPACE), suffix)
        step(f"question {number} without Pion")
        answers.append({"warm": warm, "cold": ask(lambda: prefill(model, prefix), suffix)})
    return {"answers": answers}


def generate(
    model: Any, tokenizer: Any, make_caches: Callable[[], Any], suffix: list[int]
) -> dict[str, Any]:
    """A greedy answer, and how long its first token took, getting the caches included."""
    from mlx_lm import stream_generate

    start = time.perf_counter()
    caches = make_caches()
    ttft_ms, tokens, text = 0.0, [], ""
    for response in stream_generate(
        model, tokenizer, suffix, max_tokens=MAX_TOKENS, prompt_cache=caches
    ):
        ttft_ms = ttft_ms or (time.perf_counter() - start) * 1e3
        tokens.append(response.token)
        text += response.text
    return {"ttft_ms": ttft_ms, "tokens": tokens, "text": text}


def step(what: str) -> None:
    """Tell the parent what begins now."""
    emit(step=what)


def emit(**message: Any) -> None:
    """One line to the parent."""
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
