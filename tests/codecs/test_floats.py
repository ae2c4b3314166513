"""Invariant: a float codec rounds as IEEE 754 says, and keeps NaN, infinity and zero's sign."""

from __future__ import annotations

import struct
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pion_server.codecs.floats import BF16, FP16, FP32, FloatCodec

CODECS = (FP32, FP16, BF16)
HALVES = (FP16, BF16)
EVERY_HALF = np.arange(1 << 16, dtype="<u2")

rows_of_bits = hnp.arrays(
    np.uint32,
    st.tuples(st.integers(1, 7), st.integers(1, 9)),
    elements=st.integers(0, 2**32 - 1),
).map(lambda bits: bits.view(np.float32))


def bf16_oracle(rows: np.ndarray) -> np.ndarray:
    """Round-half-even to the upper 16 bits, in integers; NaN must be compared apart."""
    bits = rows.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def fp16_oracle(rows: np.ndarray) -> np.ndarray:
    """CPython's own conversion; what it calls too large rounds to infinity."""

    def one(value: float) -> bytes:
        try:
            return struct.pack("<e", value)
        except OverflowError:
            return struct.pack("<e", np.copysign(np.inf, value))

    return np.frombuffer(b"".join(one(float(v)) for v in rows.ravel()), "<u2").reshape(rows.shape)


ORACLES = {"bf16": bf16_oracle, "fp16": fp16_oracle}


def halves(codec: FloatCodec, rows: np.ndarray) -> np.ndarray:
    return codec.encode(rows).view("<u2").reshape(rows.shape)


@pytest.mark.parametrize("codec", HALVES, ids=lambda c: c.name)
@given(rows=rows_of_bits)
def test_any_fp32_bits_are_encoded_as_the_oracle_says(codec: FloatCodec, rows: np.ndarray) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = halves(codec, rows)
        back = codec.decode(codec.encode(rows), rows.shape[1])
    nan = np.isnan(rows)
    assert (got[~nan] == ORACLES[codec.name](rows)[~nan]).all()
    assert (np.isnan(back) == nan).all()
    assert (np.signbit(back)[~nan] == np.signbit(rows)[~nan]).all()


@pytest.mark.parametrize("codec", HALVES, ids=lambda c: c.name)
def test_every_16_bit_pattern_survives_fp32_and_back(codec: FloatCodec) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = codec.decode(EVERY_HALF.view(np.uint8), 256)
        again = halves(codec, rows).ravel()
    nan = np.isnan(rows).ravel()
    assert (again[~nan] == EVERY_HALF[~nan]).all()
    assert np.isnan(codec.decode(again.view(np.uint8), 256)).ravel()[nan].all()


def test_fp16_decodes_every_pattern_as_cpython_does() -> None:
    expected = np.array([value for (value,) in struct.iter_unpack("<e", EVERY_HALF)], np.float32)
    np.testing.assert_array_equal(FP16.decode(EVERY_HALF.view(np.uint8), 1)[:, 0], expected)


@pytest.mark.parametrize("codec", HALVES, ids=lambda c: c.name)
def test_ties_go_to_even_between_all_neighbours(codec: FloatCodec) -> None:
    positive = codec.decode(EVERY_HALF.view(np.uint8), 1)[:, 0][: 1 << 15]
    finite = positive[np.isfinite(positive)]
    middle = ((finite[:-1].astype(np.float64) + finite[1:]) / 2).astype(np.float32)
    low = np.arange(len(middle))
    assert (halves(codec, middle[:, None])[:, 0] == low + low % 2).all()


def test_what_is_too_large_becomes_infinity() -> None:
    rows = np.array([[65519.996, 65520.0, -65520.0, 3.4e38]], np.float32)
    assert FP16.decode(FP16.encode(rows), 4).tolist() == [[65504.0, np.inf, -np.inf, np.inf]]
    assert np.isposinf(BF16.decode(BF16.encode(np.float32([[3.4028235e38]])), 1)).all()


@given(rows=rows_of_bits)
def test_fp32_keeps_every_bit_and_never_copies(rows: np.ndarray) -> None:
    data = FP32.encode(rows)
    assert data.tobytes() == rows.tobytes()
    assert np.shares_memory(data, rows)
    back = FP32.decode(data, rows.shape[1])
    assert np.shares_memory(back, rows)
    assert back.tobytes() == rows.tobytes()


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
@given(rows=rows_of_bits, data=st.data())
def test_every_row_stands_alone(codec: FloatCodec, rows: np.ndarray, data: st.DataObject) -> None:
    count, dim = rows.shape
    start = data.draw(st.integers(0, count))
    end = data.draw(st.integers(start, count))
    size = codec.row_bytes(dim)
    whole = codec.encode(rows)
    assert whole.dtype == np.uint8
    assert whole.shape == (count * size,)
    assert whole[start * size : end * size].tobytes() == codec.encode(rows[start:end]).tobytes()


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
def test_strided_rows_are_encoded_in_c_order(codec: FloatCodec) -> None:
    rows = np.arange(48, dtype=np.float32).reshape(6, 8)
    for strided in (rows.T, rows[::2, ::-1], np.asfortranarray(rows)):
        plain = np.ascontiguousarray(strided)
        assert codec.encode(strided).tobytes() == codec.encode(plain).tobytes()
