"""Recurrent states: what the layers of an SSM or an RNN hold after exactly so many tokens.

Nothing here looks into them. A layer's blob is the writer's own buffer, never a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from pion_server.store.mutations import DropPrefix, DropState

Blob: TypeAlias = bytes | memoryview

# What Python takes beside the payload, resident on CPython 3.11.
SID_BYTES = 700
BLOB_BYTES = 300


class Recurrent:
    """The blobs of one session id, by layer; `blobs` is replaced and never changed, so a snapshot
    takes no more than a reference. `unit` is the mutation that drops them: their own, or that of
    the namespace of this name."""

    __slots__ = ("blob_bytes", "blobs", "sid", "unit")

    def __init__(self, sid: bytes, unit: DropPrefix | DropState) -> None:
        self.sid = sid
        self.unit = unit
        self.blobs: Mapping[int, Blob] = {}
        self.blob_bytes = 0

    @property
    def nbytes(self) -> int:
        """What they count for in the memory budget."""
        return SID_BYTES + len(self.sid) + len(self.blobs) * BLOB_BYTES + self.blob_bytes

    def growth(self, layer: int, data: Blob) -> int:
        """How many bytes put() would add."""
        old = self.blobs.get(layer)
        return len(data) - len(old) if old is not None else len(data) + BLOB_BYTES

    def put(self, layer: int, data: Blob) -> None:
        self.blob_bytes += len(data) - len(self.blobs.get(layer, b""))
        kept = data.toreadonly() if isinstance(data, memoryview) else data
        self.blobs = {**self.blobs, layer: kept}

    def drop(self, layer: int | None) -> int:
        """Take one layer's blob away, or all (None); returns how many."""
        before = self.blobs
        self.blobs = {each: blob for each, blob in before.items() if layer not in (None, each)}
        self.blob_bytes = sum(map(len, self.blobs.values()))
        return len(before) - len(self.blobs)
