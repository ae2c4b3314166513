"""Everything that is stored under one namespace, as bytes: any thread may send it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pion_server.client import Call, calls
from pion_vllm_mlx.layout import SEAL, RowLayout
from pion_vllm_mlx.rows import Pairs
from pion_vllm_mlx.states import Frozen, pack


@dataclass(frozen=True)
class Entry:
    """`tokens` rows of each layer of `layout`, and states by the index of their leaf. `parent` is a
    namespace that must not be evicted before this one."""

    namespace: str
    tokens: int
    fingerprint: str
    layout: RowLayout
    rows: Pairs
    states: Mapping[int, list[Frozen]] = field(default_factory=dict)
    prefill_ms: float | None = None
    parent: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and of the arrays of the states."""
        arrays = (array for state in self.states.values() for array in state)
        states = sum(array.data.nbytes for array in arrays if array.data is not None)
        return states + sum(side.nbytes for pair in self.rows for side in pair)

    def register(self) -> Call[None]:
        """Open the namespace."""
        return calls.prefix_register_schema(
            self.namespace,
            self.layout.keys,
            self.layout.values,
            tokens=self.tokens,
            fingerprint=self.fingerprint,
            prefill_ms=self.prefill_ms,
            parent=self.parent,
        )

    def content(self) -> list[Call[None]]:
        """Fill the namespace. The rows come last: with them it becomes a hit."""
        states = [
            calls.ssm_store(self.namespace, leaf, pack(state))
            for leaf, state in self.states.items()
        ]
        rows = calls.prefix_store(
            self.namespace,
            0,
            self.tokens,
            self.rows,
            fmt="NATIVE",
            fingerprint=self.fingerprint,
        )
        return [*states, rows]


def sealed(tokens: int) -> tuple[RowLayout, Pairs]:
    """Layout and rows of an entry that has states only."""
    zeros = np.zeros(tokens * SEAL.formats[0].row_bytes, np.uint8)
    return SEAL, [(zeros, zeros)]
