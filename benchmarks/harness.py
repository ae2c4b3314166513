"""What every benchmark shares: child servers, samples, the machine's description, JSON and picture.

Machines are noisy, so a figure is a median beside its spread, and a comparison is the median of the
ratios of neighbouring rounds, in one run.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Below those that systems give to outgoing connections, which would take the next one.
PORTS = range(16384, 32000)
START_S = 120.0  # an engine loads its model first
RESULTS = ROOT / "benchmarks" / "results"


def free_port() -> int:
    """A port that nobody listens on, nor on the next one, which is for the binary lane."""
    while True:
        port = random.choice(PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe, socket.socket() as beside:
            probe.bind(("127.0.0.1", port))
            beside.bind(("127.0.0.1", port + 1))
            return port


@contextlib.contextmanager
def child(command: Sequence[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server process that answers on `port`; ended when the block is left."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(port, process)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with status {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise TimeoutError(f"{process.args!r} did not listen on port {port}")


@contextlib.contextmanager
def pion(*options: str) -> Iterator[int]:
    """A pion-server on a free port; yields the port."""
    port = free_port()
    command = [sys.executable, "-m", "pion_server", "--port", str(port), *options]
    with child(command, port):
        yield port


@contextlib.contextmanager
def redis(*options: str) -> Iterator[int]:
    """A real redis-server, without persistence unless `options` say so; yields the port."""
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("this benchmark compares with Redis: install redis-server first")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        usual = ["--port", str(port), "--save", "", "--appendonly", "no", "--dir", folder]
        with child([program, *usual, *options], port):
            yield port


def timed(run: Callable[[], object]) -> float:
    """Seconds one call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median and spread, rounded for reading."""
    ordered = sorted(samples)
    return {
        "median": round(statistics.median(ordered), 4),
        "min": round(ordered[0], 4),
        "max": round(ordered[-1], 4),
        "runs": len(ordered),
    }


def percentile(samples: Sequence[float], share: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Median of the ratios of neighbouring rounds."""
    return round(statistics.median(a / b for a, b in zip(over, under, strict=True)), 3)


def machine() -> dict[str, Any]:
    """Where a figure comes from."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def commit() -> str:
    """The short hash of what ran, with `+` where the tree had changes."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")


def write(path: Path, figures: dict[str, Any]) -> None:
    """The figures as JSON, with command, commit, date and machine."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    words = [Path(word).name if os.path.isabs(word) else word for word in words]
    report = {
        **figures,
        "command": " ".join(words),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")


def default_path(name: str) -> Path:
    """benchmarks/results/<name>-<date>.json"""
    return RESULTS / f"{name}-{datetime.date.today().isoformat()}.json"


def bars(
    path: Path,
    title: str,
    unit: str,
    groups: Sequence[str],
    series: dict[str, Sequence[float]],
    scale: str = "linear",
) -> None:
    """A grouped bar chart beside the JSON; `series` holds a value for each group. `scale`: "log"
    where one bar would hide the others."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2))
    width = 0.8 / len(series)
    for index, (label, values) in enumerate(series.items()):
        places = [group + (index - (len(series) - 1) / 2) * width for group in range(len(groups))]
        drawn = axes.bar(places, values, width, label=label)
        turned = 90 if len(series) * len(groups) > 16 else 0  # else figures of narrow bars overlap
        axes.bar_label(drawn, fmt=_label, fontsize=8, padding=2, rotation=turned)
    axes.set_xticks(range(len(groups)), [group.replace("_", "\n") for group in groups])
    axes.set_yscale(scale)
    axes.set_ylabel(f"{unit}; {'more' if unit.startswith('GB/s') else 'less'} is better")
    axes.set_title(f"{title}\n{machine()['cpu']}, {os.cpu_count()} cores, {commit()}", fontsize=10)
    axes.margins(y=0.15)
    if len(series) > 1:  # beside the bars, which it would hide
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=130)


def speeds(
    path: Path, title: str, figures: dict[str, Any], ways: Sequence[str], peers: Sequence[str]
) -> None:
    """`bars` of the medians, by way and size; `figures` is {size: {"<way>_gb_s": {peer: ...}}}."""
    cells = [(way, size) for size in figures for way in ways]
    series = {
        peer: [figures[size][f"{way}_gb_s"][peer]["median"] for way, size in cells]
        for peer in peers
    }
    bars(path, title, "GB/s (median)", [" ".join(cell) for cell in cells], series)


def _label(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
