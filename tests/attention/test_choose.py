"""Invariant: --attention names a backend; auto is MLX where MLX has a GPU, and numpy elsewhere."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In processes of their own: a choice sets the threads of BLAS for the process that makes it.
SAYS = """
import sys
from threadpoolctl import threadpool_info
{before}
from pion_server.attention.choose import choose
backend = choose({name!r}, fp16={fp16})
threads = {{blas["num_threads"] for blas in threadpool_info()}}
print(backend.name, "mlx.core" in sys.modules, threads)
"""
WITH_A_GPU = """
import mlx.core as mx
mx.default_device = lambda: mx.Device(mx.gpu)
"""
WITHOUT_MLX = "sys.modules['mlx'] = None"
ON_A_CPU = "import mlx.core as mx; mx.set_default_device(mx.cpu)"
WITH_BROKEN_MLX = "sys.modules['mlx.core'] = None"


def says(name: str, before: str = "", fp16: bool = False) -> str:
    code = SAYS.format(before=before, name=name, fp16=fp16)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("fp16", [False, True])
def test_numpy_leaves_mlx_alone_and_gives_blas_one_thread(fp16: bool) -> None:
    assert says("numpy", fp16=fp16) == "numpy False {1}"


def test_mlx_is_taken_where_it_is_asked_for() -> None:
    assert says("mlx").startswith("mlx True")


def test_auto_on_a_gpu_is_mlx() -> None:
    assert says("auto", before=WITH_A_GPU).startswith("mlx True")


@pytest.mark.parametrize("before", [ON_A_CPU, WITHOUT_MLX, WITH_BROKEN_MLX])
def test_auto_without_a_gpu_is_numpy(before: str) -> None:
    assert says("auto", before=before).startswith("numpy")
