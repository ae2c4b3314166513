"""Pion for mlx-lm: prompt caches that any process gets back instead of prefilling again.

Importing the package alone does not import mlx: on a Linux CPU a fast BLAS must be in the process
first (blas.py), and the first use of a name from here takes care of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pion_vllm_mlx.blas import load_fast_blas
    from pion_vllm_mlx.prompt_cache import PionPromptCache, UnsupportedCacheError

__all__ = ["PionPromptCache", "UnsupportedCacheError", "load_fast_blas"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pion_vllm_mlx.blas import load_fast_blas

    if name == "load_fast_blas":
        return load_fast_blas
    load_fast_blas()
    from pion_vllm_mlx import prompt_cache

    return getattr(prompt_cache, name)
