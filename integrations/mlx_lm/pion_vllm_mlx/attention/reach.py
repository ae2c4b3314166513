"""Whether the patch reaches every layer of a model that keeps rows: found out by running it.

A list of model names would be wrong with the next version of mlx-lm. So a short step runs on
caches that take part in attention as a SuffixCache does, and complain where they are passed by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import mlx.core as mx

from pion_vllm_mlx.attention.held import mapped
from pion_vllm_mlx.attention.suffix import (
    Query,
    SuffixCache,
    UnsupportedAttentionError,
    plain,
)
from pion_vllm_mlx.caches import Part
from pion_vllm_mlx.layout import Layout
from pion_vllm_mlx.model import Cache, Model


class Probe(SuffixCache):
    """Behind an empty prefix; attention is mlx's own.

    The model is given NaN for keys: whatever it does with them but to pass them to our attention
    shows in what it answers. Nor may it look into the cache.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self.sinks = False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._keys, rows = super().update_and_fetch(keys, values)
        self._given = mx.full(self._keys.shape, mx.nan, self._keys.dtype)
        return self._given, rows

    def keys_and_values(self) -> NoReturn:
        raise UnsupportedAttentionError("it reads the rows of a cache")

    keys = values = state = property(keys_and_values)

    def _attend(self, query: Query) -> mx.array:
        self.sinks = query.sinks is not None
        return plain(query._replace(keys=self._keys))


def suffixed(
    caches: list[Cache], layout: Layout, make: Callable[[int], SuffixCache]
) -> list[Cache]:
    """Empty `caches` with `make(i)` in the place of the i-th that rows are kept of."""
    rest, count = iter(layout.leaves), iter(range(len(layout.leaves)))

    def change(cache: Cache) -> Cache:
        leaf = next(rest)
        return make(next(count)) if leaf.part is Part.ROWS and leaf.used else cache

    return mapped(caches, change)


def check_reach(model: Model, caches: list[Cache], layout: Layout) -> bool:
    """Raise UnsupportedAttentionError, naming the model, where the patch does not reach it; whether
    its attention has sinks.

    `caches` are empty ones of the model; the patch has to be installed.
    """
    probes: list[Probe] = []

    def probe(_: int) -> Probe:
        probes.append(Probe())
        return probes[-1]

    caches = suffixed(caches, layout, probe)
    try:
        if mx.isnan(model(mx.array([[0, 0]]), cache=caches)).any().item():
            raise UnsupportedAttentionError("it uses the keys of a layer elsewhere, too")
    except Exception as error:
        name = model.__class__.__module__.removeprefix("mlx_lm.models.")
        raise UnsupportedAttentionError(
            f"the attention of {name} cannot be computed elsewhere ({error}); its prefixes can be "
            "restored with get_or_prefill, and continued in the process that holds them"
        ) from error
    return any(each.sinks for each in probes)
