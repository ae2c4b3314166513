"""Time to the first token where attention to the prefix is computed: at the server, or in process.

    python benchmarks/reproducers/bench_w1_stage2.py --prompts 5 --queries 20 --json PATH

Every prompt is a prefix of --prompt-tokens tokens and gets --queries suffixes of 16 tokens.

vanilla   mlx-lm prefills prefix and suffix (once a prompt: it takes too long for more)
kvcache   a plain KVCache that has the prefix in this process, trimmed back each time: the limit
resp      Stage 2 over RESP, PION_PROMPT_CACHE_NO_INPROC=1
binary    Stage 2 over the binary lane, likewise
inproc    Stage 2 in the process

Times run from make_pion_prompt_cache, with all its questions, to the first token. Ways take turns
in every query. The model is SmolLM2-135M in fp32 unless --model names another mlx-lm folder or hub
id.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pion_vllm_mlx.blas import load_fast_blas

from benchmarks import harness

SUFFIX = 16
NO_INPROC = "PION_PROMPT_CACHE_NO_INPROC"
TEXT = "Story {}: the quick brown fox jumps over the lazy dog, and it goes on and on. "


class Request(NamedTuple):
    """What one request took, in milliseconds, and what came of it."""

    ms: float
    token: int
    wire_calls: float = 0
    wire_ms: float = 0


class Engine:
    """The model, and the ways to its first token."""

    def __init__(self, options: argparse.Namespace, port: int) -> None:
        import mlx.core as mx
        from mlx_lm import load
        from pion_vllm_mlx import PionPromptCache, install_pion_attention_patch

        from pion_server.client import Client

        self.mx = mx
        self.tokens = options.prompt_tokens
        self.model, self.tokenizer = load(options.model)[:2]
        install_pion_attention_patch()
        with Client(f"pion://127.0.0.1:{port}") as client:
            fast = client.pion_workers()[0].fast_port
        urls = {"resp": f"pion://127.0.0.1:{port}", "binary": f"pion+fast://127.0.0.1:{fast}"}
        self.pion = {
            lane: PionPromptCache(
                self.model, port=port, timeout=60, vquant="native", stage2=True, attention_url=url
            )
            for lane, url in urls.items()
        }

    def ids(self, prompt: int) -> list[int]:
        """The tokens of a prefix and of all suffixes behind it."""
        text = TEXT.format(prompt) * (self.tokens // 8 + 64)
        ids: list[int] = self.tokenizer.encode(text)
        return ids

    def first_token(self, suffix: list[int], cache: list[Any]) -> int:
        logits = self.model(self.mx.array([suffix]), cache=cache)
        return int(self.mx.argmax(logits[0, -1]).item())

    def timed(self, suffix: list[int], make: Callable[[], list[Any]]) -> Request:
        start = time.perf_counter()
        token = self.first_token(suffix, make())
        return Request((time.perf_counter() - start) * 1e3, token)

    def stage2(self, lane: str, namespace: str, suffix: list[int], in_process: bool) -> Request:
        from pion_vllm_mlx import make_pion_prompt_cache

        pion = self.pion[lane]
        os.environ[NO_INPROC] = "0" if in_process else "1"
        before = pion.stats()
        done = self.timed(
            suffix, lambda: make_pion_prompt_cache(self.model, namespace, pion, self.tokens)
        )
        after = pion.stats()
        if after["errors"]:
            raise SystemExit(f"{lane} did not work: {after['errors']}")
        calls = after["attend_calls"] - before["attend_calls"]
        took = after["attend_ms_total"] - before["attend_ms_total"]
        return done._replace(wire_calls=calls, wire_ms=took)


def measure(engine: Engine, options: argparse.Namespace) -> dict[str, list[Request]]:
    """All requests of every way."""
    from mlx_lm.models.cache import trim_prompt_cache
    from pion_vllm_mlx.prefill import prefill

    found: dict[str, list[Request]] = defaultdict(list)
    for prompt in range(options.prompts):
        namespace, ids = f"w1-{prompt}", engine.ids(prompt)
        prefix = ids[: engine.tokens]
        suffixes = [ids[engine.tokens + n :][:SUFFIX] for n in range(options.queries)]
        first = suffixes[0]
        found["vanilla"].append(engine.timed(first, lambda p=prefix: prefill(engine.model, p)))
        os.environ[NO_INPROC] = "0"
        engine.pion["resp"].get_or_prefill(prefix, namespace=namespace)
        engine.pion["resp"].flush()
        plain = prefill(engine.model, prefix)

        def trimmed(cache: list[Any] = plain) -> list[Any]:
            trim_prompt_cache(cache, cache[0].offset - engine.tokens)
            return cache

        for number, suffix in enumerate([first, *suffixes]):  # once before the clock counts
            turn = {
                "kvcache": engine.timed(suffix, trimmed),
                "resp": engine.stage2("resp", namespace, suffix, False),
                "binary": engine.stage2("binary", namespace, suffix, False),
                "inproc": engine.stage2("resp", namespace, suffix, True),
            }
            for way, request in turn.items() if number else ():
                found[way].append(request)
        show(prompt + 1, options.prompts, found)
    return found


def show(prompt: int, prompts: int, found: dict[str, list[Request]]) -> None:
    means = {way: statistics.mean(r.ms for r in requests) for way, requests in found.items()}
    shown = "  ".join(f"{way} {ms:.0f}" for way, ms in means.items())
    print(f"prompt {prompt}/{prompts}, mean ms: {shown}", flush=True)


def figures_of(found: dict[str, list[Request]], queries: int) -> dict[str, dict[str, float]]:
    """The columns of the table, by way."""
    vanilla = statistics.mean(request.ms for request in found["vanilla"])
    return {
        way: {
            "ttft_mean_ms": round(statistics.mean(r.ms for r in requests), 1),
            "ttft_p50_ms": round(statistics.median(r.ms for r in requests), 1),
            "wire_calls_per_request": round(statistics.mean(r.wire_calls for r in requests), 1),
            "wire_ms_per_call": round(
                sum(r.wire_ms for r in requests) / max(sum(r.wire_calls for r in requests), 1), 3
            ),
            "speedup_vs_vanilla": round(vanilla / statistics.mean(r.ms for r in requests), 2),
            "first_token_agreement": agreement(way, found, queries),
        }
        for way, requests in found.items()
    }


def agreement(way: str, found: dict[str, list[Request]], queries: int) -> float:
    """The share of first tokens that are those of the plain KVCache."""
    wanted = [request.token for request in found["kvcache"]]
    wanted = wanted[::queries] if way == "vanilla" else wanted
    pairs = zip(found[way], wanted, strict=True)
    return sum(request.token == token for request, token in pairs) / len(wanted)


def report(options: argparse.Namespace, figures: dict[str, dict[str, float]]) -> None:
    print(f"{'':10}{'mean':>9}{'p50':>9}{'calls':>7}{'ms each':>9}{'speedup':>9}{'agree':>7}")
    for way, row in figures.items():
        mean, p50, calls, each, speedup, agree = row.values()
        print(f"{way:10}{mean:9}{p50:9}{calls:7}{each:9}{speedup:9}{agree:7.0%}")
    facts = {
        "prompts": options.prompts,
        "queries": options.queries,
        "tokens": options.prompt_tokens,
        "suffix_tokens": SUFFIX,
        "model": Path(options.model).name,
    }
    harness.write(options.json, {**facts, "ways": figures})
    harness.bars(
        options.json,
        f"First token behind {options.prompt_tokens} tokens, {facts['model']}",
        "ms (median)",
        list(figures),
        {"TTFT": [row["ttft_p50_ms"] for row in figures.values()]},
        scale="log",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--queries", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default="")
    options = parser.parse_args()
    load_fast_blas()  # before anything imports mlx
    if options.json is None:
        options.json = harness.default_path("w1-stage2")
    if not options.model:
        from pion_vllm_mlx.demo.smollm2 import model_folder

        options.model = str(model_folder())
    with harness.pion() as port:
        found = measure(Engine(options, port), options)
        report(options, figures_of(found, options.queries))


if __name__ == "__main__":
    main()
