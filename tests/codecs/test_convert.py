"""Invariant: wire bytes and stored bytes are the same memory where formats agree, and equal rows
converted piece by piece or whole where they differ; a blob of another length is refused."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from pion_server.codecs.base import Codec
from pion_server.codecs.convert import (
    PIECE,
    WireFormat,
    from_stored,
    is_free,
    row_pieces,
    to_stored,
)
from pion_server.codecs.table import by_name, names
from pion_server.errors import PionError

PAIRS = [(fmt, by_name(name)) for fmt, name in product(WireFormat, names())]
COMPUTED = [(fmt, codec) for fmt, codec in PAIRS if not is_free(fmt, codec)]


def label(value: object) -> str:
    return value.name if hasattr(value, "name") else str(value)


def wire_rows(fmt: WireFormat, codec: Codec, count: int, dim: int) -> memoryview:
    """Random rows with NaN, infinities and what overflows fp16, in the wire's format."""
    rows = np.random.default_rng(dim).standard_normal((count, dim)).astype(np.float32)
    rows.ravel()[:5] = [np.nan, np.inf, -np.inf, 1e6, 1e-8][: rows.size]
    return fmt.codec(codec).encode(rows).data


def test_six_of_twelve_pairs_are_free() -> None:
    assert {(fmt.value, codec.name) for fmt, codec in PAIRS if is_free(fmt, codec)} == {
        *((name, name) for name in names()),
        *(("native", name) for name in names()),
    }


@pytest.mark.parametrize(("fmt", "codec"), [p for p in PAIRS if p not in COMPUTED], ids=label)
def test_a_free_pair_gives_the_same_memory_back(fmt: WireFormat, codec: Codec) -> None:
    data = wire_rows(fmt, codec, 6, 5)
    assert to_stored(fmt, data, codec, 5, 6) is data
    assert from_stored(fmt, data, codec, 5) is data


@pytest.mark.parametrize(("fmt", "codec"), COMPUTED, ids=label)
@pytest.mark.parametrize(
    ("count", "dim"), [(1, 1), (3, 7), (2 * PIECE // 64 + 1, 16), (3, PIECE // 2)], ids=str
)
def test_pieces_equal_the_whole(fmt: WireFormat, codec: Codec, count: int, dim: int) -> None:
    data = wire_rows(fmt, codec, count, dim)
    wire = fmt.codec(codec)
    rows = wire.decode(np.frombuffer(data, np.uint8), dim)
    stored = to_stored(fmt, data, codec, dim, count)
    assert stored.format == "B"
    assert stored == codec.encode(rows).data
    pieces = [from_stored(fmt, piece, codec, dim) for piece in row_pieces(stored, codec, wire, dim)]
    assert b"".join(pieces) == wire.encode(codec.decode(np.asarray(stored), dim)).tobytes()


def test_pieces_are_whole_rows_of_about_a_megabyte_in_the_wider_format() -> None:
    fp16, fp32 = by_name("fp16"), by_name("fp32")
    data = memoryview(bytes(2 * 300 * 10_000))
    pieces = list(row_pieces(data, fp16, fp32, 300))
    assert b"".join(pieces) == data
    assert all(piece.nbytes % 600 == 0 for piece in pieces)
    assert all(PIECE - 1200 < 2 * piece.nbytes <= PIECE for piece in pieces[:-1])


@pytest.mark.parametrize(("fmt", "codec"), PAIRS, ids=label)
@pytest.mark.parametrize("wrong", [-1, 1, 4], ids=str)
def test_a_wrong_length_is_refused_in_words(fmt: WireFormat, codec: Codec, wrong: int) -> None:
    data = wire_rows(fmt, codec, 6, 5)
    other = memoryview(bytes(data) + b"xxxx")[: data.nbytes + wrong]
    with pytest.raises(PionError) as caught:
        to_stored(fmt, other, codec, 5, 6)
    for part in (f"expected {data.nbytes} bytes", "6 rows x 5 values", f"got {other.nbytes}"):
        assert part in str(caught.value)


def test_a_huge_count_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(PionError, match="got 8"):
        to_stored(WireFormat.FP32, memoryview(bytes(8)), by_name("fp16"), 1 << 20, 1 << 60)
