"""What a query of attention takes end to end, beside the kernels alone and beside sending K and V.

    python benchmarks/attention.py [--rounds N] [--json PATH]

8 heads, 2,048 tokens; head_dim 64 and 128; 1 and 16 queries a head; fp32. `resp`, `fast` and `unix`
are ATTEND.PREFIX.QUERY from this process to a server, by three ways; `fused` are the same with a
suffix of 16 tokens (QUERY_FUSED). `kernel` is the server's own computation, in this process, with
one thread as there. `mlx` and `torch` are the public kernels over arrays of their own, with all
cores; mlx with the fast BLAS, as our connectors run it. `querybatch` sends K and V along each time.
Peers take turns in bursts; a sample is the median of a burst. The keys beside `cases` are those of
head_dim 128 and one query, QUERY over RESP.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from pion_vllm_mlx.blas import load_fast_blas
from threadpoolctl import threadpool_limits

from benchmarks import harness
from pion_server.attention.numpy_backend import NumpyBackend
from pion_server.client import Client

HEADS, TOKENS, SUFFIX = 8, 2048, 16
HEAD_DIMS, QUERIES = (64, 128), (1, 16)
HEADLINE = "D128 M1"
BURST = 100  # a server that slept is at speed after ten or twenty
LANES = ("resp", "fast", "unix")
Floats = np.ndarray[Any, np.dtype[np.float32]]
Run = Callable[[], Any]


class Case:
    """Arrays of one shape, and everybody who computes attention over them."""

    def __init__(self, clients: dict[str, Client], head_dim: int, queries: int) -> None:
        random = np.random.default_rng(1)

        def normal(tokens: int) -> Floats:
            return random.standard_normal((HEADS, tokens, head_dim), np.float32)

        self.keys, self.values, self.queries = normal(TOKENS), normal(TOKENS), normal(queries)
        self.name = f"D{head_dim} M{queries}"
        sid = self.name.encode()
        self.store_ms = 1e3 * harness.timed(
            lambda: clients["unix"].attend_store(sid, 0, self.keys, self.values)
        )
        heads = np.arange(HEADS, dtype=np.uint8)
        suffix = normal(SUFFIX), normal(SUFFIX), heads
        kept = NumpyBackend().resident(self.keys, self.values)
        self.runs: dict[str, Run] = {
            **{name: self._query(each, sid) for name, each in clients.items()},
            **{f"fused {name}": self._fused(each, sid, suffix) for name, each in clients.items()},
            "kernel": lambda: kept.attend(self.queries, heads).out,
            "mlx": _mlx(self.keys, self.values, self.queries),
            **_torch(self.keys, self.values, self.queries),
        }
        self.once: dict[str, Run] = {  # far too slow for bursts
            "querybatch": lambda: (
                clients["resp"].attend_querybatch(self.queries, self.keys, self.values).out
            )
        }

    def _query(self, client: Client, sid: bytes) -> Run:
        return lambda: client.attend_query(sid, 0, self.queries).out

    def _fused(self, client: Client, sid: bytes, suffix: Any) -> Run:
        return lambda: client.attend_query_fused(sid, 0, self.queries, *suffix)

    def check(self) -> None:
        """All but the fused ones compute the same."""
        expected = oracle(self.queries, self.keys, self.values)
        for name, run in {**self.runs, **self.once}.items():
            if not name.startswith("fused"):
                np.testing.assert_allclose(np.asarray(run()), expected, atol=1e-4, err_msg=name)


def oracle(queries: Floats, keys: Floats, values: Floats) -> np.ndarray[Any, np.dtype[np.float64]]:
    scores = queries.astype(np.float64) @ keys.transpose(0, 2, 1) / np.sqrt(queries.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    attended: np.ndarray[Any, np.dtype[np.float64]] = weights @ values
    attended /= weights.sum(-1, keepdims=True)
    return attended


def _mlx(keys: Floats, values: Floats, queries: Floats) -> Run:
    import mlx.core as mx

    q, k, v = (mx.array(each[None]) for each in (queries, keys, values))
    mx.eval(q, k, v)

    def run() -> Any:
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=queries.shape[-1] ** -0.5)
        mx.eval(out)
        return out[0]

    return run


def _torch(keys: Floats, values: Floats, queries: Floats) -> dict[str, Run]:
    """Nothing where torch is not installed."""
    try:
        import torch
    except ImportError:
        return {}
    q, k, v = (torch.from_numpy(each[None]) for each in (queries, keys, values))

    def run() -> Any:
        with torch.inference_mode():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)[0]

    return {"torch": run}


def measure(case: Case, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each peer, a sample a round; who begins changes, and the first is a
    warm-up."""
    samples: dict[str, list[float]] = {name: [] for name in (*case.runs, *case.once)}
    names = list(samples)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            run, burst = (case.once | case.runs)[name], 1 if name in case.once else BURST
            with _threads(name):
                took = statistics.median(harness.timed(run) for _ in range(burst))
            if number:
                samples[name].append(1e3 * took)
    return samples


def _threads(name: str) -> contextlib.AbstractContextManager[object]:
    """Our own kernel runs with one thread in the server."""
    one = name == "kernel"
    return threadpool_limits(limits=1, user_api="blas") if one else contextlib.nullcontext()


def figures_of(samples: dict[str, list[float]], store_ms: float) -> dict[str, Any]:
    above = [end - alone for end, alone in zip(samples["resp"], samples["kernel"], strict=True)]
    return {
        "query_vs_mlx_raw": harness.ratio(samples["resp"], samples["mlx"]),
        "query_minus_kernel_ms": round(statistics.median(above), 4),
        "prefix_vs_querybatch": harness.ratio(samples["querybatch"], samples["resp"]),
        "fastlane_vs_resp": harness.ratio(samples["fused fast"], samples["fused resp"]),
        "store_ms": round(store_ms, 2),
        "ms": {name: harness.summary(each) for name, each in samples.items()},
    }


@contextlib.contextmanager
def server() -> Iterator[dict[str, Client]]:
    """A client for each way to one server."""
    with (
        tempfile.TemporaryDirectory(prefix="pion-") as folder,
        harness.pion("--attention", "numpy", "--unixsocket", f"{folder}/socket") as port,
        Client(f"pion://127.0.0.1:{port}", timeout=60) as resp,
        Client(f"pion+fast://127.0.0.1:{port + 1}", timeout=60) as fast,
        Client(f"pion+unix://{folder}/socket", timeout=60) as unix,
    ):
        yield dict(zip(LANES, (resp, fast, unix), strict=True))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--json", type=Path, default=harness.default_path("attention"))
    chosen = options.parse_args()
    blas = load_fast_blas()  # before mlx is imported
    cases: dict[str, Any] = {}
    with server() as clients:
        for head_dim, queries in product(HEAD_DIMS, QUERIES):
            case = Case(clients, head_dim, queries)
            case.check()
            cases[case.name] = figures_of(measure(case, chosen.rounds), case.store_ms)
            print(case.name, {key: each for key, each in cases[case.name].items() if key != "ms"})
    keys = [key for key in cases[HEADLINE] if key not in ("store_ms", "ms")]
    harness.write(
        chosen.json,
        {
            **{key: cases[HEADLINE][key] for key in keys},
            "heads": HEADS,
            "tokens": TOKENS,
            "fast_blas_of_mlx": blas,
            "cases": cases,
        },
    )
    peers = [name for name in cases[HEADLINE]["ms"] if not name.startswith("fused")]
    series: dict[str, Sequence[float]]
    series = {name: [each["ms"][name]["median"] for each in cases.values()] for name in peers}
    title = f"Attention over {TOKENS:,} tokens, {HEADS} heads, fp32"
    harness.bars(chosen.json, title, "milliseconds (median)", list(cases), series, "log")


if __name__ == "__main__":
    main()
