"""What attention must be: softmax in float64, and how far fp32 may be from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from pion_server.attention.base import AttentionBackend, Floats, Heads, Partial, Spans

EPSILON = float(np.finfo(np.float32).eps)
COSINE = 0.9999
BACKENDS = ["numpy", "numpy fp16", "mlx", "mlx fp16"]

Doubles = npt.NDArray[np.float64]


def make(backend: str) -> AttentionBackend:
    """mlx is imported here, and not before another test has had its chance to load a fast BLAS."""
    name, _, fp16 = backend.partition(" ")
    if name == "mlx":
        from pion_server.attention.mlx_backend import MlxBackend

        return MlxBackend(bool(fp16))
    from pion_server.attention.numpy_backend import NumpyBackend

    return NumpyBackend(bool(fp16))


def as_kept(backend: str, rows: Floats) -> Floats:
    """K or V as that backend keeps it; its mathematics has to be exact over those."""
    if backend.endswith("fp16"):
        return np.clip(rows, -65504, 65504).astype(np.float16).astype(np.float32)
    return rows


def attention(
    queries: Floats, keys: Floats, values: Floats, head_map: Heads, seen: Any = True
) -> tuple[Doubles, Doubles]:
    """Queries (H_q, M, D) over K and V (H, N, D): out (H_q, M, D), LSE (H_q, M). `seen`, bool and
    broadcast to (H_q, M, N), says which rows a query sees."""
    k, v = (side.astype(np.float64)[head_map] for side in (keys, values))
    scores = queries.astype(np.float64) @ k.swapaxes(1, 2) / np.sqrt(queries.shape[-1])
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-1e300)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    out = weights @ v / np.where(total > 0, total, 1)
    with np.errstate(divide="ignore"):
        return out, (np.log(total) + top)[..., 0]


def inside(spans: Spans, rows: int) -> npt.NDArray[np.bool_]:
    """Spans (M, 2) as a mask (M, rows)."""
    row = np.arange(rows)
    return (spans[:, :1] <= row) & (row < spans[:, 1:])


def assert_near(
    got: Partial,
    wanted: tuple[Doubles, Doubles],
    queries: Floats,
    keys: Floats,
    values: Floats,
) -> None:
    """A score is a sum of D products: rounded, it is off by a few units in the last place of the
    sum of their magnitudes. That error e is in the LSE, and e times the largest value in the
    output."""
    out, lse = wanted
    dim = queries.shape[-1]
    magnitude = np.abs(queries).sum(-1).max() * np.abs(keys).max(initial=0) / np.sqrt(dim)
    error = 8 * EPSILON * (1 + float(magnitude))
    assert got.out.dtype == got.lse.dtype == np.float32
    assert got.out.shape == out.shape
    assert got.lse.shape == lse.shape
    blind = np.isneginf(lse)
    assert (np.isneginf(got.lse) == blind).all()
    assert (got.out[blind] == 0).all()
    assert np.abs(got.lse[~blind] - lse[~blind]).max(initial=0) <= error
    assert np.abs(got.out - out).max() <= error * np.abs(values).max(initial=0) + 1e-30
    assert cosine(got.out, out) >= COSINE


def cosine(got: Floats, wanted: Doubles) -> float:
    a, b = got.astype(np.float64).ravel(), wanted.ravel()
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return 1.0 if norms == 0 else float(a @ b) / norms


def normal(seed: int, *shape: int, scale: float = 1.0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)


@st.composite
def head_maps(draw: st.DrawFn, kv_heads: int) -> Heads:
    """Any map: K/V heads in any order, some of them unused."""
    heads = draw(st.lists(st.integers(0, kv_heads - 1), min_size=1, max_size=9))
    return np.array(heads, np.uint8)


@st.composite
def spans(draw: st.DrawFn, queries: int, rows: int) -> Spans:
    """A span for each query, some of them empty."""
    ends = st.tuples(st.integers(0, rows), st.integers(0, rows)).map(sorted)
    return np.array(draw(st.lists(ends, min_size=queries, max_size=queries)))
