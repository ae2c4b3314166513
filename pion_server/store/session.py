"""A session: a schema, and for each layer the rows that are there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from pion_server.errors import PionError
from pion_server.store.layer import Extent, Layer
from pion_server.store.mutations import DropPrefix, DropSession, RowBlock
from pion_server.store.schema import Schema
from pion_server.store.views import RowView

# Token ids stay below this: far beyond any context, and row arithmetic fits 64 bits.
MAX_TOKENS = 1 << 31


class Session:
    """Rows by layer and token id. `unit` is the mutation that drops the session: its own, or that
    of the namespace it belongs to."""

    __slots__ = ("_layers", "row_bytes", "schema", "sid", "unit")

    def __init__(self, sid: bytes, schema: Schema, unit: DropPrefix | DropSession) -> None:
        self.sid = sid
        self.schema = schema
        self.unit = unit
        self.row_bytes = 0  # bytes of all rows that are there
        self._layers: dict[int, Layer] = {}

    @property
    def nbytes(self) -> int:
        """What the session counts for in the memory budget."""
        return len(self.sid) + self.row_bytes

    @property
    def layers(self) -> int:
        """One more than the highest layer that has rows."""
        return max(self._layers, default=-1) + 1

    def layer(self, index: int) -> Layer:
        """The layer's rows, to read; raises PionError where the schema has no such layer."""
        row_bytes = self.schema.layer(index).row_bytes
        return self._layers.get(index) or Layer(index, row_bytes)

    def runs(self) -> list[tuple[int, tuple[Extent, ...]]]:
        """The rows of every layer as they are now, by reference."""
        return [(index, layer.runs()) for index, layer in self._layers.items()]

    def view(self, layer: int, start: int, end: int) -> RowView:
        """Rows [start, end) of a layer. Raises PionError if one of them is missing."""
        if not 0 <= start < end:
            raise PionError(f"a range of rows needs 0 <= start < end, got {start} {end}")
        return RowView(self.schema.layer(layer), self.layer(layer).pieces(start, end))

    def gather(self, layer: int, ids: Sequence[int]) -> RowView:
        """Rows by id (at least one), in the order of `ids`. Raises PionError if one is missing."""
        tokens = np.asarray(ids, np.int64)
        edges = [0, *(np.flatnonzero(np.diff(tokens) != 1) + 1).tolist(), len(tokens)]
        held = self.layer(layer)
        pieces: list[memoryview] = []
        for first, last in pairwise(edges):
            pieces += held.pieces(int(tokens[first]), int(tokens[last - 1]) + 1)
        return RowView(self.schema.layer(layer), tuple(pieces))

    def check(self, block: RowBlock) -> int:
        """How many bytes `block` would add; raises PionError if it cannot be stored."""
        row_bytes = self.schema.layer(block.layer).row_bytes
        end = block.start + block.count
        if block.start < 0 or block.count < 1 or end > MAX_TOKENS:
            raise PionError(
                f"rows to store must lie in 0 to {MAX_TOKENS - 1} and be at least one, "
                f"got {block.count} from {block.start}"
            )
        if block.data.nbytes != block.count * row_bytes:
            raise PionError(
                f"{block.count} rows of layer {block.layer} are {block.count * row_bytes} bytes, "
                f"got {block.data.nbytes}"
            )
        return (block.count - self.layer(block.layer).covered(block.start, end)) * row_bytes

    def put(self, block: RowBlock) -> int:
        """Store a block that check() let pass; returns the bytes it added."""
        layer = self._layers[block.layer] = self.layer(block.layer)
        before = layer.nbytes
        layer.put(block.start, block.data)
        self.row_bytes += layer.nbytes - before
        return layer.nbytes - before
