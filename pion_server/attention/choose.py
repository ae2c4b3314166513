"""The backend of a name, for the machine that this is."""

from __future__ import annotations

from importlib.util import find_spec

from pion_server.attention.base import AttentionBackend
from pion_server.attention.numpy_backend import NumpyBackend
from pion_server.errors import PionError


def choose(name: str, *, fp16: bool = False) -> AttentionBackend:
    """`numpy`, `mlx`, or `auto`: MLX where it has a GPU, numpy where it has not (it is faster on a
    CPU). `fp16` keeps K/V in half the memory. PionError: mlx asked for and not installed."""
    mlx_is_here = find_spec("mlx") is not None
    if name == "mlx" and not mlx_is_here:
        raise PionError("--attention mlx needs the package mlx: pip install 'pion-kv[mlx]'")
    if name == "mlx" or (name == "auto" and mlx_is_here and _mlx_has_a_gpu()):
        from pion_server.attention.mlx_backend import MlxBackend

        return MlxBackend(fp16)
    return NumpyBackend(fp16)


def _mlx_has_a_gpu() -> bool:
    try:
        import mlx.core as mx
    except ImportError:  # installed for another machine, or without its native part
        return False
    return bool(mx.default_device() == mx.Device(mx.gpu))
