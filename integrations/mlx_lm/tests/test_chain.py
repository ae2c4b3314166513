"""A block's name depends on every token up to its end, on its length, and on nothing else."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from pion_vllm_mlx.chain import Chain
from pion_vllm_mlx.pace import TRY_EVERY, Pace

ROOT = "00ff"
BLOCK = 4


def test_the_names_are_the_documented_hashes() -> None:
    def tokens(*ids: int) -> bytes:
        return np.array(ids, "<i8").tobytes()

    chain = Chain(ROOT, [1, 2, 3, 4, 5, 6, 7, 8, 9], BLOCK)
    root = hashlib.sha256(bytes.fromhex(ROOT)).digest()
    first = hashlib.sha256(root + tokens(1, 2, 3, 4)).digest()
    second = hashlib.sha256(first + tokens(5, 6, 7, 8)).digest()
    assert list(chain.names([4, 8])) == [first.hex()[:32], second.hex()[:32]]
    assert chain.name(9) == hashlib.sha256(second + tokens(9)).hexdigest()[:32]
    assert chain.name(6) == hashlib.sha256(first + tokens(5, 6)).hexdigest()[:32]


@given(st.lists(st.integers(0, 2), max_size=20), st.lists(st.integers(0, 2), max_size=20))
def test_equal_names_mean_equal_prefixes(left: list[int], right: list[int]) -> None:
    chains = Chain(ROOT, left, BLOCK), Chain(ROOT, right, BLOCK)
    for end in range(1, len(left) + 1):
        for other in range(1, len(right) + 1):
            same = chains[0].name(end) == chains[1].name(other)
            assert same == (left[:end] == right[:other])


@given(st.integers(0, 30), st.data())
def test_blocks_cover_every_token_once(length: int, data: st.DataObject) -> None:
    chain = Chain(ROOT, [0] * length, BLOCK)
    position = data.draw(st.integers(0, length))
    covered = [n for end in chain.ends(position) for n in range(chain.start(end), end)]
    assert covered == list(range(position))
    assert [end for end in chain.ends(length) if end % BLOCK == 0] == list(chain.boundaries)


def test_another_root_is_another_chain() -> None:
    assert Chain("00", [1] * 4, BLOCK).name(4) != Chain("01", [1] * 4, BLOCK).name(4)


def test_ids_of_images_may_be_negative_and_large() -> None:
    ids = [-1 - (1 << 60), 1 << 40, 0, 0]
    assert Chain(ROOT, ids, BLOCK).name(4) != Chain(ROOT, [0, 0, 0, 0], BLOCK).name(4)


def test_a_restore_that_is_slower_than_prefilling_is_tried_now_and_then() -> None:
    pace = Pace()
    assert pace.worth(1, 1 << 40)  # nothing is known
    pace.prefilled(100, 1.0)
    assert pace.worth(1, 1 << 40)
    pace.restored(100, 1.0)
    assert pace.worth(10, 10)
    assert pace.worth(10, 9)
    tries = [pace.worth(10, 11) for _ in range(2 * TRY_EVERY)]
    assert tries.count(True) == 2
    for _ in range(30):
        pace.restored(100, 0.01)  # the network has become better
    assert pace.worth(10, 11)


def test_the_pace_is_that_of_late() -> None:
    pace = Pace()
    assert pace.prefill_seconds(1) is None
    for seconds in (100.0, *[1.0] * 50):
        pace.prefilled(10, seconds)
    assert 0.9 < (pace.prefill_seconds(10) or 0) < 1.1
