"""From stored rows to attention state: one layer of a namespace, as it is when it is looked at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pion_server.attention.base import Floats
from pion_server.attention.engine import Cost
from pion_server.store.layer import Extent
from pion_server.store.prefixes import Prefix
from pion_server.store.store import Store
from pion_server.store.views import RowView


@dataclass(frozen=True, slots=True)
class LayerRows:
    """K and V of the first `tokens` tokens, by reference: what happens to the namespace afterwards
    does not change them, and current() tells it."""

    prefix: Prefix
    layer: int
    keys: RowView
    values: RowView
    _runs: tuple[tuple[Extent, ...], ...]  # of both sides; a write makes others

    @classmethod
    def of(cls, prefix: Prefix, layer: int, tokens: int) -> LayerRows:
        """Raises PionError where a row or the layer is missing."""
        keys, values = (side.view(layer, 0, tokens) for side in (prefix.keys, prefix.values))
        return cls(prefix, layer, keys, values, _runs_of(prefix, layer))

    @property
    def cost(self) -> Cost:
        """Of heads(), and of keeping what it makes."""
        views = self.keys, self.values
        count = sum(view.nbytes // view.format.row_bytes * view.format.dim for view in views)
        return Cost(nbytes=64 * count)

    def heads(self, count: int, dim: int) -> tuple[Floats, Floats]:
        """K and V as fp32 (count, N, dim)."""
        return _heads(self.keys, count, dim), _heads(self.values, count, dim)

    def current(self, store: Store) -> bool:
        """Whether the store still holds just these."""
        held = store.prefixes.get(self.prefix.namespace)
        if held is not self.prefix:
            return False
        runs = _runs_of(held, self.layer)
        return all(now is then for now, then in zip(runs, self._runs, strict=True))


def _runs_of(prefix: Prefix, layer: int) -> tuple[tuple[Extent, ...], ...]:
    return tuple(side.layer(layer).runs() for side in (prefix.keys, prefix.values))


def _heads(view: RowView, count: int, dim: int) -> Floats:
    codec, row = view.format.codec, view.format.dim
    parts = [codec.decode(np.frombuffer(piece, np.uint8), row) for piece in view.pieces]
    rows = np.concatenate(parts) if len(parts) > 1 else parts[0]
    return np.ascontiguousarray(rows.reshape(-1, count, dim).transpose(1, 0, 2))
