"""Pion for mlx-lm: prompt caches that any process gets back instead of prefilling again.

Importing the package alone does not import mlx: on a Linux CPU a fast BLAS must be in the process
first (blas.py), and the first use of a name from here takes care of that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pion_vllm_mlx.attention.sparse import Sparse
    from pion_vllm_mlx.attention.stage2 import PrefixUnavailableError
    from pion_vllm_mlx.attention.suffix import UnsupportedAttentionError
    from pion_vllm_mlx.blas import load_fast_blas
    from pion_vllm_mlx.mlx_lm_patch import (
        install_pion_attention_patch,
        make_pion_prompt_cache,
        uninstall_pion_attention_patch,
    )
    from pion_vllm_mlx.prefix_store import PrefixStore
    from pion_vllm_mlx.prompt_cache import PionPromptCache, UnsupportedCacheError

__all__ = [
    "PionPromptCache",
    "PrefixStore",
    "PrefixUnavailableError",
    "Sparse",
    "UnsupportedAttentionError",
    "UnsupportedCacheError",
    "install_pion_attention_patch",
    "load_fast_blas",
    "make_pion_prompt_cache",
    "uninstall_pion_attention_patch",
]

# The module that each name which needs mlx comes from.
_MODULES = {
    "PionPromptCache": "prompt_cache",
    "PrefixStore": "prefix_store",
    "PrefixUnavailableError": "attention.stage2",
    "Sparse": "attention.sparse",
    "UnsupportedAttentionError": "attention.suffix",
    "UnsupportedCacheError": "model",
    "install_pion_attention_patch": "mlx_lm_patch",
    "make_pion_prompt_cache": "mlx_lm_patch",
    "uninstall_pion_attention_patch": "mlx_lm_patch",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pion_vllm_mlx.blas import load_fast_blas

    if name == "load_fast_blas":
        return load_fast_blas
    load_fast_blas()
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
