"""The float formats: fp32, fp16 and bf16, little-endian IEEE 754 (bf16: its upper half) on disk.

Rounding is to nearest, ties to even; what is too large becomes infinity; NaN stays NaN (its payload
is not promised across a change of format) and infinity stays infinity. A format equal to the rows'
dtype is a view of them, not a copy. Supported machines are little-endian.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pion_server.codecs.base import Bytes, Rows


@dataclass(frozen=True, slots=True)
class FloatCodec:
    """Rows as plain floats of one numpy dtype."""

    name: str
    number: int
    dtype: np.dtype[Any]

    def check_dim(self, dim: int) -> None:
        """Every dim can be stored."""

    def row_bytes(self, dim: int) -> int:
        return dim * self.dtype.itemsize

    def encode(self, rows: Rows) -> Bytes:
        return _cast(rows, self.dtype).reshape(-1).view(np.uint8)

    def decode(self, data: Bytes, dim: int) -> Rows:
        return _cast(data.view(self.dtype).reshape(-1, dim), FP32.dtype)


def _cast(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """`values` as C-ordered `dtype`, the same memory where they are that already."""
    # Overflow to infinity and NaN are answers here, not accidents worth a warning.
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return values.astype(dtype, order="C", copy=False)


FP32 = FloatCodec("fp32", 1, np.dtype(np.float32))
FP16 = FloatCodec("fp16", 2, np.dtype(np.float16))
BF16 = FloatCodec("bf16", 3, np.dtype(ml_dtypes.bfloat16))
