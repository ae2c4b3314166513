"""A state comes back bit for bit; what is no state is refused, whatever its bytes are."""

from __future__ import annotations

import struct
from contextlib import suppress

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pion_vllm_mlx.caches import State
from pion_vllm_mlx.states import freeze, pack, unpack

DTYPES = [mx.float32, mx.float16, mx.bfloat16, mx.int32, mx.int64, mx.uint32]


def same(left: State, right: State) -> bool:
    def bits(array: mx.array | None) -> object:
        if array is None:
            return None
        raw = mx.contiguous(array).reshape(-1).view(mx.uint8)
        return array.shape, array.dtype, bytes(np.asarray(raw))

    return [bits(array) for array in left] == [bits(array) for array in right]


@st.composite
def arrays(draw: st.DrawFn) -> mx.array | None:
    if draw(st.booleans()) and draw(st.booleans()):
        return None
    shape = draw(st.lists(st.integers(1, 4), max_size=5))
    dtype = draw(st.sampled_from(DTYPES))
    raw = draw(st.binary(min_size=dtype.size * 1024, max_size=dtype.size * 1024))
    count = int(np.prod(shape, dtype=int))
    return mx.array(np.frombuffer(raw, np.uint8)).view(dtype)[:count].reshape(shape)


@given(st.lists(arrays(), max_size=4))
@settings(deadline=None)
def test_any_state_comes_back(state: State) -> None:
    blob = pack(freeze(state))
    assert same(unpack(blob), state)
    assert same(unpack(memoryview(bytes(blob))), state)


def test_views_are_packed_as_they_look() -> None:
    array = mx.arange(24, dtype=mx.float32).reshape(2, 3, 4).transpose(2, 0, 1)[1:3]
    assert same(unpack(pack(freeze([array]))), [array])


def test_the_layout_is_the_specifications() -> None:
    wanted = struct.pack("<2I 3I 2f", 1, 1, 1, 2, 0, 1.0, -2.5)
    assert pack(freeze([mx.array([1.0, -2.5])])) == wanted
    assert pack(freeze([mx.zeros((1, 2), mx.float16)])) == struct.pack(
        "<2I 4I 2e", 1, 1, 2, 1, 2, 1, 0.0, 0.0
    )


def test_the_specifications_widened_bfloat16_is_read() -> None:
    blob = struct.pack("<2I 3I 2f", 1, 1, 1, 2, 2, 1.5, -0.0)
    assert same(unpack(blob), [mx.array([1.5, -0.0], mx.bfloat16)])


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        struct.pack("<I", 1),
        struct.pack("<2I", 2, 0),
        struct.pack("<2I", 1, 1),
        struct.pack("<2I", 1, 0xFFFFFFFF),
        struct.pack("<2I", 1, 0) + b"x",
        struct.pack("<2I 3I f", 1, 1, 1, 2, 0, 1.0),
        struct.pack("<2I 3I 3f", 1, 1, 1, 2, 0, 1.0, 1.0, 1.0),
        struct.pack("<2I 3I 2f", 1, 1, 1, 2, 77, 1.0, 1.0),
        struct.pack("<2I 2I", 1, 1, 0xFFFFFFFF, 0),
        struct.pack("<2I 10I", 1, 1, 8, *[0xFFFFFFFF] * 8, 0),
    ],
)
def test_other_bytes_are_refused(blob: bytes) -> None:
    with pytest.raises(ValueError, match=r"state|arrays"):
        unpack(blob)


@given(st.binary(max_size=200), st.integers(0, 60))
@settings(deadline=None)
def test_damage_never_crashes(junk: bytes, at: int) -> None:
    blob = pack(freeze([mx.arange(6).reshape(2, 3), None, mx.zeros((1, 2, 2), mx.bfloat16)]))
    blob[at : at + len(junk)] = junk
    with suppress(ValueError):
        mx.eval([array for array in unpack(blob) if array is not None])


def test_a_dtype_without_a_code_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no code for .+bool"):
        freeze([mx.array([True])])
