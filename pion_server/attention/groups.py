"""Query heads sorted by the K/V head that they share, so that one product serves them all."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pion_server.attention.base import Floats, Heads, Partial, Spans

Indices = npt.NDArray[np.intp]


class Groups(NamedTuple):
    """G is the most query heads that any K/V head has; where a K/V head has fewer, query head 0
    stands in, and what comes out for it is not used."""

    members: Indices  # (H, G): query heads of each K/V head
    heads: Indices  # (H_q,): where each query head is in `members`: its K/V head,
    places: Indices  # (H_q,): and which of that head's it is

    @classmethod
    def of(cls, head_map: Heads, kv_heads: int) -> Groups:
        """Those of a map; a model has one or two, and sorting one takes a tenth of a small
        query."""
        return _sorted(head_map.tobytes(), kv_heads)

    def gather(self, queries: Floats) -> Floats:
        """(H_q, M, D) -> (H, G * M, D)."""
        return queries[self.members].reshape(len(self.members), -1, queries.shape[-1])

    def spans(self, spans: Spans) -> Spans:
        """(M, 2) -> (G * M, 2)."""
        return np.tile(spans, (self.members.shape[1], 1))

    def scatter(self, out: Floats, lse: Floats) -> Partial:
        """(H, G * M, D) and (H, G * M) -> (H_q, M, D) and (H_q, M)."""
        shape = *self.members.shape, -1
        at = self.heads, self.places
        return Partial(out.reshape(*shape, out.shape[-1])[at], lse.reshape(shape)[at])


@lru_cache(maxsize=64)
def _sorted(head_map: bytes, kv_heads: int) -> Groups:
    heads = np.frombuffer(head_map, np.uint8).astype(np.intp)
    order = np.argsort(heads, kind="stable")
    counts = np.bincount(heads, minlength=kv_heads)
    places = np.empty_like(heads)
    places[order] = np.arange(heads.size) - np.repeat(np.cumsum(counts) - counts, counts)
    members = np.zeros((kv_heads, counts.max()), np.intp)
    members[heads, places] = np.arange(heads.size)
    return Groups(members, heads, places)
