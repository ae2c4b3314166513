"""Invariant: PionStore returns the rows that were stored, numpy or torch, wherever they live."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from pion_lmcache import PionStore

from pion_server.client import PionError

DIM = 8
_numbers = iter(range(1 << 30))


@pytest.fixture
def ns() -> str:
    """A namespace that nobody had before."""
    return f"store|{next(_numbers)}"


@pytest.fixture
def store(pion: Any) -> Iterator[PionStore]:
    with PionStore(port=pion.port, vquant="fp32") as made:
        yield made


def rows(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((count, DIM), dtype=np.float32)


def test_the_example_of_the_interface(pion: Any, ns: str) -> None:
    v = rows(5)
    with PionStore(port=pion.port, vquant="fp16") as s:
        s.register(ns, kv_dim=DIM)
        s.store_layer(ns, "V", layer=0, token_offset=0, tensor_fp32=v)
        assert s.lookup(ns)
        found = s.fetch_layer(ns, "V", layer=0, start=0, end=5)
    assert np.array_equal(found, v.astype(np.float16).astype(np.float32))


def test_sides_layers_and_offsets(store: PionStore, ns: str) -> None:
    store.register(ns, kv_dim=DIM)
    blocks = {
        (side, layer): rows(4, layer + 10 * (side == "V")) for side in "KV" for layer in (0, 7)
    }
    for (side, layer), block in blocks.items():
        store.store_layer(ns, side, layer=layer, token_offset=2, tensor_fp32=block[2:])
        store.store_layer(ns, side, layer=layer, token_offset=0, tensor_fp32=block[:2])
    for (side, layer), block in blocks.items():
        found = store.fetch_layer(ns, side, layer=layer, start=1, end=4)
        assert np.array_equal(found, block[1:])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_numpy_in_and_out(store: PionStore, ns: str, dtype: Any) -> None:
    block = rows(3).astype(dtype)
    store.register(ns, kv_dim=DIM)
    store.store_layer(ns, "K", layer=0, token_offset=0, tensor_fp32=block)
    out = np.zeros_like(block)
    assert store.fetch_layer(ns, "K", layer=0, start=0, end=3, out=out) is out
    assert np.array_equal(out, block)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch_in_and_out(store: PionStore, ns: str, dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    block = torch.from_numpy(rows(6)).to(getattr(torch, dtype)).reshape(3, 2, DIM)[:, 1]
    store.register(ns, kv_dim=DIM)
    store.store_layer(ns, "V", layer=1, token_offset=0, tensor_fp32=block)
    out = torch.zeros(3, DIM, dtype=getattr(torch, dtype))
    assert store.fetch_layer(ns, "V", layer=1, start=0, end=3, out=out) is out
    assert torch.equal(out, block)


def test_heads_are_part_of_a_row(store: PionStore, ns: str) -> None:
    store.register(ns, kv_dim=DIM)
    block = rows(3)
    store.store_layer(ns, "K", layer=0, token_offset=0, tensor_fp32=block.reshape(3, 2, DIM // 2))
    assert np.array_equal(store.fetch_layer(ns, "K", layer=0, start=0, end=3), block)


def test_a_declared_namespace_is_a_hit_when_all_of_it_is_in(store: PionStore, ns: str) -> None:
    store.register(ns, kv_dim=DIM, layers=1, tokens=2, fingerprint="ab")
    store.store_layer(ns, "K", layer=0, token_offset=0, tensor_fp32=rows(2))
    assert not store.lookup(ns)
    store.store_layer(ns, "V", layer=0, token_offset=0, tensor_fp32=rows(2))
    assert store.lookup(ns, fingerprint="ab")
    assert store.drop(ns)
    assert not store.lookup(ns)
    assert not store.drop(ns)


def test_blocks_and_membership(store: PionStore, ns: str) -> None:
    hashes = np.array([5, 1 << 63, 7], np.uint64)
    store.register(ns, kv_dim=DIM, blocks=(64, hashes))
    table = store.blocks(ns)
    assert table is not None
    assert table.block_size == 64
    assert np.array_equal(table.hashes, hashes)
    asked = np.array([7, 6, 5], np.uint64)
    assert np.array_equal(store.membership(ns, asked), [True, False, True])
    assert store.blocks(ns + " not") is None
    assert store.membership(ns + " not", asked) is None


@pytest.mark.parametrize("wrong", [[[1.0]], np.zeros((2, DIM)), np.zeros((2, DIM), np.int32)])
def test_what_is_no_tensor_of_floats_is_refused(store: PionStore, ns: str, wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a numpy array|rows are float32"):
        store.store_layer(ns, "K", layer=0, token_offset=0, tensor_fp32=wrong)


def test_missing_rows_and_sessions_are_errors(store: PionStore, ns: str) -> None:
    with pytest.raises(PionError, match="unknown session"):
        store.fetch_layer(ns, "K", layer=0, start=0, end=1)
    store.register(ns, kv_dim=DIM)
    with pytest.raises(PionError, match="not stored"):
        store.fetch_layer(ns, "K", layer=0, start=0, end=1)
