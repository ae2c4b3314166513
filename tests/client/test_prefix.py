"""Invariant: rows come back from a real pion-server as they were stored, whole or not at all, and
into the caller's memory where that is given.
"""

from __future__ import annotations

import uuid
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from pion_server.client import Call, Mismatch, PionError, PrefixRows, calls
from pion_server.client.calls import Layout

LAYERS, TOKENS, DIM = 3, 40, 8
FINGER, OTHER = "ab" * 16, "cd" * 16
Pairs = list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]


@pytest.fixture
def client(connect: Any, url: str) -> Any:
    return connect(url)


@pytest.fixture
def ns() -> str:
    return f"client|{uuid.uuid4().hex}"


def some_rows(dtype: Any, tokens: int = TOKENS, layers: int = LAYERS, dim: int = DIM) -> Pairs:
    rng = np.random.default_rng(7)
    made = rng.standard_normal((layers, 2, tokens, dim)).astype(dtype)
    return [(made[layer, 0], made[layer, 1]) for layer in range(layers)]


def same(fetched: PrefixRows | None, rows: Pairs) -> bool:
    assert fetched is not None
    assert len(fetched.rows) == len(rows)
    return all(
        bytes(view) == array.tobytes()
        for views, arrays in zip(fetched.rows, rows, strict=True)
        for view, array in zip(views, arrays, strict=True)
    )


@pytest.mark.parametrize(
    ("codec", "fmt", "dtype"),
    [
        ("fp16", "NATIVE", np.float16),
        ("fp16", "FP16", np.float16),
        ("bf16", "NATIVE", ml_dtypes.bfloat16),
        ("bf16", "BF16", ml_dtypes.bfloat16),
        ("fp32", None, np.float32),
    ],
)
def test_a_prefix_comes_back_bit_for_bit(
    client: Any, ns: str, codec: str, fmt: Any, dtype: Any
) -> None:
    rows = some_rows(dtype)
    client.prefix_register(ns, DIM, codec, layers=LAYERS, tokens=TOKENS, fingerprint=FINGER)
    client.prefix_store(ns, 0, TOKENS, rows, fmt=fmt)
    fetched = client.prefix_fetch(ns, fmt=fmt, fingerprint=FINGER)
    assert same(fetched, rows)
    assert (fetched.tokens, fetched.start, fetched.end, fetched.first_layer) == (40, 0, 40, 0)
    assert fetched.keys == fetched.values == (Layout(codec, DIM),) * LAYERS


def test_ranges_of_layers_and_rows(client: Any, ns: str) -> None:
    rows = some_rows(np.float16)
    client.prefix_register(ns, DIM, "fp16", layers=LAYERS, tokens=TOKENS)
    client.prefix_store(ns, 0, TOKENS, rows, fmt="FP16")
    fetched = client.prefix_fetch(ns, layers=(1, 3), rows=(5, 9), fmt="FP16")
    assert same(fetched, [(k[5:9], v[5:9]) for k, v in rows[1:3]])
    assert (fetched.tokens, fetched.start, fetched.end, fetched.first_layer) == (40, 5, 9, 1)


def test_a_declared_prefix_is_a_hit_only_when_all_rows_are_in(client: Any, ns: str) -> None:
    rows = some_rows(np.float16)
    client.prefix_register(ns, DIM, "fp16", layers=LAYERS, tokens=TOKENS)
    for layer, pair in enumerate(rows):
        assert client.prefix_lookup(ns) is False
        assert client.prefix_fetch(ns) is None
        client.prefix_store(ns, 0, TOKENS, [pair], first_layer=layer, fmt="FP16")
    assert client.prefix_lookup(ns) is True
    assert same(client.prefix_fetch(ns, fmt="NATIVE"), rows)


def test_a_schema_gives_each_layer_a_layout(client: Any, ns: str) -> None:
    keys, values = [("fp16", 4), ("fp32", 8)], [("bf16", 2), ("fp16", 6)]
    dtypes = {"fp16": np.float16, "fp32": np.float32, "bf16": ml_dtypes.bfloat16}
    rows = [
        tuple(np.arange(3 * dim).reshape(3, dim).astype(dtypes[codec]) for codec, dim in pair)
        for pair in zip(keys, values, strict=True)
    ]
    client.prefix_register_schema(ns, keys, values, tokens=3)
    client.prefix_store(ns, 0, 3, rows, fmt="NATIVE")
    fetched = client.prefix_fetch(ns, fmt="NATIVE")
    assert same(fetched, rows)
    assert (fetched.keys, fetched.values) == (tuple(keys), tuple(values))


@pytest.mark.parametrize("tokens", [4, 5000])  # small bulks are copied, large ones received
def test_rows_land_in_the_callers_memory(client: Any, ns: str, tokens: int) -> None:
    rows = some_rows(np.float16, tokens)
    client.prefix_register(ns, DIM, "fp16", layers=LAYERS, tokens=tokens)
    client.prefix_store(ns, 0, tokens, rows, fmt="FP16")
    into = np.zeros((LAYERS, 2, tokens, DIM), np.float16)

    def sink(index: int, nbytes: int) -> memoryview:
        target = into[index // 2, index % 2]
        assert nbytes == target.nbytes
        return target.reshape(-1).view(np.uint8).data

    fetched = client.prefix_fetch(ns, fmt="FP16", into=sink)
    for layer, (k, v) in enumerate(rows):
        assert np.array_equal(into[layer, 0], k)
        assert np.array_equal(into[layer, 1], v)
    for view in (view for pair in fetched.rows for view in pair):
        assert np.shares_memory(np.frombuffer(view, np.float16), into)


def test_another_fingerprint_is_told(client: Any, ns: str) -> None:
    client.prefix_register(ns, DIM, "fp16", layers=1, tokens=1, fingerprint=FINGER)
    for call in (
        calls.prefix_lookup(ns, fingerprint=OTHER),
        calls.prefix_fetch(ns, fingerprint=OTHER),
        calls.prefix_register(ns, DIM, "fp16", fingerprint=OTHER),
    ):
        with pytest.raises(Mismatch):
            client.execute(call)
    assert client.prefix_match([ns], fingerprint=OTHER) == 0


def test_a_chain_of_blocks_is_matched_in_one_round_trip(client: Any, ns: str) -> None:
    names = [f"{ns}|{block}" for block in range(4)]
    rows = some_rows(np.float16, tokens=2, layers=1)
    for name in (*names[:2], names[3]):
        client.prefix_register(name, DIM, "fp16", layers=1, tokens=2)
        client.prefix_store(name, 0, 2, rows, fmt="FP16")
    assert client.prefix_match(names) == 2
    assert client.prefix_drop(*names) == 3
    assert client.prefix_match(names) == 0


def test_block_hashes(client: Any, ns: str) -> None:
    hashes = np.random.default_rng(1).integers(0, 2**64, 1000, np.uint64)
    assert client.prefix_blocks(ns) is None
    assert client.prefix_membership(ns, hashes) is None
    client.prefix_register(ns, DIM, "fp16", blocks=(64, hashes))
    table = client.prefix_blocks(ns)
    assert (table.block_size, table.hashes.tolist()) == (64, hashes.tolist())
    probes = np.concatenate([hashes[::7], hashes[:5] ^ np.uint64(1)])
    expected = np.isin(probes, hashes)
    assert np.array_equal(client.prefix_membership(ns, probes), expected)
    assert 0 < expected.sum() < len(probes)


def test_a_store_is_all_or_nothing(client: Any, ns: str) -> None:
    rows = some_rows(np.float16)
    client.prefix_register(ns, DIM, "fp16", layers=LAYERS, tokens=TOKENS)
    cut = [*rows[:-1], (rows[-1][0], rows[-1][1][:-1].copy())]
    with pytest.raises(PionError, match="bytes"):
        client.prefix_store(ns, 0, TOKENS, cut, fmt="FP16")
    for layer in range(LAYERS):
        with pytest.raises(PionError):
            client.v_fetch(f"{ns}_pk", layer, 0, TOKENS)


def test_sessions_of_rows(client: Any, ns: str) -> None:
    rows = [k.astype(np.float32) for k, _ in some_rows(np.float16)]
    client.v_create(ns, DIM, "fp16")
    for layer, array in enumerate(rows):
        client.v_storebatch(ns, layer, 0, TOKENS, array)
    assert bytes(client.v_fetch(ns, 1, 3, 9)) == rows[1][3:9].tobytes()
    halves = client.v_fetch(ns, 1, 3, 9, fmt="FP16")
    assert np.array_equal(np.frombuffer(halves, np.float16).reshape(6, DIM), rows[1][3:9])
    ids = [7, 3, 7]
    into = np.empty((3, DIM), np.float32)
    assert bytes(client.v_fetch_ids(ns, 2, ids, into=into)) == rows[2][ids].tobytes()
    assert np.array_equal(into, rows[2][ids])
    batch = client.v_fetch_batch(ns, 0, TOKENS, LAYERS)
    assert [bytes(view) for view in batch] == [array.tobytes() for array in rows]
    client.v_create_schema(f"{ns}|s", [("fp16", 2), ("fp32", 4)])
    client.v_storebatch(f"{ns}|s", 1, 0, 1, np.ones(4, np.float32), fmt="NATIVE")
    assert bytes(client.v_fetch(f"{ns}|s", 1, 0, 1)) == np.ones(4, np.float32).tobytes()


def test_rows_that_are_not_there_are_an_error(client: Any, ns: str) -> None:
    client.v_create(ns, DIM)
    client.v_storebatch(ns, 0, 0, 2, np.ones((2, DIM), np.float32))
    into = np.full((3, DIM), 5, np.float32)
    with pytest.raises(PionError):
        client.v_fetch(ns, 0, 0, 3, into=into)
    assert (into == 5).all()
    assert client.ping() == "PONG"


def test_the_receipt(connect: Any, start_pion: Any, ns: str) -> None:
    client = connect(start_pion().url)
    rows = some_rows(np.float16)
    client.prefix_register(ns, DIM, "fp16", layers=LAYERS, tokens=TOKENS, prefill_ms=1500)
    client.prefix_store(ns, 0, TOKENS, rows, fmt="FP16")
    hit, fetched, missed = client.pipeline(
        [calls.prefix_lookup(ns), calls.prefix_fetch(ns, fmt="FP16"), calls.prefix_lookup("none")]
    )
    assert (hit, missed) == (True, False)
    assert same(fetched, rows)
    stats = client.pion_stats()
    assert len(stats) == 16
    assert (stats["kvprefix_hits"], stats["kvprefix_misses"]) == (1, 1)
    assert stats["kvprefix_tokens_served"] == TOKENS
    assert stats["prefill_seconds_avoided_measured"] == 1.5
    assert stats["kvprefix_bytes_served"] == LAYERS * 2 * TOKENS * DIM * 2
    info = client.prefix_info()
    assert (info["registered_prefixes"], info["total_prefix_tokens"]) == (1, TOKENS)
    client.pion_stats_reset()
    assert client.pion_stats()["kvprefix_hits"] == 0


def test_names_are_any_bytes(client: Any, ns: str) -> None:
    name = ns.encode() + b"\0\r\n\xff |"
    client.prefix_register(name, DIM, "fp16")
    assert client.prefix_lookup(name)
    assert client.prefix_drop(name) == 1


def test_an_unknown_command_of_another_version_leaves_the_connection(client: Any) -> None:
    with pytest.raises(PionError, match="unknown command"):
        client.execute(Call(("KV.PREFIX.NEWER", "x"), lambda reply: reply))
    assert client.ping() == "PONG"
