"""A namespace: its two sessions, and what its client declared about them.

Sealing: a namespace with a declaration is a hit only once every declared row of every declared
layer is there on both sides, so that nobody meets a prefix that is still on its way. Without a
declaration the client vouches for it, and it is a hit at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pion_server.store.mutations import BlockTable, Declaration, DropPrefix, Hashes, RegisterPrefix
from pion_server.store.session import Session


def sides(namespace: bytes) -> tuple[bytes, bytes]:
    """The ids of a namespace's K and V sessions."""
    return namespace + b"_pk", namespace + b"_pv"


def name_of_session(sid: bytes) -> bytes:
    """The namespace that the session is, or would be, a side of; else its own name."""
    for side in sides(b""):
        if sid.endswith(side):
            return sid.removesuffix(side)
    return sid


def table_bytes(blocks: BlockTable | None) -> int:
    """What a block table counts for in the memory budget: it is kept twice, once sorted."""
    return 2 * blocks.hashes.nbytes if blocks else 0


@dataclass(slots=True, eq=False)
class Prefix:
    """The record of a namespace."""

    namespace: bytes
    keys: Session
    values: Session
    fingerprint: bytes | None
    declared: Declaration | None = None
    prefill_ms: float | None = None
    blocks: BlockTable | None = None
    sorted_hashes: Hashes = field(default_factory=lambda: np.empty(0, np.uint64))
    _complete: int = 0  # leading layers that are known to be; rows never leave one by one

    def update(self, mutation: RegisterPrefix) -> None:
        """Take over the fields that the mutation names."""
        if mutation.declared is not None:
            self.declared, self._complete = mutation.declared, 0
        if mutation.prefill_ms is not None:
            self.prefill_ms = mutation.prefill_ms
        if mutation.blocks is not None:
            self.blocks = mutation.blocks
            self.sorted_hashes = np.sort(mutation.blocks.hashes)

    @property
    def keys_sid(self) -> bytes:
        return self.keys.sid

    @property
    def values_sid(self) -> bytes:
        return self.values.sid

    @property
    def unit(self) -> DropPrefix:
        """The mutation that drops the namespace."""
        return DropPrefix(self.namespace)

    @property
    def nbytes(self) -> int:
        """What the namespace counts for in the memory budget."""
        return self.keys.nbytes + self.values.nbytes + table_bytes(self.blocks)

    @property
    def tokens(self) -> int:
        """The declared length, or else how many rows layer 0 has on the K side."""
        return self.declared.tokens if self.declared else self.keys.layer(0).rows

    @property
    def layers(self) -> int:
        """The declared number of layers, or else how many the K side has rows of."""
        return self.declared.layers if self.declared else self.keys.layers

    @property
    def sealed(self) -> bool:
        """Whether the namespace is a hit; once it is, it is for good."""
        declared = self.declared
        if declared is None:
            return True
        while self._complete < declared.layers and self._covers(self._complete, declared.tokens):
            self._complete += 1
        return self._complete == declared.layers

    def _covers(self, layer: int, tokens: int) -> bool:
        return all(side.layer(layer).covers(0, tokens) for side in (self.keys, self.values))
