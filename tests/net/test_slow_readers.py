"""Invariant: what a client does not read costs the server a few megabytes at most, and however late
it reads, it gets the bytes that were stored when it asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pion_server.net.memory import KEPT

LAYERS, ROWS, DIM = 12, 8192, 2048  # 32 MB a layer in fp16, 384 MB in all
TOTAL = LAYERS * ROWS * DIM * 2
# What one reader may cost: pieces that were handed to the transport or are being converted, and
# what the allocator keeps of them.
PER_READER = 24 << 20
ROW = np.arange(DIM).astype(np.float16)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue("pion_server")


@pytest.fixture
def stored(server: Any, dial: Any) -> Iterator[Callable[[], None]]:
    """Namespace `slow`: its K side holds ROW everywhere; calling it drops the namespace."""
    wire = dial(server.port)
    wire.send("KV.PREFIX.REGISTER", "slow", DIM, "fp16")
    wire.expect(b"+OK\r\n")
    blob = ROW.tobytes() * ROWS
    for layer in range(LAYERS):
        wire.send("V.STOREBATCH", "slow_pk", layer, 0, ROWS, blob, "FMT", "NATIVE")
        wire.expect(b"+OK\r\n")
    yield lambda: wire.ask("KV.PREFIX.DROP", "slow")
    wire.ask("KV.PREFIX.DROP", "slow")


def fetch(wire: Any, fmt: str) -> None:
    wire.send("V.FETCH", "slow_pk", "BATCH", 0, ROWS, LAYERS, "FMT", fmt)


def settle(wire: Any) -> None:
    """Give the server time to do whatever it is going to do."""
    for _ in range(10):
        assert wire.ask("PING") == b"+PONG\r\n"
        time.sleep(0.02)


def read_all(wire: Any, fmt: str) -> None:
    row = ROW if fmt == "NATIVE" else ROW.astype(np.float32)
    wire.expect(b"*%d\r\n" % LAYERS)
    for _ in range(LAYERS):
        wire.expect_bulk(row.tobytes() * 256, ROWS // 256)


@pytest.mark.parametrize("fmt", ["NATIVE", "FP32"])
def test_a_reply_of_256_mb(
    server: Any, dial: Any, stored: Any, resident: Callable[[int], int], fmt: str
) -> None:
    readers, other = [dial(server.port) for _ in range(2)], dial(server.port)
    before = resident(server.pid)
    for reader in readers:
        fetch(reader, fmt)
    settle(other)
    assert resident(server.pid) - before < len(readers) * PER_READER
    for reader in readers:
        read_all(reader, fmt)
    assert resident(server.pid) - before < len(readers) * PER_READER


def test_many_fetches_in_one_pipeline(
    server: Any, dial: Any, stored: Any, resident: Callable[[int], int]
) -> None:
    """128 GB are owed; only the first reply is ever begun."""
    reader, other = dial(server.port), dial(server.port)
    before = resident(server.pid)
    for _ in range(500):
        fetch(reader, "FP32")
    settle(other)
    read_all(reader, "FP32")
    settle(other)
    assert resident(server.pid) - before < PER_READER


@pytest.mark.parametrize("fmt", ["NATIVE", "FP32"])
def test_rows_that_are_dropped_or_replaced_still_arrive(
    server: Any, dial: Any, stored: Any, fmt: str
) -> None:
    reader, other = dial(server.port), dial(server.port)
    fetch(reader, fmt)
    reader.expect(b"*%d" % LAYERS)
    for layer in range(LAYERS):
        other.send("V.STOREBATCH", "slow_pk", layer, 5, 1, bytes(2 * DIM), "FMT", "NATIVE")
        other.expect(b"+OK\r\n")
    assert other.ask("KV.PREFIX.DROP", "slow") == b":1\r\n"
    reader.expect(b"\r\n")
    row = ROW if fmt == "NATIVE" else ROW.astype(np.float32)
    for _ in range(LAYERS):
        reader.expect_bulk(row.tobytes() * 256, ROWS // 256)


def test_a_reader_that_goes_away_gives_back_what_it_held(
    server: Any,
    dial: Any,
    stored: Callable[[], None],
    resident: Callable[[int], int],
    eventually: Any,
) -> None:
    """The last one who holds dropped rows is the reply that was never read. KEPT bytes stay for the
    next rows."""
    reader, other = dial(server.port), dial(server.port)
    for _ in range(20):
        fetch(reader, "NATIVE")
    reader.expect(b"*%d\r\n" % LAYERS)
    settle(other)
    held = resident(server.pid)
    stored()
    reader.reset()
    eventually(lambda: resident(server.pid) < held - 0.9 * (TOTAL - KEPT))
    assert other.ask("PING") == b"+PONG\r\n"
