"""Every way the state can change, as frozen values.

Live commands, eviction and recovery make these and nothing else; `Store.apply` carries them out.
They hold no clock: a deadline is absolute, in milliseconds since the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pion_server.store.schema import Schema

Hashes: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class CreateSession:
    """A session without a namespace. One that is there with an equal schema keeps its rows."""

    sid: bytes
    schema: Schema


@dataclass(frozen=True, slots=True)
class RowBlock:
    """`count` rows of one layer from token `start`, as stored bytes: count * row_bytes of them."""

    sid: bytes
    layer: int
    start: int
    count: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class StoreRows:
    """All blocks, or none of them."""

    blocks: tuple[RowBlock, ...]


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Block hashes of a prefix, in token order."""

    block_size: int
    hashes: Hashes


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a complete prefix holds: it is a hit only when every row of it is in."""

    layers: int
    tokens: int


@dataclass(frozen=True, slots=True)
class RegisterPrefix:
    """A namespace with its two sessions, <ns>_pk and <ns>_pv.

    On a namespace that is there: the same schemas and fingerprint are required (PionError and
    Mismatch otherwise: stored rows are never dropped by a REGISTER), rows are kept, and each of the
    other fields replaces the old one unless it is None. `parent`: the namespace that this one goes
    on from, there or not; eviction takes it after this one. It cannot be one that goes on from this
    one (PionError).
    """

    namespace: bytes
    keys: Schema
    values: Schema
    declared: Declaration | None = None
    fingerprint: bytes | None = None
    blocks: BlockTable | None = None
    prefill_ms: float | None = None
    parent: bytes | None = None


@dataclass(frozen=True, slots=True)
class DropPrefix:
    """The namespace goes, with both sessions and its recurrent states. Its children stay."""

    namespace: bytes


@dataclass(frozen=True, slots=True)
class DropSession:
    """A session that belongs to no namespace goes (eviction)."""

    sid: bytes


@dataclass(frozen=True, slots=True)
class StoreState:
    """One layer's recurrent state: opaque bytes, kept by reference. Where `sid` is a namespace, it
    goes with that, also if one of them came before the other."""

    sid: bytes
    layer: int
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class DropState:
    """The recurrent state of one layer, or of every layer (None)."""

    sid: bytes
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class SetKey:
    """A plain key. `expires_ms` None: it stays."""

    db: int
    key: bytes
    value: bytes | memoryview
    expires_ms: int | None = None


@dataclass(frozen=True, slots=True)
class SetExpiry:
    """A new deadline for a key that is there; None takes it away."""

    db: int
    key: bytes
    expires_ms: int | None


@dataclass(frozen=True, slots=True)
class DeleteKeys:
    """Keys that are not there are passed over."""

    db: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class FlushDb:
    """All plain keys of one db, or of every db (None). Sessions stay: they are in no db."""

    db: int | None


Mutation: TypeAlias = (
    CreateSession
    | StoreRows
    | RegisterPrefix
    | DropPrefix
    | DropSession
    | StoreState
    | DropState
    | SetKey
    | SetExpiry
    | DeleteKeys
    | FlushDb
)
