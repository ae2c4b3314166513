"""A session: a schema, and for each layer the rows that are there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from pion_server.errors import PionError
from pion_server.store.layer import Layer
from pion_server.store.mutations import DropPrefix, DropSession, RowBlock
from pion_server.store.schema import Schema
from pion_server.store.views import RowView

# Token ids stay below this: far beyond any context, and row arithmetic fits 64 bits.
MAX_TOKENS = 1 << 31
# What Python takes beside the rows, resident on CPython 3.11: for a session (half of its namespace
# included), and for each run of neighbouring rows in a layer.
SESSION_BYTES = 750
STRETCH_BYTES = 800


class Session:
    """Rows by layer and token id. `unit` is the mutation that drops the session: its own, or that
    of the namespace it belongs to. `filled` are the layers that have rows; it and they are replaced
    and never changed, so a snapshot takes no more than a reference."""

    __slots__ = ("filled", "row_bytes", "schema", "sid", "stretches", "unit")

    def __init__(self, sid: bytes, schema: Schema, unit: DropPrefix | DropSession) -> None:
        self.sid = sid
        self.schema = schema
        self.unit = unit
        self.row_bytes = 0  # bytes of all rows that are there
        self.stretches = 0  # runs of neighbouring rows in all layers
        self.filled: dict[int, Layer] = {}

    @property
    def nbytes(self) -> int:
        """What the session counts for in the memory budget."""
        return SESSION_BYTES + len(self.sid) + self.row_bytes + self.stretches * STRETCH_BYTES

    @property
    def layers(self) -> int:
        """One more than the highest layer that has rows."""
        return max(self.filled, default=-1) + 1

    def layer(self, index: int) -> Layer:
        """The layer's rows, to read; raises PionError where the schema has no such layer."""
        row_bytes = self.schema.layer(index).row_bytes
        return self.filled.get(index) or Layer(index, row_bytes)

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
        """The most that `block` could add to nbytes; raises PionError if it cannot be stored."""
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
        layer = self.layer(block.layer)
        alone = layer.covered(max(block.start - 1, 0), end + 1) == 0
        new_rows = block.count - layer.covered(block.start, end)
        return new_rows * row_bytes + alone * STRETCH_BYTES

    def put(self, block: RowBlock) -> None:
        """Store a block that check() let pass."""
        layer = self.layer(block.layer).copy()
        self.row_bytes -= layer.nbytes
        self.stretches -= layer.stretches
        layer.put(block.start, block.data)
        self.row_bytes += layer.nbytes
        self.stretches += layer.stretches
        self.filled = self.filled.copy()
        self.filled[block.layer] = layer
