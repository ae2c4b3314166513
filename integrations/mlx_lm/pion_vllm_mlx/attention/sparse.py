"""A prefix in the process of which each query sees only the blocks that fit it best.

Tokens of the prefix are taken in blocks; a query's score of a block is its product with the mean of
the block's keys, and it attends to the `blocks` best ones, each head for itself. The suffix is seen
whole. What a query does not see is an approximation: with as many blocks as there are, it is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from pion_vllm_mlx.attention.blocks import best
from pion_vllm_mlx.attention.held import Rows
from pion_vllm_mlx.attention.merge import Partial, merged, rows_of
from pion_vllm_mlx.attention.suffix import Query, SuffixCache, plain


@dataclass(frozen=True, slots=True)
class Sparse:
    """`block` tokens a block, and how many `blocks` of the prefix each query sees."""

    block: int = 64
    blocks: int = 8

    def __post_init__(self) -> None:
        if self.block < 1 or self.blocks < 1:
            raise ValueError(f"a query sees at least one block of one token, not {self}")


class SparseCache(SuffixCache):
    """One layer; `rows` are those of the prefix."""

    def __init__(self, rows: Rows, sparse: Sparse) -> None:
        super().__init__(rows.tokens)
        self._rows = rows
        self._sparse = sparse
        self._means = rows.means(sparse.block)

    def _attend(self, query: Query) -> mx.array:
        if not self._tokens:  # trimmed to nothing
            return plain(query)
        rows = rows_of(query)
        return merged(query, rows, self._partial(rows))

    def _partial(self, queries: mx.array) -> Partial:
        """Attention of (H_kv, R, D) over the blocks that each of them picks."""
        block, tokens = self._sparse.block, self._tokens
        chosen = best(queries @ self._means.swapaxes(-1, -2), self._sparse.blocks)
        numbers = (chosen[..., None] * block + mx.arange(block)).reshape(*queries.shape[:2], -1)
        there = numbers < tokens  # the last block may be short
        heads = mx.arange(len(queries))[:, None, None]
        keys, values = (
            side[0][heads, mx.minimum(numbers, tokens - 1)].astype(mx.float32)
            for side in (self._rows.keys, self._rows.values)
        )  # (H_kv, R, blocks * block, D)
        scores = mx.where(there, (keys @ queries[..., None])[..., 0], -mx.inf)
        lse = mx.logsumexp(scores, axis=-1)
        weights = mx.exp(scores - lse[..., None])[..., None, :]
        return Partial((weights @ values)[..., 0, :], lse)
