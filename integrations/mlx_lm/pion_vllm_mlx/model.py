"""What Pion asks of an mlx-lm model. (mlx-lm itself has no types to go by.)"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import mlx.core as mx

# One entry of the list that mlx-lm calls `prompt_cache`; caches.py knows the classes.
Cache: TypeAlias = Any


class UnsupportedCacheError(Exception):
    """The model keeps a class of cache, or a kind of array, that Pion does not know."""


class Model(Protocol):
    """A text model as `mlx_lm.load` returns it."""

    def __call__(self, inputs: mx.array, cache: Sequence[Cache]) -> mx.array:
        """Token ids (1, T) -> logits (1, T, vocabulary); what it keeps of them is in `cache`."""

    def parameters(self) -> dict[str, Any]:
        """Weights, nested by module."""

    def named_modules(self) -> Iterable[tuple[str, Any]]:
        """Every module below and including this one."""
