"""Invariant: a view gives stored memory by reference, or converts it piece by piece as it is asked
for, and stays what it was through overwrites and drops."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from pion_server.codecs.convert import PIECE, WireFormat
from pion_server.codecs.table import by_name
from pion_server.errors import PionError
from pion_server.store.layer import SMALL
from pion_server.store.mutations import (
    CreateSession,
    DropSession,
    RegisterPrefix,
    RowBlock,
    StoreRows,
)
from pion_server.store.schema import LayerFormat, Schema
from pion_server.store.store import Store

DIM = 64
FP16 = by_name("fp16")
SCHEMA = Schema.same(LayerFormat(FP16, DIM))


def stored(count: int) -> tuple[Store, np.ndarray, memoryview]:
    """A session `s` with `count` random fp16 rows, the rows as fp32, and the buffer they lie in."""
    rows = np.random.default_rng(3).standard_normal((count, DIM)).astype(np.float16)
    buffer = memoryview(bytearray(rows.tobytes()))
    store = Store()
    store.apply(CreateSession(b"s", SCHEMA))
    store.apply(StoreRows((RowBlock(b"s", 0, 0, count, buffer),)))
    return store, rows.astype(np.float32), buffer


def test_native_bytes_are_the_buffer_that_came_in() -> None:
    store, _, buffer = stored(50_000)
    for fmt in (WireFormat.NATIVE, WireFormat.FP16):
        nbytes, pieces = store.view(b"s", 0, 7, 40_000).pieces_as(fmt)
        (piece,) = pieces
        assert piece.obj is buffer.obj
        assert piece == buffer[7 * 128 : 40_000 * 128]
        assert piece.nbytes == nbytes


@pytest.mark.parametrize("fmt", [WireFormat.FP32, WireFormat.BF16])
def test_converted_pieces_are_whole_small_and_as_many_bytes_as_announced(fmt: WireFormat) -> None:
    store, rows, _ = stored(30_000)
    patch = memoryview(np.zeros((3, DIM), np.float16).tobytes())
    store.apply(StoreRows((RowBlock(b"s", 0, 12_345, 3, patch),)))
    rows[12_345:12_348] = 0
    nbytes, lazy = store.view(b"s", 0, 11, 29_999).pieces_as(fmt)
    pieces = list(lazy)
    assert sum(piece.nbytes for piece in pieces) == nbytes
    assert all(piece.nbytes <= PIECE for piece in pieces)
    wire = fmt.codec(FP16)
    assert b"".join(pieces) == wire.encode(rows[11:29_999]).tobytes()


def test_a_slow_reader_of_a_converted_reply_holds_one_piece() -> None:
    store, _, buffer = stored(1 << 19)
    tracemalloc.start()
    try:
        nbytes, pieces = store.view(b"s", 0, 0, 1 << 19).pieces_as(WireFormat.FP32)
        assert sum(piece.nbytes for piece in pieces) == nbytes == 2 * buffer.nbytes
        assert tracemalloc.get_traced_memory()[1] < 4 * PIECE
    finally:
        tracemalloc.stop()


def test_scattered_ids_come_in_their_order_and_in_few_pieces() -> None:
    store, rows, _ = stored(5000)
    ids = [*np.random.default_rng(4).integers(0, 5000, 3000).tolist(), 0, 1, 2, 4999, 4999]
    for fmt in WireFormat:
        nbytes, lazy = store.gather(b"s", 0, ids).pieces_as(fmt)
        pieces = list(lazy)
        assert b"".join(pieces) == fmt.codec(FP16).encode(rows[ids]).tobytes()
        assert sum(piece.nbytes for piece in pieces) == nbytes
        assert len(pieces) <= 2 * len(ids) * 128 / SMALL


@pytest.mark.parametrize("ids", [[0, 1, 9, 10], [10], [-1], [3, 2**31]])
def test_one_missing_id_fails_the_whole_gather(ids: list[int]) -> None:
    store, _, _ = stored(10)
    with pytest.raises(PionError, match="not stored"):
        store.gather(b"s", 0, ids)


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 3), (4, 3), (0, 11), (10, 12)])
def test_a_range_that_is_not_fully_there_is_refused(start: int, end: int) -> None:
    store, _, _ = stored(10)
    with pytest.raises(PionError):
        store.view(b"s", 0, start, end)


def test_a_view_outlives_an_overwrite_and_a_drop() -> None:
    store, rows, _ = stored(1000)
    view = store.view(b"s", 0, 0, 1000)
    zeros = memoryview(bytes(1000 * 128))
    store.apply(StoreRows((RowBlock(b"s", 0, 0, 1000, zeros),)))
    assert b"".join(store.view(b"s", 0, 0, 1000).pieces) == zeros
    store.apply(DropSession(b"s"))
    with pytest.raises(PionError, match="unknown session 's'"):
        store.view(b"s", 0, 0, 1)
    _, pieces = view.pieces_as(WireFormat.FP32)
    assert b"".join(pieces) == rows.tobytes()


def test_k_and_v_and_layers_may_differ_in_codec_and_dim() -> None:
    keys = Schema.each((LayerFormat(by_name("bf16"), 2), LayerFormat(by_name("fp32"), 5)))
    values = Schema.each((LayerFormat(FP16, 3), LayerFormat(FP16, 1)))
    store = Store()
    store.apply(RegisterPrefix(b"ns", keys, values))
    for sid, schema in ((b"ns_pk", keys), (b"ns_pv", values)):
        for layer, layer_format in enumerate(schema.formats):
            rows = np.arange(4 * layer_format.dim, dtype=np.float32).reshape(4, -1)
            data = layer_format.codec.encode(rows).data
            store.apply(StoreRows((RowBlock(sid, layer, 0, 4, data),)))
            nbytes, pieces = store.view(sid, layer, 1, 3).pieces_as(WireFormat.FP32)
            assert nbytes == 2 * 4 * layer_format.dim
            assert b"".join(pieces) == rows[1:3].tobytes()
