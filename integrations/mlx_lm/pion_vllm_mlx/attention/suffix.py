"""SuffixCache: a layer's cache that keeps the tokens after a prefix, whose K/V lie elsewhere.

mlx-lm's models compute attention through one function, which `install_pion_attention_patch()`
replaces: where the cache is a SuffixCache, it is asked (`attend`), and any other call goes on to
mlx-lm's own. To the model, such a cache has seen prefix and suffix (`offset`, for positions), but
its rows and masks are those of the suffix: "causal" is aligned to the last row, so it means the
same. It has no `merge`, so it is for one sequence at a time, and no `bits`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from pion_vllm_mlx.model import Cache

# None, "causal", or booleans, (M, S) with or without leading axes of 1.
Mask: TypeAlias = mx.array | str | None


class UnsupportedAttentionError(Exception):
    """The model computes attention in a way that the patch does not reach."""


class Query(NamedTuple):
    """One call of a model's attention: `queries` (1, H_q, M, D), `keys` and `values` of the suffix,
    (1, H_kv, S, D), whose last M tokens are those of the queries; `sinks` (H_q,)."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    mask: Mask
    scale: float
    sinks: mx.array | None


def plain(query: Query) -> mx.array:
    """mlx's own attention."""
    queries, keys, values, mask, scale, sinks = query
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks
    )


class SuffixCache(ABC):
    """In the place of a KVCache that has seen the `tokens` tokens of a prefix."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._suffix: Cache = KVCache()  # type: ignore[no-untyped-call]
        self._given: mx.array | None = None  # the keys that the model is to attend to next

    def attend(self, query: Query) -> mx.array:
        """Attention over prefix and suffix, (1, H_q, M, D) of the queries' dtype.

        Raises UnsupportedAttentionError where the model asks for something else.
        """
        if len(query.queries) != 1:
            raise UnsupportedAttentionError("it runs several sequences at a time")
        if query.keys is not self._given:
            raise UnsupportedAttentionError("it attends to other keys than its cache gave it")
        rows = query.queries.shape[2] * query.keys.shape[2]
        if isinstance(query.mask, mx.array) and (
            query.mask.dtype != mx.bool_ or query.mask.size != rows
        ):
            raise UnsupportedAttentionError("it brings a mask that is not that of its cache")
        self._given = None
        return self._attend(query)

    @abstractmethod
    def _attend(self, query: Query) -> mx.array:
        """The same, of a query that was checked."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append K and V; all rows of the suffix."""
        if self._given is not None:
            raise UnsupportedAttentionError(
                "it does not use mlx-lm's attention function, or the patch was taken away"
            )
        self._given, rows = self._suffix.update_and_fetch(keys, values)
        return self._given, rows

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> Mask:
        """The mask of `count` new tokens over the suffix; a window would reach into the prefix."""
        if window_size is not None:
            raise UnsupportedAttentionError("a layer that keeps all rows sees some of them only")
        mask: Mask = self._suffix.make_mask(count, return_array=return_array, window_size=None)
        return mask

    @property
    def offset(self) -> int:
        """Tokens seen, those of the prefix included."""
        return self._tokens + int(self._suffix.offset)

    @property
    def keys(self) -> mx.array | None:
        """The suffix's buffer, as a KVCache has it."""
        keys: mx.array | None = self._suffix.keys
        return keys

    @property
    def values(self) -> mx.array | None:
        """The suffix's buffer, as a KVCache has it."""
        values: mx.array | None = self._suffix.values
        return values

    @property
    def state(self) -> Any:
        """What is to be evaluated. A prompt file of it would not hold the prefix."""
        return [] if self._suffix.empty() else [self.keys, self.values]

    @property
    def nbytes(self) -> int:
        """Bytes of the suffix."""
        return int(self._suffix.nbytes)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All rows of the suffix."""
        rows: tuple[mx.array, mx.array] = self._suffix.keys_and_values()
        return rows

    def size(self) -> int:
        """Tokens seen."""
        return self.offset

    def empty(self) -> bool:
        """There is a prefix."""
        return False

    def is_trimmable(self) -> bool:
        """Into the prefix, too."""
        return True

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens, or all; how many that were."""
        trimmed = int(self._suffix.trim(n))
        hidden = min(n - trimmed, self._tokens)
        self._tokens -= hidden
        return trimmed + hidden
