"""Invariant: MEMBERSHIP is numpy's isin over the block table, and BLOCKS gives that table back."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

HASH = st.sampled_from([0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
HASHES = st.lists(HASH, min_size=1, max_size=40)


def packed(hashes: Any) -> bytes:
    return np.asarray(hashes, "<u8").tobytes()


def bits(held: Any, probes: Any) -> bytes:
    """Bit i % 8 of byte i // 8 is set where probe i is held."""
    out = bytearray(-(-len(probes) // 8))
    for i, found in enumerate(np.isin(np.asarray(probes, "<u8"), np.asarray(held, "<u8"))):
        out[i // 8] |= int(found) << (i % 8)
    return bytes(out)


def register(raw: Any, ns: bytes, hashes: Any, block_size: int = 64) -> Any:
    blocks = ("BLOCKS", block_size, len(hashes), packed(hashes))
    return raw.ask("KV.PREFIX.REGISTER", ns, 1, "fp32", *blocks)


@settings(max_examples=150, deadline=None)
@given(held=HASHES, others=HASHES, data=st.data())
def test_any_tables(raw: Any, held: list[int], others: list[int], data: st.DataObject) -> None:
    probes = data.draw(st.lists(st.sampled_from(held + others), min_size=1, max_size=40))
    assert register(raw, b"any-table", held) == "+OK"
    reply = raw.ask("KV.PREFIX.MEMBERSHIP", b"any-table", len(probes), packed(probes))
    assert reply == bits(held, probes)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1562, 50_000])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids=["none", "half", "all"])
def test_sizes_of_any_rest(
    raw: Any, new_name: Callable[[], bytes], count: int, share: float
) -> None:
    rng, ns = np.random.default_rng(count), new_name()
    held = rng.integers(0, 2**63, count, np.uint64)
    absent = rng.integers(2**63, 2**64 - 1, count, np.uint64)
    probes = np.where(rng.random(count) < share, rng.permutation(held), absent)
    assert register(raw, ns, held) == "+OK"
    reply = raw.ask("KV.PREFIX.MEMBERSHIP", ns, count, packed(probes))
    assert reply == bits(held, probes)
    assert np.unpackbits(np.frombuffer(reply, np.uint8)).sum() == np.isin(probes, held).sum()


def test_blocks_gives_the_table_back_in_token_order(
    raw: Any, new_name: Callable[[], bytes]
) -> None:
    ns, hashes = new_name(), [9, 2**64 - 1, 0, 9]
    register(raw, ns, hashes, block_size=2**32 - 1)
    assert raw.ask("KV.PREFIX.BLOCKS", ns) == struct.pack("<II", 2**32 - 1, 4) + packed(hashes)


def test_a_new_table_replaces_the_old_one_and_none_keeps_it(
    raw: Any, new_name: Callable[[], bytes]
) -> None:
    ns = new_name()
    register(raw, ns, [1, 2, 3])
    register(raw, ns, [3, 4], block_size=16)
    raw.ask("KV.PREFIX.REGISTER", ns, 1, "fp32")
    assert raw.ask("KV.PREFIX.BLOCKS", ns) == struct.pack("<II", 16, 2) + packed([3, 4])
    assert raw.ask("KV.PREFIX.MEMBERSHIP", ns, 4, packed([1, 2, 3, 4])) == b"\x0c"


def test_without_a_table_the_answer_is_unknown(raw: Any, new_name: Callable[[], bytes]) -> None:
    nobody, bare = new_name(), new_name()
    raw.ask("KV.PREFIX.REGISTER", bare, 1, "fp32")
    for ns in (nobody, bare):
        assert raw.ask("KV.PREFIX.BLOCKS", ns) == "+UNKNOWN"
        assert raw.ask("KV.PREFIX.MEMBERSHIP", ns, 1, packed([1])) == "+UNKNOWN"
