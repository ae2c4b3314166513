"""Payloads by reference: a caller's arrays go out without a copy, replies land in them.

numpy has no buffer protocol for bfloat16 and its like, so arrays are viewed as bytes first.
Everything on the wire is little-endian and C-ordered; anything else is refused, never converted
behind the caller's back.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pion_server.errors import PionError

# Anything with a C-contiguous buffer; other arrays with the buffer protocol (mlx) work as well.
Buffer: TypeAlias = "bytes | bytearray | memoryview | npt.NDArray[Any]"


def raw(value: Buffer) -> memoryview:
    """The bytes of `value`, by reference, as a memoryview of format "B".

    Raises PionError where the bytes in memory are not the bytes to send.
    """
    if isinstance(value, np.ndarray):
        return _array(value)
    try:
        return memoryview(value).cast("B")
    except TypeError:
        raise PionError(f"expected a C-contiguous buffer, got {type(value).__name__}") from None


def writable(value: Buffer) -> memoryview:
    """`raw` of a buffer that a reply is received into. Raises PionError if it is read-only."""
    view = raw(value)
    if view.readonly:
        raise PionError("the buffer to receive into is read-only")
    return view


def _array(value: npt.NDArray[Any]) -> memoryview:
    if not value.flags.c_contiguous:
        raise PionError(
            f"the array of shape {value.shape} is not C-contiguous; pass np.ascontiguousarray(a)"
        )
    if value.dtype.hasobject or value.dtype.byteorder == ">":
        raise PionError(f"dtype {value.dtype} has no little-endian bytes to send")
    return value.reshape(-1).view(np.uint8).data
