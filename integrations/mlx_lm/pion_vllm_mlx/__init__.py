"""Pion for mlx-lm: prompt caches that any process gets back instead of prefilling again.

Importing the package alone does not import mlx: on a Linux CPU a fast BLAS must be in the process
first (blas.py), and the first use of a name from here takes care of that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pion_vllm_mlx.blas import load_fast_blas
    from pion_vllm_mlx.prefix_store import PrefixStore
    from pion_vllm_mlx.prompt_cache import PionPromptCache, UnsupportedCacheError

__all__ = ["PionPromptCache", "PrefixStore", "UnsupportedCacheError", "load_fast_blas"]

# The module that each name which needs mlx comes from.
_MODULES = {
    "PionPromptCache": "prompt_cache",
    "PrefixStore": "prefix_store",
    "UnsupportedCacheError": "model",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pion_vllm_mlx.blas import load_fast_blas

    if name == "load_fast_blas":
        return load_fast_blas
    load_fast_blas()
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
