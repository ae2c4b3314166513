"""What caches hold, taken out and put back part by part (caches.py says what the parts are)."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from pion_server.client import Payload
from pion_server.errors import Mismatch
from pion_vllm_mlx.caches import Part, evaluate, kind_of, leaves
from pion_vllm_mlx.layout import Layout
from pion_vllm_mlx.model import Cache
from pion_vllm_mlx.states import Frozen, freeze, unpack


def rows_of(caches: Sequence[Cache], layout: Layout, part: Part) -> list[mx.array]:
    """K and V of every leaf of that part, (1, heads, T, width) each, ending with the last token."""
    sides: list[mx.array] = []
    for cache, leaf in zip(leaves(caches), layout.leaves, strict=True):
        kind = kind_of(cache)
        if leaf.part is part and leaf.used and kind.rows is not None:
            sides += kind.rows(cache)
    return sides


def states_of(caches: Sequence[Cache], layout: Layout) -> dict[int, list[Frozen]]:
    """The states of `layout.states`, by leaf and evaluated; ValueError as freeze() raises it."""
    states = {}
    for index, cache in enumerate(leaves(caches)):
        kind = kind_of(cache)
        if index in layout.states and kind.state is not None:
            states[index] = freeze(kind.state(cache))
    return states


def fill(
    caches: Sequence[Cache],
    layout: Layout,
    tokens: int,
    *,
    rows: Sequence[mx.array] = (),
    windows: Sequence[mx.array] = (),
    states: Sequence[Payload] = (),
) -> None:
    """Make empty `caches` hold `tokens` tokens, and evaluate them.

    `rows` and `windows` are all sides of their parts in order, `states` the blobs of
    `layout.states`. Raises Mismatch where a blob is no state of its leaf.
    """
    sides = {Part.ROWS: iter(rows), Part.WINDOW: iter(windows)}
    for cache, leaf in zip(leaves(caches), layout.leaves, strict=True):
        kind = kind_of(cache)
        if leaf.part in sides and leaf.used and kind.set_rows is not None:
            kind.set_rows(cache, [next(sides[leaf.part]) for _ in leaf.formats], tokens)
    fill_states(caches, layout, states)
    evaluate(caches)
    if not layout.fits(caches, tokens):
        raise Mismatch("a stored state is of another length than its prefix")


def fill_states(caches: Sequence[Cache], layout: Layout, states: Sequence[Payload]) -> None:
    """Put the blobs of `layout.states` into empty `caches`; Mismatch as fill() raises it."""
    blobs = iter(states)
    for cache, leaf in zip(leaves(caches), layout.leaves, strict=True):
        kind = kind_of(cache)
        if kind.set_state is not None and leaf.part is Part.STATE:
            state = unpack(next(blobs))
            if not leaf.fits(state):
                raise Mismatch(f"a stored state is not one of this model's {leaf.kind}")
            kind.set_state(cache, state)
