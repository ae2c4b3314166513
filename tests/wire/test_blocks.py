"""Invariant: a block is received into again only when no view of it is left, and no byte that
somebody can still read ever changes.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable

import numpy as np
import pytest

from pion_server.wire.blocks import AVAILABLE, Blocks

pytestmark = pytest.mark.skipif(
    not AVAILABLE, reason="blocks are used where a mapping can be resized: not on this system"
)
PAGE = 4096


@pytest.fixture
def blocks() -> Blocks:
    made = Blocks()
    made.kept = 64 * PAGE
    return made


def address(blocks: Blocks, nbytes: int) -> int:
    """Take, lend and drop a block; where it was."""
    return np.frombuffer(blocks.lend(blocks.take(nbytes, nbytes)), np.uint8).ctypes.data


def test_what_was_given_back_is_used_again(blocks: Blocks) -> None:
    first = address(blocks, 8 * PAGE)
    assert address(blocks, 8 * PAGE) == first
    shorter = blocks.lend(blocks.take(3 * PAGE, 3 * PAGE))
    assert len(shorter) == 3 * PAGE


VIEWS: dict[str, Callable[[memoryview], memoryview]] = {
    "whole": lambda lent: lent,
    "part": lambda lent: lent[PAGE : 2 * PAGE].toreadonly(),
    "cast": lambda lent: lent.cast("I"),
    "array": lambda lent: np.asarray(lent)[5:].data,
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_of_any_kind_keeps_it(blocks: Blocks, kind: str) -> None:
    lent = blocks.lend(blocks.take(8 * PAGE, 8 * PAGE))
    lent[:] = b"a" * len(lent)
    view = VIEWS[kind](lent)
    del lent
    other = blocks.lend(blocks.take(8 * PAGE, 8 * PAGE))
    other[:] = b"b" * len(other)
    assert set(view.tobytes()) == {ord("a")}


def test_no_more_waits_than_is_kept(blocks: Blocks) -> None:
    lent = [blocks.lend(blocks.take(10 * PAGE, 10 * PAGE)) for _ in range(20)]
    del lent
    gc.collect()
    assert 0 < sum(map(len, blocks._waiting)) <= blocks.kept
    blocks.kept = 0
    address(blocks, PAGE)
    assert blocks._waiting == []


def test_a_new_block_reserves_no_more_than_it_may(blocks: Blocks) -> None:
    assert len(blocks.take(100 * PAGE, 2 * PAGE)) == 2 * PAGE


def test_threads_never_share_a_block(blocks: Blocks) -> None:
    """Each fills a block with its number, waits for the others to interfere, and reads it back."""
    torn: list[int] = []

    def work(number: int) -> None:
        chance = random.Random(number)
        for _ in range(300):
            lent = blocks.lend(blocks.take(chance.randrange(1, 9) * PAGE, 8 * PAGE))
            lent[:] = bytes([number]) * len(lent)
            kept = [lent[: PAGE // 2], lent[PAGE // 2 :]]
            del lent
            if any(set(part.tobytes()) != {number} for part in kept):
                torn.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torn == []


def test_a_block_that_is_still_looked_at_is_not_used(blocks: Blocks) -> None:
    """As by the loop, until the call returns that brought the last bytes."""
    block = blocks.take(8 * PAGE, 8 * PAGE)
    looking = memoryview(block)
    before = np.frombuffer(blocks.lend(block), np.uint8).ctypes.data
    other = blocks.lend(blocks.take(8 * PAGE, 8 * PAGE))
    assert np.frombuffer(other, np.uint8).ctypes.data != before
    looking[0] = 1
    assert other[0] == 0
