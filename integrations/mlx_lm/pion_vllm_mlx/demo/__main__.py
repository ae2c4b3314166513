"""`make demo`: what Pion is for, on a real model, in well under a minute.

One process prefills a shared system prompt and stores it. A second one, which knows only the
server, answers three questions on the restored cache, and again without Pion. Exits 1 where an
answer differs, 130 on Ctrl-C; nothing that it started is left running.

    python -m pion_vllm_mlx.demo [MODEL]     an mlx-lm folder or hub id; also $MODEL
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pion_vllm_mlx.demo.children import DemoError, run_engine
from pion_vllm_mlx.demo.prompts import QUESTIONS
from pion_vllm_mlx.demo.smollm2 import ModelSourceError, model_folder
from pion_vllm_mlx.processes import StartError, pion_server

# The model, the server, 3 steps of the first process, 1 + 2 a question of the second, the report.
STEPS = 2 + 3 + 1 + 2 * len(QUESTIONS) + 1


def main() -> int:
    """Run the demo; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pion_vllm_mlx.demo",
        description="Prefill a prompt in one process, answer questions on it in another.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=os.environ.get("MODEL"),
        help="an mlx-lm folder or hub id (default: $MODEL, else SmolLM2-135M from a PyPI wheel)",
    )
    model = parser.parse_args().model
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that `finally` blocks end the children
        signal.signal(number, lambda *_: sys.exit(1))
    try:
        first, second = work(model)
    except (DemoError, ModelSourceError, StartError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return report(first, second)


def work(model: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the first and the second process report."""
    form = "{percentage:3.0f}% |{bar:30}| {desc}"
    with tqdm(total=STEPS, leave=False, bar_format=form, mininterval=0, miniters=1) as bar:

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
    stored, restored, answers = first["stats"], second["stats"], second["answers"]
    cold, warm = (
        statistics.median(answer[way]["ttft_ms"] for answer in answers) for way in ("cold", "warm")
    )
    same = sum(answer["warm"]["tokens"] == answer["cold"]["tokens"] for answer in answers)
    print(f"model           {first['model']}")
    print(f"first process   prefilled {first['tokens']} tokens and stored their K/V in Pion")
    print("second process  got them back and answered:\n")
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"  {question}\n    {answer['warm']['text'].strip()}\n")
    print(f"cold TTFT      {cold:6.0f} ms   the prefix prefilled in this process, without Pion")
    print(f"warm TTFT      {warm:6.0f} ms   the prefix fetched from Pion, the fetch included")
    print(f"ratio          {cold / warm:6.1f} x    sooner (medians of {len(answers)} questions)")
    print(f"greedy tokens   identical to a run without Pion in {same} of {len(answers)} answers")
    print(
        f"bytes moved     {stored['bytes_stored'] / 1e6:.1f} MB stored, "
        f"{restored['bytes_fetched'] / 1e6:.1f} MB fetched ({restored['hits']} times)"
    )
    if restored["hits"] != len(answers):
        print(f"demo: not every answer came from a restored cache: {restored}", file=sys.stderr)
    return 0 if same == restored["hits"] == len(answers) else 1


if __name__ == "__main__":
    raise SystemExit(main())
