"""Caches <-> the blocks of a chain: what to send for an insert, what to ask for in a restore."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from typing import Any

from pion_server.client import Call, Payload, calls
from pion_vllm_mlx.caches import Part
from pion_vllm_mlx.chain import Chain
from pion_vllm_mlx.contents import fill, rows_of, states_of
from pion_vllm_mlx.entry import Entry, sealed
from pion_vllm_mlx.layout import Layout, RowLayout
from pion_vllm_mlx.match import Match, namespace, window_ends
from pion_vllm_mlx.model import Cache
from pion_vllm_mlx.rows import Receiver, Span, cut, to_rows

# States are kept every so many blocks that they cost at most this times the rows of those blocks,
STATES_PER_ROWS = 2
# but at least every so many, which is one step of mlx-lm's prefill.
MAX_STRIDE = 8


def stride(layout: Layout, block: int) -> int:
    """A number of tokens: the distance of the positions where states are kept, or of those that a
    prefix may end at where there are none."""
    rows = (layout.rows.token_bytes + layout.windows.token_bytes) * block
    if not rows:
        return block
    blocks = math.ceil(layout.state_bytes / (STATES_PER_ROWS * rows))
    return block * min(max(blocks, 1), MAX_STRIDE)


class Insert:
    """What is to be stored of `caches`, which hold the tokens of `chain`, but for what is `known`.

    `every` is the stride of states; at the end of the chain, states and a partial block are stored
    if `tail`.
    """

    def __init__(
        self,
        layout: Layout,
        chain: Chain,
        caches: Sequence[Cache],
        *,
        known: Container[str],
        every: int,
        tail: bool,
    ) -> None:
        self._layout = layout
        self._chain = chain
        self._caches = caches
        self._ends = {part: self._wanted(part, tail, every, known) for part in Part}

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows to be stored."""
        return sum(
            self._tokens(end) * rows.token_bytes
            for part, rows in self._rows()
            for end in self._ends[part]
        )

    def entries(self, fingerprint: str) -> Iterator[Entry]:
        """In order, so that each block comes after those it goes on from. Evaluates."""
        for part, rows in self._rows():
            if ends := self._ends[part]:
                yield from self._row_entries(part, rows, ends, fingerprint)
        for end in self._ends[Part.STATE]:
            states = states_of(self._caches, self._layout)
            yield Entry(
                namespace(self._chain, end, Part.STATE),
                self._tokens(end),
                fingerprint,
                *sealed(self._tokens(end)),
                states,
                parent=self._parent(Part.STATE, end),
            )

    def _wanted(self, part: Part, tail: bool, every: int, known: Container[str]) -> list[int]:
        """The ends of the blocks whose `part` is to be stored and can be taken from the caches."""
        length = self._chain.length
        ends = self._chain.ends(length) if tail else list(self._chain.boundaries)
        if part is Part.STATE:
            at_stop = bool(self._layout.states) and (tail or length % every == 0)
            ends = [length] if at_stop else []
        else:
            first = length - self._held(part)
            ends = [end for end in ends if self._chain.start(end) >= first]
        return [end for end in ends if namespace(self._chain, end, part) not in known]

    def _held(self, part: Part) -> int:
        """How many of the last rows every leaf of `part` has."""
        sides = rows_of(self._caches, self._layout, part)
        return min((side.shape[2] for side in sides), default=-1)

    def _row_entries(
        self, part: Part, rows: RowLayout, ends: list[int], fingerprint: str
    ) -> Iterator[Entry]:
        first = self._chain.start(ends[0])
        count = self._chain.length - first
        sides = rows_of(self._caches, self._layout, part)
        pairs = to_rows([side[:, :, side.shape[2] - count :] for side in sides], rows)
        for end in ends:
            begin = self._chain.start(end)
            yield Entry(
                namespace(self._chain, end, part),
                end - begin,
                fingerprint,
                rows,
                cut(pairs, rows, begin - first, end - first),
                parent=self._parent(part, end),
            )

    def _parent(self, part: Part, end: int) -> str | None:
        """What has to outlive this namespace: the rows of its block, or else the block before."""
        if part is not Part.ROWS and self._layout.rows.formats:
            return namespace(self._chain, end, Part.ROWS)
        before = self._chain.start(end)
        return namespace(self._chain, before, part) if before and part is not Part.STATE else None

    def _rows(self) -> list[tuple[Part, RowLayout]]:
        return _row_parts(self._layout)

    def _tokens(self, end: int) -> int:
        return end - self._chain.start(end)


class Restore:
    """The FETCHes of a match, all in one round trip, and the caches that come of their replies."""

    def __init__(self, layout: Layout, match: Match) -> None:
        self._layout = layout
        self._match = match
        ends = {
            Part.ROWS: match.chain.ends(match.length),
            Part.WINDOW: window_ends(layout, match.chain, match.length),
        }
        self._receivers = {
            part: Receiver(rows, [self._span(end, part) for end in ends[part]])
            for part, rows in _row_parts(layout)
        }

    @property
    def nbytes(self) -> int:
        """Bytes to fetch, about."""
        rows = sum(receiver.nbytes for receiver in self._receivers.values())
        return rows + self._layout.state_bytes

    def calls(self, fingerprint: str, prefill_ms: float | None) -> list[Call[Any]]:
        """The receipt's entry, once for the whole restore, and everything to fetch."""
        match = self._match
        leaf = next(part for part in Part if part in self._receivers or part is Part.STATE)
        fetches = [
            call for receiver in self._receivers.values() for call in receiver.calls(fingerprint)
        ]
        states = namespace(match.chain, match.length, Part.STATE)
        return [
            calls.prefix_lookup(
                namespace(match.chain, match.length, leaf),
                tokens=match.length,
                prefill_ms=prefill_ms,
                fingerprint=fingerprint,
            ),
            *fetches,
            *(calls.ssm_fetch(states, index) for index in self._layout.states),
        ]

    def fill(self, caches: Sequence[Cache], replies: Sequence[Any]) -> bool:
        """Fill empty caches with the replies of `calls`; False where something is gone."""
        rest = list(replies[1:])
        sides: dict[Part, Any] = {}
        for part, receiver in self._receivers.items():
            count = receiver.requests
            sides[part] = receiver.receive(rest[:count])
            rest = rest[count:]
        states: list[Payload | None] = rest
        if None in sides.values() or None in states:
            return False
        fill(
            caches,
            self._layout,
            self._match.length,
            rows=sides.get(Part.ROWS, ()),
            windows=sides.get(Part.WINDOW, ()),
            states=[state for state in states if state is not None],
        )
        return True

    def _span(self, end: int, part: Part) -> Span:
        chain = self._match.chain
        return Span(namespace(chain, end, part), end - chain.start(end))


def _row_parts(layout: Layout) -> list[tuple[Part, RowLayout]]:
    """The parts that are rows, where the model has them."""
    parts = [(Part.ROWS, layout.rows), (Part.WINDOW, layout.windows)]
    return [(part, rows) for part, rows in parts if rows.formats]
