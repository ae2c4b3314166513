"""An agent's day on stock mlx_lm.server and on `pion-vllm-mlx serve`.

    python benchmarks/serve.py [--rounds R] [--tools N] [--json PATH] [--model M]

The trace: two clients whose requests share a long system prompt with N tools, and grow turn by
turn; one of them goes back and takes another way. The server is restarted twice on the way. It is
replayed request by request on either server, each round with a pion-server of its own, which
outlives the restarts. Replies are cut short, and the trace brings its own, so that both servers see
the same prompts.

Then a trace without anything to reuse, on both servers in turn: what Pion costs where it cannot
help. All ratios are ours / stock's, so less is better. TTFT is the client's: from the request to
the first piece of the answer. Memory is resident, ours with its pion-server. The model is
SmolLM2-135M in fp32 unless --model names another one. About five minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from openai import OpenAI

from benchmarks import harness

# Stock, but for the fast BLAS, which it needs as much as ours does.
STOCK = (
    "-c",
    "from pion_vllm_mlx.blas import load_fast_blas; load_fast_blas(); "
    "from mlx_lm.server import main; main()",
)
OURS = ("-m", "pion_vllm_mlx.cli", "serve")
TURNS = 4  # of the trace without reuse, on one server before the other has its own
TAKES = 6  # times that both servers have them
SETTLE_S = 0.5  # what is stored behind a request must not slow down the other server

TOOL = (
    '{"name": "tool_%d", "description": "Reads the register number %d of the plant and returns its '
    'value, its unit and the time of the measurement.", "parameters": {"address": "integer"}}\n'
)
SYSTEM = "You run a small power plant with these tools. Think, call one, then answer.\n"
RESULT = (
    "The tool answered: register %d has the value %d at noon, and it was %d an hour before. "
    "The operator wants to know whether that is normal, and what to read next."
)
REPLY = "The value is within its limits. I would read register %d next, and compare the two."

Messages = list[dict[str, str]]


class Request(NamedTuple):
    """The `turn`-th of a client; its branches part after the second."""

    client: int
    turn: int
    branch: int = 0

    def __str__(self) -> str:
        return f"{self.client}{'b' if self.branch else ''}.{self.turn}"

    def messages(self, system: str) -> Messages:
        messages = [{"role": "system", "content": system}]
        for number in range(self.turn):
            seed = 100 * self.client + number + (10 * self.branch if number >= 2 else 0)
            messages.append({"role": "user", "content": RESULT % (seed, seed * 3, seed * 2)})
            if number + 1 < self.turn:
                messages.append({"role": "assistant", "content": REPLY % (seed + 1)})
        return messages


# The server is restarted after each of these.
PHASES = (
    [
        *(Request(client, turn) for turn in (1, 2, 3) for client in (1, 2)),
        *(Request(1, turn, branch=1) for turn in (3, 4)),
    ],
    [*(Request(client, turn) for turn in (4, 5) for client in (1, 2)), Request(1, 5, branch=1)],
    [*(Request(client, 6) for client in (1, 2)), Request(1, 6, branch=1)],
)


class Sample(NamedTuple):
    """What one request took (seconds), and its tokens."""

    ttft: float
    prompt: int
    cached: int


class Replay(NamedTuple):
    """The trace on one server: the samples of each phase, and resident bytes at its end."""

    phases: list[list[Sample]]
    memory: int

    @property
    def samples(self) -> list[Sample]:
        return [sample for phase in self.phases for sample in phase]

    @property
    def ttfts(self) -> list[float]:
        return [sample.ttft for sample in self.samples]

    @property
    def restarts(self) -> list[float]:
        """TTFT of the first request after each restart."""
        return [phase[0].ttft for phase in self.phases[1:]]


class Served:
    """A server process and its client."""

    def __init__(self, process: psutil.Process, port: int) -> None:
        self._process = process
        self._client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600)

    def ask(self, messages: Messages) -> Sample:
        start = time.perf_counter()
        stream = self._client.chat.completions.create(
            model="default_model",
            messages=messages,  # type: ignore[arg-type]
            max_tokens=2,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        ttft, usage = 0.0, None
        for chunk in stream:
            ttft = ttft or time.perf_counter() - start
            usage = chunk.usage or usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return Sample(ttft, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0)

    def memory(self) -> int:
        return resident(self._process)


def resident(process: psutil.Process) -> int:
    """Resident bytes of a process and its children."""
    return sum(int(each.memory_info().rss) for each in (process, *process.children(recursive=True)))


@contextlib.contextmanager
def served(program: Sequence[str], model: str, *options: str) -> Iterator[Served]:
    """A server on a free port, warm: it has loaded the model and run it once."""
    port = harness.free_port()
    arguments = ["--model", model, "--port", str(port), "--log-level", "ERROR", *options]
    with harness.child([sys.executable, *program, *arguments], port) as process:
        wait_until_healthy(port)
        server = Served(psutil.Process(process.pid), port)
        server.ask([{"role": "user", "content": "Hello."}])
        yield server


def wait_until_healthy(port: int) -> None:
    give_up = time.monotonic() + harness.START_S
    while time.monotonic() < give_up:
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10),
        ):
            return
        time.sleep(0.1)
    raise TimeoutError("the server did not become healthy")


def replay(program: Sequence[str], model: str, system: str, *options: str) -> Replay:
    """The trace with its restarts."""
    phases, memory = [], 0
    for requests in PHASES:
        with served(program, model, *options) as server:
            phases.append([server.ask(request.messages(system)) for request in requests])
            memory = server.memory()
    return Replay(phases, memory)


def replay_ours(model: str, system: str) -> Replay:
    """The same, with a pion-server that goes on."""
    with pion() as (url, process):
        replayed = replay(OURS, model, system, "--pion-url", url)
        return replayed._replace(memory=replayed.memory + resident(process))


@contextlib.contextmanager
def pion() -> Iterator[tuple[str, psutil.Process]]:
    """URL and process of a pion-server of `serve`'s own size."""
    port = harness.free_port()
    options = ["--port", str(port), "--max-memory", "4gb"]
    with harness.child([sys.executable, "-m", "pion_server", *options], port) as process:
        yield f"pion://127.0.0.1:{port}", psutil.Process(process.pid)


def replays(model: str, system: str, rounds: int) -> dict[str, list[Replay]]:
    """The trace on stock and on ours, in turn."""
    found: dict[str, list[Replay]] = {"stock": [], "ours": []}
    for number in range(rounds):
        found["stock"].append(replay(STOCK, model, system))
        found["ours"].append(replay_ours(model, system))
        shown = [f"{statistics.median(each[-1].ttfts) * 1e3:.0f}" for each in found.values()]
        print(f"round {number + 1}/{rounds}: TTFT p50 (ms) stock, ours: {shown}", flush=True)
    return found


def unshared(model: str) -> dict[str, list[float]]:
    """TTFT of prompts that share nothing; the servers take turns to be first."""
    times: dict[str, list[float]] = {"stock": [], "ours": []}
    with contextlib.ExitStack() as stack:
        url, _ = stack.enter_context(pion())
        servers = {
            "stock": stack.enter_context(served(STOCK, model)),
            "ours": stack.enter_context(served(OURS, model, "--pion-url", url)),
        }
        for take in range(TAKES):
            for name in sorted(servers, reverse=take % 2 == 0):
                for number in range(take * TURNS, (take + 1) * TURNS):
                    text = f"{number}. {RESULT % (number, number, number)} " * 10
                    sample = servers[name].ask([{"role": "user", "content": text}])
                    times[name].append(sample.ttft)
                time.sleep(SETTLE_S)
    return times


def figures(replayed: list[Replay]) -> dict[str, Any]:
    """Of one server, over all rounds."""
    samples = [sample for each in replayed for sample in each.samples]
    times = [sample.ttft for sample in samples]
    prompt, cached = (sum(getattr(each, name) for each in samples) for name in ("prompt", "cached"))
    return {
        "ttft_p50_s": round(statistics.median(times), 3),
        "ttft_p95_s": round(harness.percentile(times, 0.95), 3),
        "restart_ttft_s": harness.summary([time_ for each in replayed for time_ in each.restarts]),
        "prompt_tokens": prompt // len(replayed),
        "prefilled_tokens": (prompt - cached) // len(replayed),
        "hit_rate": round(cached / prompt, 3),
        "memory_mb": round(statistics.median(each.memory for each in replayed) / 1e6),
    }


def report(found: dict[str, list[Replay]], without_reuse: dict[str, list[float]]) -> dict[str, Any]:
    """All figures; ratios are medians over rounds, restarts or requests of ours / stock's."""
    ours, stock = found["ours"], found["stock"]
    both = {name: figures(replayed) for name, replayed in found.items()}
    p50 = [[statistics.median(each.ttfts) for each in replayed] for replayed in (ours, stock)]
    restart = [
        [time_ for each in replayed for time_ in each.restarts] for replayed in (ours, stock)
    ]
    prefilled = [both[name]["prefilled_tokens"] for name in ("ours", "stock")]
    return {
        "ttft_p50_vs_stock": harness.ratio(*p50),
        "prefilled_vs_stock": round(prefilled[0] / prefilled[1], 3),
        "restart_ttft_vs_stock": harness.ratio(*restart),
        "zero_reuse_ttft_vs_stock": harness.ratio(without_reuse["ours"], without_reuse["stock"]),
        **both,
        "zero_reuse_ttft_s": {name: harness.summary(each) for name, each in without_reuse.items()},
        "ttft_s": {
            name: [[round(time_, 3) for time_ in each.ttfts] for each in replayed]
            for name, replayed in found.items()
        },
    }


def draw(path: Path, found: dict[str, list[Replay]], model: str) -> None:
    """TTFT of every request, as medians over the rounds."""
    groups = [
        ("restart\n" if phase and not number else "") + str(request)
        for phase, requests in enumerate(PHASES)
        for number, request in enumerate(requests)
    ]
    series = {
        name: [
            statistics.median(column)
            for column in zip(*(each.ttfts for each in replayed), strict=True)
        ]
        for name, replayed in found.items()
    }
    title = f"TTFT of each request (client.turn), {model}"
    harness.bars(path, title, "s (median)", groups, series, scale="log")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--tools", type=int, default=16, help="in the system prompt, 45 tokens each"
    )
    parser.add_argument("--json", type=Path, default=harness.default_path("serve"))
    parser.add_argument("--model", default="")
    options = parser.parse_args()
    if not options.model:
        from pion_vllm_mlx.demo.smollm2 import model_folder

        options.model = str(model_folder())
    system = SYSTEM + "".join(TOOL % (number, number) for number in range(options.tools))
    found = replays(options.model, system, options.rounds)
    shown = report(found, unshared(options.model))
    shown["model"] = Path(options.model).name
    harness.write(options.json, shown)
    print(json.dumps({key: shown[key] for key in shown if key != "ttft_s"}, indent=2))
    draw(options.json, found, shown["model"])


if __name__ == "__main__":
    main()
