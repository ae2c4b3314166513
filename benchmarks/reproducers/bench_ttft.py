"""Time to the first token of a 16-token suffix behind a shared prefix, by all ways, in one run.

    python benchmarks/reproducers/bench_ttft.py --prompt-tokens N --runs R --json PATH [--model M]

cold      the prefix is prefilled
file      mlx-lm's load_prompt_cache, in a fresh process, from a file in the page cache
pion_tcp  PionPromptCache.get_or_prefill over TCP, in a fresh process; vquant "native", bit-exact
          as the file is (pion_tcp_fp16 beside it: the default, half the bytes of an fp32 model)
stage2_tcp, stage2_binary
          make_pion_prompt_cache in a fresh process: the prefix stays at the server, which computes
          attention over it; over RESP and over the binary lane
stage2_inproc
          make_pion_prompt_cache in the process that holds the prefix
inproc    a KVCache that is already in the process: the limit

A fresh process has loaded the model and run it once on 16 tokens before the clock starts, each way
alike. The model is SmolLM2-135M in fp32 unless --model names another mlx-lm folder or hub id.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pion_vllm_mlx.blas import load_fast_blas

from benchmarks import harness
from pion_server.client import Client

SUFFIX = 16
NAMESPACE = "bench-ttft"


class Engine:
    """The model in this process, and the one thing that is timed with it."""

    def __init__(self, model_path: str, prompt_tokens: int) -> None:
        import mlx.core as mx
        from mlx_lm import load

        self.mx = mx
        self.model, tokenizer = load(model_path)[:2]
        text = "The quick brown fox jumps over the lazy dog, and the story goes on and on. "
        ids = tokenizer.encode(text * (prompt_tokens // 8 + 8))
        self.prefix, self.suffix = ids[:prompt_tokens], ids[prompt_tokens : prompt_tokens + SUFFIX]
        self.first_token(self.prefill(self.suffix))

    def first_token(self, cache: list[Any]) -> int:
        logits = self.model(self.mx.array([self.suffix]), cache=cache)
        return int(self.mx.argmax(logits[0, -1]).item())

    def prefill(self, ids: list[int]) -> list[Any]:
        from pion_vllm_mlx.prefill import prefill

        return prefill(self.model, ids)

    def load_file(self, path: str) -> list[Any]:
        from mlx_lm.models.cache import load_prompt_cache

        return load_prompt_cache(path)

    def pion(self, port: int, vquant: str, **stage2: Any) -> Any:
        from pion_vllm_mlx import PionPromptCache

        return PionPromptCache(self.model, port=port, vquant=vquant, timeout=60, **stage2)

    def stage2(self, port: int, url: str | None = None) -> Any:
        """With the attention patch, and run once on 16 tokens, too."""
        from pion_vllm_mlx import install_pion_attention_patch

        install_pion_attention_patch()
        cache = self.pion(port, "native", stage2=True, attention_url=url)
        cache.get_or_prefill(self.suffix, namespace=f"{NAMESPACE}-first")
        cache.flush()
        self.first_token(self.continued(cache, "first", self.suffix))
        return cache

    def continued(self, cache: Any, name: str, prefix: list[int]) -> list[Any]:
        from pion_vllm_mlx import make_pion_prompt_cache

        return make_pion_prompt_cache(self.model, f"{NAMESPACE}-{name}", cache, len(prefix))


def measure(engine: Engine, restore: Callable[[], list[Any]]) -> dict[str, Any]:
    start = time.perf_counter()
    token = engine.first_token(restore())
    return {"ms": (time.perf_counter() - start) * 1000, "token": token}


def fresh(options: argparse.Namespace, way: str, source: str) -> dict[str, Any]:
    """One measurement in a process of its own."""
    command = [sys.executable, __file__, "--way", way, "--source", source]
    command += ["--model", options.model, "--prompt-tokens", str(options.prompt_tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure_here(options: argparse.Namespace) -> dict[str, Any]:
    """The child's side of fresh()."""
    engine = Engine(options.model, options.prompt_tokens)
    if options.way == "file":
        return measure(engine, lambda: engine.load_file(options.source))
    if options.way == "stage2":
        return measure_at_server(engine, *options.source.split(","))
    port, vquant = options.source.split(",")
    cache = engine.pion(int(port), vquant)
    result = measure(
        engine, lambda: cache.get_or_prefill(engine.prefix, namespace=f"{NAMESPACE}-{vquant}")
    )
    if cache.stats()["hits"] != 1:
        raise SystemExit(f"the prefix was not restored from Pion: {cache.stats()}")
    return result


def measure_at_server(engine: Engine, port: str, url: str) -> dict[str, Any]:
    os.environ["PION_PROMPT_CACHE_NO_INPROC"] = "1"
    cache = engine.stage2(int(port), url)
    before = cache.stats()["attend_calls"]
    result = measure(engine, lambda: engine.continued(cache, "native", engine.prefix))
    if cache.stats()["attend_calls"] == before or cache.stats()["errors"]:
        raise SystemExit(f"the server computed no attention: {cache.stats()}")
    return result


def run(options: argparse.Namespace, port: int, folder: str) -> dict[str, list[dict[str, Any]]]:
    """All ways in turn, `runs` times."""
    from mlx_lm.models.cache import save_prompt_cache, trim_prompt_cache

    engine = Engine(options.model, options.prompt_tokens)
    path = f"{folder}/prompt.safetensors"
    warm = engine.prefill(engine.prefix)
    save_prompt_cache(path, warm)
    with engine.pion(port, "fp16") as cache:
        cache.get_or_prefill(engine.prefix, namespace=f"{NAMESPACE}-fp16")
    stage2 = engine.stage2(port)
    stage2.get_or_prefill(engine.prefix, namespace=f"{NAMESPACE}-native")
    stage2.flush()
    with Client(f"pion://127.0.0.1:{port}") as client:
        binary = f"pion+fast://127.0.0.1:{client.pion_workers()[0].fast_port}"

    def in_process() -> list[Any]:
        trim_prompt_cache(warm, warm[0].offset - len(engine.prefix))
        return warm

    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "cold": lambda: measure(engine, lambda: engine.prefill(engine.prefix)),
        "inproc": lambda: measure(engine, in_process),
        "file": lambda: fresh(options, "file", path),
        "pion_tcp": lambda: fresh(options, "pion", f"{port},native"),
        "pion_tcp_fp16": lambda: fresh(options, "pion", f"{port},fp16"),
        "stage2_tcp": lambda: fresh(options, "stage2", f"{port},pion://127.0.0.1:{port}"),
        "stage2_binary": lambda: fresh(options, "stage2", f"{port},{binary}"),
        "stage2_inproc": lambda: measure(
            engine, lambda: engine.continued(stage2, "native", engine.prefix)
        ),
    }
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for number in range(options.runs):
        for name, way in ways.items():
            results[name].append(way())
        shown = "  ".join(f"{name} {rows[-1]['ms']:.0f}" for name, rows in results.items())
        print(f"run {number + 1}/{options.runs} (ms): {shown}", flush=True)
    results["bytes"] = [{"bytes": sum(layer.nbytes for layer in in_process())}]
    return results


def report(options: argparse.Namespace, results: dict[str, list[dict[str, Any]]]) -> None:
    nbytes = results.pop("bytes")[0]["bytes"]
    samples = {name: [row["ms"] for row in rows] for name, rows in results.items()}
    spread = {name: harness.summary(values) for name, values in samples.items()}
    exact = {row["token"] for name in results if name != "pion_tcp_fp16" for row in results[name]}
    figures: dict[str, Any] = {f"{name}_ms": spread[name]["median"] for name in samples}
    figures |= {
        "pion_tcp_vs_file": harness.ratio(samples["pion_tcp"], samples["file"]),
        "stage2_inproc_vs_inproc": harness.ratio(samples["stage2_inproc"], samples["inproc"]),
        "first_token_identical": len(exact) == 1,
        "spread": spread,
        "tokens": options.prompt_tokens,
        "bytes": nbytes,
        "model": Path(options.model).name,
    }
    harness.write(options.json, figures)
    print(json.dumps({key: value for key, value in figures.items() if key != "spread"}, indent=2))
    harness.bars(
        options.json,
        f"Time to first token behind {options.prompt_tokens} tokens, {figures['model']}",
        "ms (median)",
        list(samples),
        {"TTFT": [figures[f"{name}_ms"] for name in samples]},
        scale="log",
    )
    if len(exact) != 1:
        raise SystemExit("the first tokens differ: a restored cache is not the one that was stored")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default="")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--source", help=argparse.SUPPRESS)
    options = parser.parse_args()
    load_fast_blas()  # before anything imports mlx
    if options.json is None:
        options.json = harness.default_path(f"ttft-{options.prompt_tokens}")
    if not options.model:
        from pion_vllm_mlx.demo.smollm2 import model_folder

        options.model = str(model_folder())
    if options.way:
        print(json.dumps(measure_here(options)))
        return
    with harness.pion() as port, tempfile.TemporaryDirectory() as folder:
        report(options, run(options, port, folder))


if __name__ == "__main__":
    main()
