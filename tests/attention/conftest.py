"""A server to ask, K/V to ask about, and the oracle: softmax in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pion_server.client import Client

SECONDS = 60.0
Array = npt.NDArray[Any]


def oracle(
    queries: Array, keys: Array, values: Array, head_map: Any = None, seen: Any = None
) -> tuple[Array, Array]:
    """Attention of queries (H_q, M, D) over (H, N, D): out (H_q, M, D) and LSE (H_q, M), float64.
    `seen`, bool and broadcast to (H_q, M, N), says which rows a query sees."""
    heads = np.arange(len(queries)) if head_map is None else np.asarray(head_map, int)
    k, v = (np.asarray(side, np.float64)[heads] for side in (keys, values))
    scores = np.einsum("hmd,hnd->hmn", np.asarray(queries, np.float64), k)
    scores /= np.sqrt(queries.shape[-1])
    if seen is not None:
        scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-1e300)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(total > 0, np.einsum("hmn,hnd->hmd", weights / total, v), 0)
        return out, np.where(total > 0, np.log(total) + top, -np.inf)[..., 0]


def even(query_heads: int, heads: int) -> Array:
    """The head map of equal groups."""
    return np.repeat(np.arange(heads, dtype=np.uint8), query_heads // heads)


def near(got: Array, wanted: Array, error: float = 2e-5) -> None:
    """fp32 results against float64 ones: cosine and largest error."""
    assert got.shape == wanted.shape
    assert got.dtype == np.float32
    a, b = got.astype(np.float64).ravel(), wanted.ravel()
    assert a @ b >= 0.9999 * np.linalg.norm(a) * np.linalg.norm(b)
    assert np.abs(a - b).max() <= error * max(1.0, np.abs(b).max())


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


_names = itertools.count()


@pytest.fixture
def sid() -> str:
    """A session id that nobody has used."""
    return f"attention-{next(_names)}"


@pytest.fixture(scope="session")
def client(pion_server: Any) -> Iterator[Client]:
    """One connection to the shared server."""
    with Client(pion_server.url, timeout=SECONDS) as client:
        yield client


@pytest.fixture
def connect(start_pion: Callable[..., Any]) -> Iterator[Callable[..., Client]]:
    """connect("--attend-slots", "3"): a server of one's own, and a connection to it."""
    clients: list[Client] = []

    def connect(*options: str) -> Client:
        clients.append(Client(start_pion(*options).url, timeout=SECONDS))
        return clients[-1]

    yield connect
    for each in clients:
        each.close()
