"""Rows of a cache <-> rows in the store.

In a cache K (or V) of a layer is (1, heads, T, width), in the store it is T rows of `heads * width`
values. Conversions run in mlx (numpy's fp16 is slow and it has no bf16), on the calling thread, and
everything is evaluated on return: lazy arrays cannot cross threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pion_server.client import Call, PrefixRows, calls
from pion_server.errors import Mismatch
from pion_vllm_mlx.layout import RowFormat, RowLayout

Bytes = npt.NDArray[np.uint8]
Pairs = list[tuple[Bytes, Bytes]]

# What a restore that joins several namespaces gathers before it goes into mlx.
SCRATCH_BYTES = 64 << 20


class Span(NamedTuple):
    """A namespace, and how many tokens it has rows of."""

    namespace: str
    tokens: int


def to_rows(sides: Sequence[mx.array], layout: RowLayout) -> Pairs:
    """K and V of every layer as bytes: (T * row_bytes,) each, from (1, heads, T, width).

    The arrays own their memory, so the caches may change afterwards.
    """
    flat = [_to_bytes(side, fmt) for side, fmt in zip(sides, layout.formats, strict=True)]
    mx.eval(flat)
    blobs = [np.asarray(array) for array in flat]  # no copy
    return list(zip(blobs[::2], blobs[1::2], strict=True))


def cut(pairs: Pairs, layout: RowLayout, start: int, end: int) -> Pairs:
    """The rows `start` to `end` of to_rows(), by reference."""
    keys, values = layout.formats[::2], layout.formats[1::2]
    return [
        (k[start * kf.row_bytes : end * kf.row_bytes], v[start * vf.row_bytes : end * vf.row_bytes])
        for (k, v), kf, vf in zip(pairs, keys, values, strict=True)
    ]


class Receiver:
    """Joins the rows of consecutive namespaces while they arrive, through one scratch buffer.

    Layers go into mlx a group at a time, as soon as the group is whole, so the scratch stays small
    and warm, and mlx holds the only full copy. The rows of one namespace arrive in one FETCH; of
    several, in a FETCH for each group and namespace, group after group.
    """

    def __init__(self, layout: RowLayout, spans: Sequence[Span]) -> None:
        self._layout = layout
        self._spans = spans
        self._tokens = sum(span.tokens for span in spans)
        # With one namespace every side is whole when the next one begins.
        limit = SCRATCH_BYTES if len(spans) > 1 else 0
        self._groups = _groups(layout, self._tokens, limit)
        self._scratch = np.empty(max(self._bytes(group) for group in self._groups), np.uint8)
        self._arriving: range | None = None
        self._arrays: list[mx.array] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self._tokens * self._layout.token_bytes

    @property
    def requests(self) -> int:
        """How many FETCHes `calls` are."""
        return len(self._rounds()) * len(self._spans)

    def calls(self, fingerprint: str) -> list[Call[PrefixRows | None]]:
        """The FETCHes, to be sent in this order; their values are for `receive`."""
        return [
            calls.prefix_fetch(
                span.namespace,
                layers=(sides.start // 2, sides.stop // 2) if len(self._spans) > 1 else None,
                fmt="NATIVE",
                fingerprint=fingerprint,
                into=partial(self._buffer, sides, index),
            )
            for sides in self._rounds()
            for index, span in enumerate(self._spans)
        ]

    def receive(self, replies: Sequence[PrefixRows | None]) -> list[mx.array] | None:
        """K and V of every layer, each (1, heads, T, width) and evaluated; None where a namespace
        is no hit.

        Raises Mismatch where what came is not this layout and number of tokens.
        """
        if any(reply is None for reply in replies):
            return None
        self._take()
        requested = [(sides, span) for sides in self._rounds() for span in self._spans]
        for (sides, span), rows in zip(requested, replies, strict=True):
            assert rows is not None
            self._check(sides, span.tokens, rows)
        mx.eval(self._arrays)
        return self._arrays

    def _rounds(self) -> list[range]:
        """The sides that each round of FETCHes brings."""
        return self._groups if len(self._spans) > 1 else [range(len(self._layout.formats))]

    def _buffer(self, sides: range, index: int, side: int, nbytes: int) -> memoryview | None:
        """Where a buffer goes: that of `sides[side]` of the `index`-th namespace. None where it is
        not what the layout says; `receive` will find that out."""
        formats = self._layout.formats
        if side >= len(sides) or nbytes != self._spans[index].tokens * self._row(sides[side]):
            return None
        number = sides[side]
        if number == index == 0:  # also when the client sends everything again
            self._arrays, self._arriving = [], None
        group = next(group for group in self._groups if number in group)
        if group != self._arriving:
            self._take()
            self._arriving = group
        before = sum(span.tokens for span in self._spans[:index]) * formats[number].row_bytes
        begin = self._bytes(range(group.start, number)) + before
        return self._scratch[begin : begin + nbytes].data

    def _take(self) -> None:
        """Copy the group that has arrived out of the scratch buffer."""
        begin = 0
        for number in self._arriving or ():
            end = begin + self._tokens * self._row(number)
            fmt = self._layout.formats[number]
            self._arrays.append(_to_array(self._scratch[begin:end], fmt))
            begin = end
        self._arriving = None

    def _check(self, sides: range, tokens: int, rows: PrefixRows) -> None:
        layers = slice(sides.start // 2, sides.stop // 2)
        came = (rows.tokens, rows.start, rows.end, rows.first_layer, rows.keys, rows.values)
        keys, values = tuple(self._layout.keys[layers]), tuple(self._layout.values[layers])
        wanted = (tokens, 0, tokens, layers.start, keys, values)
        sizes = [len(side) for pair in rows.rows for side in pair]
        if came != wanted or sizes != [tokens * self._row(side) for side in sides]:
            raise Mismatch(
                "the stored rows have another layout or number of tokens than this model"
            )

    def _row(self, number: int) -> int:
        return self._layout.formats[number].row_bytes

    def _bytes(self, sides: range) -> int:
        return sum(self._tokens * self._row(number) for number in sides)


def _groups(layout: RowLayout, tokens: int, limit: int) -> list[range]:
    """All sides in runs of at most `limit` bytes; whole layers unless `limit` is 0."""
    step = 2 if limit else 1
    groups = [range(step)]
    size = 0
    for start in range(0, len(layout.formats), step):
        grown = sum(tokens * fmt.row_bytes for fmt in layout.formats[start : start + step])
        if start and size + grown > limit:
            groups.append(range(start, start))
            size = 0
        groups[-1] = range(groups[-1].start, start + step)
        size += grown
    return groups


def _to_bytes(side: mx.array, fmt: RowFormat) -> mx.array:
    """(1, heads, T, width) -> uint8 (T * row_bytes,)."""
    if not fmt.width:
        side = mx.zeros((*side.shape[:-1], 1), side.dtype)
    rows = side[0].swapaxes(0, 1).reshape(-1).astype(fmt.stored)
    return mx.contiguous(rows.view(mx.uint8))


def _to_array(data: Bytes, fmt: RowFormat) -> mx.array:
    """A copy of `data` as (1, heads, T, width) in the model's dtype; not yet evaluated."""
    rows = mx.array(data).view(fmt.stored).reshape(-1, fmt.heads, max(fmt.width, 1))
    rows = rows[..., : fmt.width]
    return rows.astype(fmt.dtype).transpose(1, 0, 2)[None]
