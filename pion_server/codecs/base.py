"""The contract of a storage format.

A codec turns rows, fp32 `(count, dim)`, into `count * row_bytes(dim)` bytes and back. Every row
stands alone, so any row range of the bytes is the encoding of that row range. Little-endian.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Rows: TypeAlias = npt.NDArray[np.float32]  # (count, dim)
Bytes: TypeAlias = npt.NDArray[np.uint8]  # (count * row_bytes,)


class Codec(Protocol):
    """One storage format; implementations are frozen, stateless values."""

    @property
    def name(self) -> str:
        """The word used on the wire, e.g. `fp16`."""

    @property
    def number(self) -> int:
        """Identity on disk; never reused for another format."""

    def check_dim(self, dim: int) -> None:
        """Raise PionError, saying what would work, if rows of `dim` values cannot be stored."""

    def row_bytes(self, dim: int) -> int:
        """Bytes of one row of `dim` values."""

    def encode(self, rows: Rows) -> Bytes:
        """fp32 (count, dim) -> uint8 (count * row_bytes(dim),). NaN and infinity are kept."""

    def decode(self, data: Bytes, dim: int) -> Rows:
        """uint8 (count * row_bytes(dim),) -> fp32 (count, dim)."""
