"""Recurrent states: what the layers of an SSM or an RNN hold after exactly so many tokens.

Nothing here looks into them. A layer's blob is the writer's own buffer, never a copy.
"""

from __future__ import annotations

from pion_server.store.mutations import DropPrefix, DropState

# What Python takes beside the payload, resident on CPython 3.11.
SID_BYTES = 700
BLOB_BYTES = 300


class Recurrent:
    """The blobs of one session id, by layer. `unit` is the mutation that drops them: their own, or
    that of the namespace of this name."""

    __slots__ = ("blob_bytes", "blobs", "sid", "unit")

    def __init__(self, sid: bytes, unit: DropPrefix | DropState) -> None:
        self.sid = sid
        self.unit = unit
        self.blobs: dict[int, bytes | memoryview] = {}
        self.blob_bytes = 0

    @property
    def nbytes(self) -> int:
        """What they count for in the memory budget."""
        return SID_BYTES + len(self.sid) + len(self.blobs) * BLOB_BYTES + self.blob_bytes

    def growth(self, layer: int, data: bytes | memoryview) -> int:
        """How many bytes put() would add."""
        old = self.blobs.get(layer)
        return len(data) - len(old) if old is not None else len(data) + BLOB_BYTES

    def put(self, layer: int, data: bytes | memoryview) -> None:
        self.blob_bytes += len(data) - len(self.blobs.get(layer, b""))
        self.blobs[layer] = data.toreadonly() if isinstance(data, memoryview) else data

    def drop(self, layer: int | None) -> int:
        """Take one layer's blob away, or all (None); returns how many."""
        layers = [each for each in self.blobs if layer in (None, each)]
        for each in layers:
            self.blob_bytes -= len(self.blobs.pop(each))
        return len(layers)
