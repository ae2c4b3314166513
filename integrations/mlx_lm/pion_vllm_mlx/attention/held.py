"""Prefixes that stay in the process as MLX arrays: to continue one costs neither wire nor copy.

A Held prefix gives caches of mlx-lm's own classes. The rows of a KVCache lie in a buffer with room
behind them, and the first cache that is written to borrows it: its rows go behind the prefix, in
place, as in any KVCache. While it is alive others copy the prefix at their first write, and when it
is gone the next one borrows. Rows of the prefix never change. Recurrent states and sliding windows
are small, and copied.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from pion_vllm_mlx.attention.blocks import block_means
from pion_vllm_mlx.caches import State, evaluate, kind_of, leaves
from pion_vllm_mlx.model import Cache


class Rows:
    """K and V of one layer, (1, H, T, D) with T >= `tokens`; what is behind may be anyone's."""

    def __init__(self, cache: Cache) -> None:
        self.keys: mx.array = cache.keys
        self.values: mx.array = cache.values
        self.tokens = int(cache.offset)
        self._borrower: weakref.ref[LentKVCache] | None = None
        self._means: tuple[int, mx.array] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return self.keys.nbytes + self.values.nbytes

    def views(self) -> tuple[mx.array, mx.array]:
        """K and V of the prefix; to write to them copies them."""
        return self.keys[..., : self.tokens, :], self.values[..., : self.tokens, :]

    def means(self, block: int) -> mx.array:
        """The mean key of each `block` tokens, (H, blocks, D); kept for the next one who asks."""
        if self._means is None or self._means[0] != block:
            means = block_means(self.views()[0][0], block)
            mx.eval(means)
            self._means = block, means
        return self._means[1]

    def lend(self, cache: LentKVCache) -> tuple[mx.array, mx.array]:
        """The buffers, to be written behind the prefix; views where they are lent already."""
        if self._borrower is not None and self._borrower() is not None:
            return self.views()
        self._borrower = weakref.ref(cache)
        return self.keys, self.values

    def __deepcopy__(self, _: object) -> Rows:
        return self


class LentKVCache(KVCache):
    """A KVCache that continues a held prefix."""

    keys: Any
    values: Any

    def __init__(self, rows: Rows) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows = rows
        self.keys, self.values = rows.views()
        self._untouched: mx.array | None = self.keys
        self.offset = rows.tokens

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """As KVCache does it, without a copy of the prefix where that is possible."""
        rows = self._rows
        if self.offset < rows.tokens:  # trimmed into the prefix: what comes now is ours alone
            self.keys = self.keys[..., : self.offset, :]
            self.values = self.values[..., : self.offset, :]
        elif self.keys is self._untouched:
            self.keys, self.values = rows.lend(self)
        self._untouched = None
        borrowed = self.keys is rows.keys
        found = super().update_and_fetch(keys, values)  # type: ignore[no-untyped-call]
        if borrowed:  # the buffers may have grown
            rows.keys, rows.values = self.keys, self.values
        return found  # type: ignore[no-any-return]


# A cache that mlx-lm saves by the name of its class has to load as what it is.
LentKVCache.__name__ = KVCache.__name__


class Held:
    """The caches of one prefix of `tokens` tokens, taken over from `caches`, which hold it."""

    def __init__(self, caches: Sequence[Cache], tokens: int, fingerprint: str) -> None:
        evaluate(caches)
        self.tokens = tokens
        self.fingerprint = fingerprint
        self.leaves = [_taken(cache) for cache in leaves(caches)]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(
            leaf.nbytes if isinstance(leaf, Rows) else sum(a.nbytes for a in leaf if a is not None)
            for leaf in self.leaves
        )

    def caches(
        self, empty: Sequence[Cache], continued: Callable[[Rows], Cache] = LentKVCache
    ) -> list[Cache]:
        """Caches that hold the prefix, made of `empty` ones; rows become what `continued` makes
        of them."""
        taken = iter(self.leaves)
        return mapped(empty, lambda cache: _given(cache, next(taken), self.tokens, continued))


def mapped(caches: Iterable[Cache], change: Callable[[Cache], Cache]) -> list[Cache]:
    """`caches` with every leaf replaced by `change` of it."""
    return [
        _list(mapped(cache.caches, change)) if type(cache) is CacheList else change(cache)
        for cache in caches
    ]


def _list(caches: list[Cache]) -> Cache:
    return CacheList(*caches)  # type: ignore[no-untyped-call]


def _taken(cache: Cache) -> Rows | State:
    kind = kind_of(cache)
    if type(cache) is KVCache and kind.tokens(cache):
        return Rows(cache)
    if kind.state is not None:
        return kind.state(cache)
    return [] if cache.empty() or kind.rows is None else list(kind.rows(cache))


def _given(
    cache: Cache, taken: Rows | State, tokens: int, continued: Callable[[Rows], Cache]
) -> Cache:
    if isinstance(taken, Rows):
        return continued(taken)
    kind = kind_of(cache)
    arrays = [None if array is None else mx.array(array) for array in taken]
    if kind.set_state is not None:
        kind.set_state(cache, arrays)
    elif arrays and kind.set_rows is not None:
        kind.set_rows(cache, [array for array in arrays if array is not None], tokens)
    return cache


class Shelf:
    """Held prefixes by namespace, at most `limit` bytes; the least recently used go first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[str, Held] = OrderedDict()

    def put(self, namespace: str, held: Held) -> None:
        """Hold a prefix, in the place of the one of that name."""
        self._held[namespace] = held
        self._held.move_to_end(namespace)
        nbytes = sum(each.nbytes for each in self._held.values())
        while nbytes > self._limit:
            _, oldest = self._held.popitem(last=False)
            nbytes -= oldest.nbytes

    def get(self, namespace: str) -> Held | None:
        """What is held under that name."""
        if namespace in self._held:
            self._held.move_to_end(namespace)
        return self._held.get(namespace)
