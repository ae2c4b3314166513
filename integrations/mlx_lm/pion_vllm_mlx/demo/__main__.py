"""`make demo`: what Pion is for, on a real model, in well under a minute.

One process prefills a shared system prompt and stores it. A second one, which knows only the
server, answers three questions on the restored cache, and again without Pion. Exits 1 where an
answer differs, 130 on Ctrl-C; nothing that it started is left running.

    python -m pion_vllm_mlx.demo [MODEL]     an mlx-lm folder or hub id; also $MODEL
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pion_vllm_mlx.demo.children import DemoError, pion_server, run_engine
from pion_vllm_mlx.demo.prompts import QUESTIONS
from pion_vllm_mlx.demo.smollm2 import ModelSourceError, model_folder

# The model, the server, 3 steps of the first process, 1 + 2 a question of the second.
STEPS = 2 + 3 + 1 + 2 * len(QUESTIONS)


def main() -> int:
    """Run the demo; the exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that `finally` blocks end the children
        signal.signal(number, lambda *_: sys.exit(1))
    model = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("MODEL", "")
    try:
        first, second = work(model)
    except (DemoError, ModelSourceError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return report(first, second)


def work(model: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the first and the second process report."""
    with tqdm(total=STEPS, leave=False, bar_format="{percentage:3.0f}% |{bar:30}| {desc}") as bar:

        def step(what: str) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update()

        step("the model folder (built once)")
        model = model or str(model_folder())
        step("starting pion-server")
        with pion_server() as port:
            first = run_engine("fill", model, port, lambda what: step(f"first process: {what}"))
            second = run_engine("answer", model, port, lambda what: step(f"second process: {what}"))
    first["model"] = Path(model).name
    return first, second


def report(first: dict[str, Any], second: dict[str, Any]) -> int:
    """Print what happened; 0 where Pion kept its word."""
    stored, restored = first["stats"], second["stats"]
    print(f"model           {first['model']}")
    print(
        f"first process   prefilled {first['tokens']} tokens in "
        f"{stored['prefill_ms_total'] / 1e3:.2f} s and stored their K/V"
    )
    print(f"second process  got them back from Pion in {_mean_fetch_ms(restored):.0f} ms\n")
    for question, answer in zip(QUESTIONS, second["answers"], strict=True):
        print(f"  {question}\n    {answer['warm']['text'].strip()}")
    cold, warm = (
        statistics.median(answer[way]["ttft_ms"] for answer in second["answers"])
        for way in ("cold", "warm")
    )
    same = [answer["warm"]["tokens"] == answer["cold"]["tokens"] for answer in second["answers"]]
    print(f"\ncold TTFT       {cold:7.0f} ms   without Pion (median of {len(same)})")
    print(f"warm TTFT       {warm:7.0f} ms   with Pion, its fetch included")
    print(f"ratio           {cold / warm:7.1f} x    sooner")
    print(f"same tokens     {sum(same)} of {len(same)} answers, as without Pion")
    print(
        f"bytes moved     {stored['bytes_stored'] / 1e6:.1f} MB stored, "
        f"{restored['bytes_fetched'] / 1e6:.1f} MB fetched ({restored['hits']} times)"
    )
    if restored["hits"] != len(same):
        print(f"demo: the cache was not restored every time: {restored}", file=sys.stderr)
        return 1
    return 0 if all(same) else 1


def _mean_fetch_ms(stats: dict[str, Any]) -> float:
    return float(stats["fetch_ms_total"] / max(stats["hits"], 1))


if __name__ == "__main__":
    raise SystemExit(main())
