"""Units: what eviction takes as a whole, each written as the mutation that drops it.

A namespace with both sessions and its recurrent states; a session without one; recurrent states
without one; a plain key. The two keys in which a stock LMCache keeps a chunk are one unit: with one
of them gone, the other is taken for a hit and read as garbage.
"""

from __future__ import annotations

from typing import TypeAlias

from pion_server.store.mutations import DeleteKeys, DropPrefix, DropSession, DropState

Unit: TypeAlias = DropPrefix | DropSession | DropState | DeleteKeys

# How the names of a chunk's two keys end, in the order in which LMCache's `redis://` sets them.
CHUNK_KEYS = (b"kv_bytes", b"metadata")


def key_unit(db: int, key: bytes) -> DeleteKeys:
    """The unit that a plain key belongs to. Not all of its keys need be there."""
    for suffix in CHUNK_KEYS:
        if key.endswith(suffix):
            chunk = key.removesuffix(suffix)
            return DeleteKeys(db, tuple(chunk + each for each in CHUNK_KEYS))
    return DeleteKeys(db, (key,))
