"""Query heads sorted by the K/V head that they share, so that one product serves them all.

A product has as many queries for each K/V head as the one with the most has. Where a lopsided map
makes that more than twice those that were asked, each K/V head has a product of its own instead:
what it takes is in proportion to what was asked, whatever the map.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pion_server.attention.base import Floats, Heads, Partial, Spans

Indices = npt.NDArray[np.intp]
# Attention of queries (h, Q, D) over some of the K/V heads, query q of each over its span (Q, 2).
Product: TypeAlias = Callable[[slice, Floats, Spans | None], Partial]


def in_groups(
    product: Product, queries: Floats, head_map: Heads, kv_heads: int, spans: Spans | None
) -> Partial:
    """What `product` finds for queries (H_q, M, D), those of all query heads at once or of one K/V
    head after the other, where the map is lopsided. Spans are (M, 2)."""
    if groups := Groups.of(head_map, kv_heads):
        seen = None if spans is None else _tiled(spans, groups.members.shape[1])
        return groups.scatter(product(slice(None), groups.gather(queries), seen))
    out, lse = np.empty_like(queries), np.empty(queries.shape[:2], np.float32)
    for head in np.unique(head_map).tolist():
        mine = head_map == head
        asked = queries[mine]
        seen = None if spans is None else _tiled(spans, len(asked))
        found = product(slice(head, head + 1), asked.reshape(1, -1, asked.shape[-1]), seen)
        out[mine], lse[mine] = found.out.reshape(asked.shape), found.lse.reshape(asked.shape[:2])
    return Partial(out, lse)


def products(head_map: Heads, kv_heads: int) -> int:
    """How many products in_groups() takes."""
    return 1 if Groups.of(head_map, kv_heads) else np.unique(head_map).size


def _tiled(spans: Spans, times: int) -> Spans:
    """(M, 2) -> (times * M, 2)."""
    return np.tile(spans, (times, 1))


class Groups(NamedTuple):
    """G is the most query heads that any K/V head has; where a K/V head has fewer, query head 0
    stands in, and what comes out for it is not used."""

    members: Indices  # (H, G): query heads of each K/V head
    heads: Indices  # (H_q,): where each query head is in `members`: its K/V head,
    places: Indices  # (H_q,): and which of that head's it is
    in_order: bool  # whether members are 0, 1, ..., H_q - 1, as in every usual model

    @classmethod
    def of(cls, head_map: Heads, kv_heads: int) -> Groups | None:
        """Those of a map, None where it is lopsided. A model has one or two maps, and sorting one
        takes a tenth of a small query."""
        return _sorted(head_map.tobytes(), kv_heads)

    def gather(self, queries: Floats) -> Floats:
        """(H_q, M, D) -> (H, G * M, D)."""
        asked = queries if self.in_order else queries[self.members]
        return asked.reshape(len(self.members), -1, queries.shape[-1])

    def scatter(self, found: Partial) -> Partial:
        """(H, G * M, D) and (H, G * M) -> (H_q, M, D) and (H_q, M)."""
        dim, shape = found.out.shape[-1], self.members.shape
        if self.in_order:
            count = self.members.size
            return Partial(found.out.reshape(count, -1, dim), found.lse.reshape(count, -1))
        at = self.heads, self.places
        out, lse = found.out.reshape(*shape, -1, dim), found.lse.reshape(*shape, -1)
        return Partial(out[at], lse[at])


@lru_cache(maxsize=16)  # at most 128 KB each
def _sorted(head_map: bytes, kv_heads: int) -> Groups | None:
    heads = np.frombuffer(head_map, np.uint8).astype(np.intp)
    counts = np.bincount(heads, minlength=kv_heads)
    if kv_heads * counts.max() > 2 * heads.size:
        return None
    order = np.argsort(heads, kind="stable")
    places = np.empty_like(heads)
    places[order] = np.arange(heads.size) - np.repeat(np.cumsum(counts) - counts, counts)
    members = np.zeros((kv_heads, counts.max()), np.intp)
    members[heads, places] = np.arange(heads.size)
    return Groups(members, heads, places, members.ravel().tolist() == list(range(heads.size)))
