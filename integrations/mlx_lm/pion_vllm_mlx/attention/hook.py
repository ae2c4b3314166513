"""The patch of mlx-lm's attention.

mlx-lm's models import `scaled_dot_product_attention` by name, so it is replaced in every module of
mlx_lm.models that has it; in `base` as well, where modules that are loaded later find it. What is
called with another cache than ours goes on to mlx-lm's own, in any thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from pion_vllm_mlx.attention.suffix import Mask, Query, SuffixCache

NAME = "scaled_dot_product_attention"
_original: Callable[..., mx.array] | None = None  # mlx-lm's, from the first time on


def pion_scaled_dot_product_attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Mask,
    sinks: mx.array | None = None,
) -> mx.array:
    """In the place of mlx-lm's function of that name, with its parameters."""
    if isinstance(cache, SuffixCache):
        return cache.attend(Query(queries, keys, values, mask, scale, sinks))
    assert _original is not None  # else nobody would call this
    return _original(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)


def install_pion_attention_patch() -> None:
    """Replace mlx-lm's attention function in all of its models. To do it again changes nothing."""
    global _original
    if _original is None:
        _original = getattr(base, NAME)
    _rebind(_original, pion_scaled_dot_product_attention)


def uninstall_pion_attention_patch() -> None:
    """Put mlx-lm's attention function back everywhere."""
    if _original is not None:
        _rebind(pion_scaled_dot_product_attention, _original)


def is_installed() -> bool:
    """Whether the patch is in place."""
    return getattr(base, NAME) is pion_scaled_dot_product_attention


def _rebind(old: object, new: object) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and getattr(module, NAME, None) is old:
            setattr(module, NAME, new)
