"""Invariant: a buffer goes out as the bytes it has in memory, by reference, or is refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pion_server.client import PionError
from pion_server.client.buffers import raw, writable

DTYPES = ["<f4", "<f2", "u1", "<u8", "?", ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 4), (2, 0, 3), (2, 3, 4)])
def test_an_array_is_passed_by_reference(dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype)
    view = raw(array)
    assert (view.format, view.shape) == ("B", (array.nbytes,))
    assert bytes(view) == array.tobytes()
    assert array.size == 0 or np.shares_memory(np.frombuffer(view, np.uint8), array)


def test_other_buffers_are_passed_by_reference() -> None:
    owner = bytearray(range(12))
    for value in (owner, memoryview(owner), memoryview(owner).cast("f")):
        view = raw(value)
        owner[0] ^= 0xFF
        assert view.format == "B"
        assert bytes(view) == bytes(owner)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.ones((4, 4))[:, ::2], "not C-contiguous"),
        (np.asfortranarray(np.ones((3, 4))), "not C-contiguous"),
        (np.ones(3, ">f4"), "little-endian"),
        (np.array([object()]), "little-endian"),
        (memoryview(b"12345678")[::2], "C-contiguous buffer"),
        ([1.0, 2.0], "C-contiguous buffer"),
        (None, "C-contiguous buffer"),
    ],
)
def test_what_is_not_the_bytes_to_send_is_refused(value: Any, words: str) -> None:
    with pytest.raises(PionError, match=words):
        raw(value)


def test_read_only_memory_is_never_received_into() -> None:
    frozen = np.zeros(4, np.uint8)
    frozen.flags.writeable = False
    for value in (b"1234", memoryview(b"1234"), frozen):
        with pytest.raises(PionError, match="read-only"):
            writable(value)
    assert writable(np.zeros(4, np.float16)).nbytes == 8
