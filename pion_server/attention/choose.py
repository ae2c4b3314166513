"""The backend of a name, for the machine that this is."""

from __future__ import annotations

from threadpoolctl import threadpool_limits

from pion_server.attention.base import AttentionBackend
from pion_server.attention.numpy_backend import NumpyBackend


def choose(name: str, *, fp16: bool = False) -> AttentionBackend:
    """`numpy`, `mlx`, or `auto`: MLX where it has a GPU, numpy where it has not (it is faster on a
    CPU). `fp16` keeps K/V in half the memory. ImportError: mlx asked for and not installed.

    With numpy, BLAS has one thread in this process from now on: its threads wait for work by
    spinning, and a server has other work for its cores."""
    if name == "mlx" or (name == "auto" and _mlx_has_a_gpu()):
        from pion_server.attention.mlx_backend import MlxBackend

        return MlxBackend(fp16)
    threadpool_limits(limits=1, user_api="blas")
    return NumpyBackend(fp16)


def _mlx_has_a_gpu() -> bool:
    try:
        from pion_server.attention.mlx_backend import has_a_gpu
    except ImportError:  # mlx is not installed, or is that of another machine
        return False
    return has_a_gpu()
