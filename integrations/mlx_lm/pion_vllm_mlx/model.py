"""What Pion asks of an mlx-lm model and its caches. (mlx-lm itself has no types to go by.)"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache


class UnsupportedCacheError(Exception):
    """The model keeps a kind of cache, or of array, that cannot be restored from rows yet."""


class Model(Protocol):
    """A text model as `mlx_lm.load` returns it."""

    def __call__(self, inputs: mx.array, cache: Sequence[KVCache]) -> mx.array:
        """Token ids (1, T) -> logits (1, T, vocabulary); K and V are added to `cache`."""

    def parameters(self) -> dict[str, Any]:
        """Weights, nested by module."""

    def named_modules(self) -> Iterable[tuple[str, Any]]:
        """Every module below and including this one."""


def make_caches(model: Model) -> list[KVCache]:
    """Empty caches for `model`; raises UnsupportedCacheError where one is no plain KVCache."""
    caches: list[KVCache] = make_prompt_cache(model)
    others = sorted({type(cache).__name__ for cache in caches if type(cache) is not KVCache})
    if others:
        raise UnsupportedCacheError(
            f"{type(model).__module__} keeps {', '.join(others)}; Pion restores models whose "
            "caches are all plain KVCache so far"
        )
    return caches


def new_cache(keys: mx.array, values: mx.array) -> KVCache:
    """A cache that holds `keys` and `values`, both (1, heads, T, head_dim)."""
    # Not through from_state, which changed between versions of mlx-lm.
    cache = KVCache()  # type: ignore[no-untyped-call]
    cache.keys, cache.values, cache.offset = keys, values, keys.shape[2]
    return cache


def arrays(caches: Iterable[KVCache]) -> list[mx.array]:
    """K and V of layer 0, K and V of layer 1, ...: whole buffers, rows at `offset` on are junk."""
    found = [array for cache in caches for array in (cache.keys, cache.values)]
    if any(array is None for array in found):
        raise UnsupportedCacheError("the model leaves some of its caches empty")
    return found  # type: ignore[return-value]
