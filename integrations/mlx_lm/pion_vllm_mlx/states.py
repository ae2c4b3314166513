"""Recurrent states as one blob a leaf: the specification's version 1, little-endian.

    uint32 version = 1, uint32 arrays
    for each array: uint32 axes, uint32[axes] shape, uint32 dtype code, the raw values

The specification has codes 0 to 2, where 2 is bfloat16 widened to fp32; that is read. Written is
bfloat16 as it is (code 3, half the bytes), and further codes serve what it leaves out: integers,
and an array that is absent.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pion_vllm_mlx.caches import State

VERSION = 1
_ABSENT = 255
_WIDENED = 2  # bfloat16, stored as fp32
_CODES = {
    mx.float32: 0,
    mx.float16: 1,
    mx.bfloat16: 3,
    mx.int32: 4,
    mx.int64: 5,
    mx.uint32: 6,
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()} | {_WIDENED: mx.float32}
_MAX_AXES = 8

Packed = bytearray


@dataclass(frozen=True, slots=True)
class Frozen:
    """One array of a state, evaluated and as bytes, so that any thread may pack it."""

    shape: tuple[int, ...]
    code: int
    data: npt.NDArray[np.uint8] | None


def freeze(state: State) -> list[Frozen]:
    """Evaluate a state, on the thread that computed it. Raises ValueError for a dtype without a
    code."""
    flat = [None if array is None else _flat(array) for array in state]
    mx.eval([array for array in flat if array is not None])
    return [_frozen(array, data) for array, data in zip(state, flat, strict=True)]


def pack(arrays: Sequence[Frozen]) -> Packed:
    """The blob of a state."""
    blob = bytearray(struct.pack("<2I", VERSION, len(arrays)))
    for array in arrays:
        head = (len(array.shape), *array.shape, array.code)
        blob += struct.pack(f"<{len(head)}I", *head)
        if array.data is not None:
            blob += array.data.data
    return blob


def unpack(blob: bytes | memoryview) -> State:
    """The state in a blob; not evaluated. Raises ValueError where it is no such blob."""
    reader = _Reader(memoryview(blob))
    version, count = reader.numbers(2)
    if version != VERSION:
        raise ValueError(f"a state of version {version}, expected {VERSION}")
    if count > len(blob):
        raise ValueError(f"{count} arrays in {len(blob)} bytes")
    state = [_array(reader) for _ in range(count)]
    if reader.left:
        raise ValueError(f"{reader.left} bytes behind the last array of a state")
    return state


def _flat(array: mx.array) -> mx.array:
    if array.dtype not in _CODES:
        raise ValueError(f"no code for {array.dtype} arrays in a state")
    return mx.contiguous(array.reshape(-1).view(mx.uint8))


def _frozen(array: mx.array | None, flat: mx.array | None) -> Frozen:
    if array is None or flat is None:
        return Frozen((), _ABSENT, None)
    return Frozen(array.shape, _CODES[array.dtype], np.asarray(flat))


def _array(reader: _Reader) -> mx.array | None:
    (axes,) = reader.numbers(1)
    if axes > _MAX_AXES:
        raise ValueError(f"an array of {axes} axes in a state")
    *shape, code = reader.numbers(axes + 1)
    if code == _ABSENT:
        return None
    if code not in _DTYPES:
        raise ValueError(f"unknown dtype code {code} in a state")
    dtype = _DTYPES[code]
    data = reader.bytes(math.prod(shape) * dtype.size)
    array = mx.array(np.frombuffer(data, np.uint8)).view(dtype).reshape(shape)
    return array.astype(mx.bfloat16) if code == _WIDENED else array


class _Reader:
    """Reads a blob from its beginning; raises ValueError where it ends too early."""

    def __init__(self, blob: memoryview) -> None:
        self._rest = blob

    @property
    def left(self) -> int:
        return len(self._rest)

    def numbers(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}I", self.bytes(4 * count))

    def bytes(self, count: int) -> memoryview:
        if count > self.left:
            raise ValueError(f"a state ends {count - self.left} bytes too early")
        data, self._rest = self._rest[:count], self._rest[count:]
        return data
