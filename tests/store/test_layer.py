"""Invariant: a layer reads like a dict of row id -> bytes, views never change, and neither memory
nor the number of extents grows beyond its bound, whatever overwrites what."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pion_server.errors import PionError
from pion_server.store.layer import SMALL, Layer

ROW = SMALL // 16  # so that a few rows are on either side of every threshold
IDS = 120


def rows_of(mark: int, count: int) -> bytearray:
    """`count` rows that tell which write they come from, and which row of it they are."""
    marks = np.empty((count, ROW // 8, 2), "<u4")
    marks[..., 0] = mark
    marks[..., 1] = np.arange(count)[:, None]
    return bytearray(marks.tobytes())


class LayerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(7, ROW)
        self.model: dict[int, bytes] = {}
        self.views: list[tuple[tuple[memoryview, ...], bytes]] = []
        self.writes = 0

    def put(self, start: int, count: int) -> None:
        self.writes += 1
        data = rows_of(self.writes, count)
        self.layer.put(start, memoryview(data))
        for i in range(count):
            self.model[start + i] = bytes(data[i * ROW : (i + 1) * ROW])

    @rule(start=st.integers(0, IDS), count=st.integers(1, 3))
    def put_a_few(self, start: int, count: int) -> None:
        self.put(start, count)

    @rule(start=st.integers(0, IDS), count=st.integers(4, IDS))
    def put_many(self, start: int, count: int) -> None:
        self.put(start, count)

    @rule(count=st.integers(1, 40))
    def append_one_by_one(self, count: int) -> None:
        end = max(self.model, default=-1) + 1
        for start in range(end, end + count):
            self.put(start, 1)

    @rule(start=st.integers(0, 2 * IDS), count=st.integers(1, IDS))
    def read(self, start: int, count: int) -> None:
        wanted = range(start, start + count)
        missing = [row for row in wanted if row not in self.model]
        assert self.layer.covered(start, start + count) == count - len(missing)
        assert self.layer.covers(start, start + count) == (not missing)
        if missing:
            last = missing[0]
            while last + 1 in wanted and last + 1 not in self.model:
                last += 1
            run = f"row {last} is" if last == missing[0] else f"rows {missing[0]} to {last} are"
            with pytest.raises(PionError, match=f"^layer 7: {run} not stored$"):
                self.layer.pieces(start, start + count)
            return
        pieces = self.layer.pieces(start, start + count)
        assert all(piece.readonly and piece.nbytes % ROW == 0 for piece in pieces)
        expected = b"".join(self.model[row] for row in wanted)
        assert b"".join(pieces) == expected
        self.views.append((pieces, expected))

    @precondition(lambda self: self.views)
    @rule()
    def views_still_read_what_they_did(self) -> None:
        for pieces, expected in self.views:
            assert b"".join(pieces) == expected

    def teardown(self) -> None:
        self.views_still_read_what_they_did()
        for row, data in self.model.items():
            assert self.layer.pieces(row, row + 1) == (data,)

    @invariant()
    def counts_are_right(self) -> None:
        assert self.layer.rows == len(self.model)
        assert self.layer.nbytes == len(self.model) * ROW

    @invariant()
    def memory_is_bounded(self) -> None:
        assert self.layer.nbytes <= self.layer.held <= 2 * self.layer.nbytes

    @invariant()
    def neighbours_that_fit_together_are_one(self) -> None:
        gaps = sum(row - 1 not in self.model for row in self.model)
        assert self.layer.extents <= 2 * self.layer.nbytes / SMALL + gaps


TestLayerMachine = LayerMachine.TestCase
TestLayerMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.fixture
def memory():
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("memory")
def test_a_large_block_is_kept_and_given_out_without_a_copy() -> None:
    buffer = memoryview(bytearray(256 << 20))
    layer = Layer(0, 4096)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    layer.put(0, buffer)
    (piece,) = layer.pieces(10, 60_000)
    assert tracemalloc.get_traced_memory()[1] - before < 64 * 1024
    assert piece.obj is buffer.obj
    assert (piece.nbytes, piece.readonly) == (59_990 * 4096, True)


@pytest.mark.usefixtures("memory")
def test_blocks_of_which_one_row_each_stays_do_not_pile_up() -> None:
    """Each write covers all but the first row of the one before: 1 of 256 rows stays."""
    layer, before = Layer(0, 1024), traced()
    for start in range(600):
        layer.put(start, memoryview(bytearray(256 * 1024)))
        assert layer.held <= 2 * layer.nbytes
    assert layer.rows == 600 + 255
    assert traced() - before < 2 * layer.nbytes + 256 * 1024


@pytest.mark.usefixtures("memory")
def test_overwriting_a_large_block_row_by_row_stays_bounded() -> None:
    layer, before = Layer(0, 1024), traced()
    layer.put(0, memoryview(bytearray(4 << 20)))
    for row in np.random.default_rng(0).permutation(4096).tolist():
        layer.put(row, memoryview(bytes([row % 256]) * 1024))
        assert layer.held <= 2 * layer.nbytes
    assert layer.extents <= 2 * layer.nbytes / SMALL
    assert traced() - before < 2 * layer.nbytes + (1 << 20)
    held = b"".join(layer.pieces(0, 4096))
    assert held == b"".join(bytes([row % 256]) * 1024 for row in range(4096))


ORDERS = {
    "appended": np.arange(20_000),
    "prepended": np.arange(20_000)[::-1],
    "scattered": np.random.default_rng(5).permutation(20_000),
}


@pytest.mark.parametrize("order", ORDERS)
def test_token_by_token_makes_few_extents(order: str) -> None:
    layer = Layer(0, 384)
    for row in ORDERS[order].tolist():
        layer.put(row, memoryview(row.to_bytes(4, "little") * 96))
    assert layer.extents <= 2 * layer.nbytes / SMALL + 1
    ids = np.frombuffer(b"".join(layer.pieces(0, 20_000)), "<u4").reshape(20_000, 96)
    assert (ids == np.arange(20_000)[:, None]).all()


def test_a_read_only_layer_cannot_be_written_through_a_view() -> None:
    layer = Layer(0, 4)
    layer.put(0, memoryview(bytearray(8)))
    (piece,) = layer.pieces(0, 2)
    with pytest.raises(TypeError, match="read-only"):
        piece[0] = 1
