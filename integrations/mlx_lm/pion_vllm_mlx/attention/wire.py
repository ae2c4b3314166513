"""A prefix at a pion-server: queries go there, and what comes back is merged with the suffix here.

For every layer of a step, the queries are evaluated, since MLX cannot call out while it computes.
Only they travel, (H_q, M, D), however long prefix and suffix are; the suffix's rows stay lazy.

If the server fails in the midst of an answer, the prefix is fetched from it as rows, or prefilled
again where even that fails, and the answer goes on in this process. It does as well where a cache
is trimmed into its prefix: the server always attends to all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import mlx.core as mx
import numpy as np

from pion_server.client import calls
from pion_vllm_mlx.attention.lane import Lane, Target
from pion_vllm_mlx.attention.merge import Partial, merged, rows_of, visible
from pion_vllm_mlx.attention.sparse import Sparse
from pion_vllm_mlx.attention.suffix import Query, SuffixCache, plain
from pion_vllm_mlx.remote import Unavailable

Sides = list[mx.array]


class WirePrefix:
    """One prefix of `tokens` tokens, for all layers. `recover` gives K and V of every layer, (1, H,
    N, D) each, when the server does not answer; what it raises reaches who runs the model."""

    def __init__(
        self, lane: Lane, target: Target, tokens: int, recover: Callable[[], Sides]
    ) -> None:
        self.lane = lane
        self.target = target
        self.tokens = tokens
        self._recover = recover
        self.sides: Sides | None = None  # once it was recovered

    def recovered(self) -> Sides:
        """K and V of every layer, in this process."""
        if self.sides is None:
            self.sides = self._recover()
        return self.sides

    def __deepcopy__(self, _: object) -> WirePrefix:
        return self


class WireCache(SuffixCache):
    """The layer `layer` of those that rows are kept of."""

    def __init__(self, prefix: WirePrefix, layer: int) -> None:
        super().__init__(prefix.tokens)
        self._prefix = prefix
        self._layer = layer

    def _attend(self, query: Query) -> mx.array:
        if self._prefix.sides is None and self._tokens == self._prefix.tokens:
            with suppress(Unavailable):
                return self._ask(query)
        # The server failed, or the cache was trimmed into the prefix, which the server has whole.
        keys, values = self._prefix.recovered()[2 * self._layer :][:2]
        return continued(query, keys[..., : self._tokens, :], values[..., : self._tokens, :])

    def _ask(self, query: Query) -> mx.array:
        rows = rows_of(query)
        target = self._prefix.target
        sent = np.asarray(rows * target.dim**0.5)  # the server scales by its inverse
        count = sent.shape[1]
        if count == 1:
            sent = sent.repeat(2, axis=1)  # since an LSE comes with two or more only
        call = calls.attend_query(target.sid, self._layer, sent)
        ((out, lse),) = self._prefix.lane.ask(target, [call])
        prefix = Partial(mx.array(out[:, :count]), mx.array(lse[:, :count]))
        return merged(query, rows, prefix)


class SparseWireCache(WireCache):
    """Each query sees the blocks of the prefix that fit it best, which the server picks.

    It merges as well, so the suffix travels with every query.
    """

    def __init__(self, prefix: WirePrefix, layer: int, sparse: Sparse) -> None:
        super().__init__(prefix, layer)
        self._sparse = sparse

    def _ask(self, query: Query) -> mx.array:
        target = self._prefix.target
        scaled = query.queries[0].astype(mx.float32) * (query.scale * target.dim**0.5)
        queries, keys, values = (
            np.asarray(side) for side in (scaled, *(_wide(s) for s in (query.keys, query.values)))
        )
        head_map = np.arange(len(queries), dtype=np.uint8) // (len(queries) // len(keys))
        requests = [
            calls.attend_query_sparse_auto_fused(
                target.sid,
                self._layer,
                queries[:, number : number + 1],
                keys[:, seen],
                values[:, seen],
                head_map,
                block=self._sparse.block,
                top_blocks=self._sparse.blocks,
            )
            for number, seen in enumerate(np.asarray(visible(query)))
        ]
        outs = self._prefix.lane.ask(target, requests)
        return mx.array(np.concatenate(outs, axis=1))[None].astype(query.queries.dtype)


def _wide(side: mx.array) -> mx.array:
    return side[0].astype(mx.float32)


def continued(query: Query, keys: mx.array, values: mx.array) -> mx.array:
    """Attention over `keys` and `values` of a prefix, (1, H_kv, N, D) each, and the suffix."""
    mask = query.mask
    if isinstance(mask, mx.array):
        whole = mx.ones((query.queries.shape[2], keys.shape[2]), mx.bool_)
        mask = mx.concatenate([whole, visible(query)], axis=-1)
    return plain(
        query._replace(
            keys=mx.concatenate([keys, query.keys], axis=2),
            values=mx.concatenate([values, query.values], axis=2),
            mask=mask,
        )
    )
