"""Invariant: what a backend of LMCache gets is bit for bit what one stored, each in its own slot,
and every buffer goes back to where it came from.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="needs lmcache (Linux): make lmcache")

import numpy as np
import torch
from lmcache.v1.metadata import LMCacheMetadata

from integrations.lmcache.tests import engines
from integrations.lmcache.tests.backends import bits, release
from pion_server.client import Client
from pion_server.codecs.table import by_name, names

CHUNK = engines.CHUNK


def of(
    dtype: torch.dtype, mla: bool = False, heads: int = 2, head_size: int = 16, shape: Any = None
) -> Any:
    shape = shape or (3, 1 if mla else 2, CHUNK, 1 if mla else heads, head_size)
    return LMCacheMetadata(
        "a/model", 1, 1, 0, 0, dtype, shape, use_mla=mla, chunk_size=shape[2], role="worker"
    )


LAYOUTS = {
    "bf16": of(torch.bfloat16),
    "fp16": of(torch.float16),
    "fp32": of(torch.float32),
    "fp8": of(torch.float8_e4m3fn),
    "uint8, odd width": of(torch.uint8, heads=1, head_size=5),
    "mla, 3 layers": of(torch.bfloat16, mla=True, head_size=72),
}


@pytest.mark.parametrize("metadata", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_comes_back_bit_for_bit(url: str, connect: Any, metadata: Any) -> None:
    writer, reader = connect(url, metadata), connect(url, metadata)
    keys, contents = writer.stored(3)
    assert reader.remote.batched_contains(keys) == 3
    assert reader.get(keys) == contents
    assert writer.in_use == reader.in_use == 0


def test_holes_stay_in_their_slots(url: str, connect: Any) -> None:
    backend = connect(url)
    keys, contents = backend.stored(5)
    assert backend.remote.remove(keys[1])
    assert backend.remote.remove(keys[3])
    assert backend.get(keys) == [contents[0], None, contents[2], None, contents[4]]
    assert [backend.remote.contains(key) for key in keys] == [True, False, True, False, True]
    assert backend.remote.batched_contains(keys) == 1
    assert backend.call(backend.remote.batched_async_contains("id", keys)) == 1
    assert backend.in_use == 0


def test_the_leading_run_is_all_that_a_non_blocking_get_returns(url: str, connect: Any) -> None:
    backend = connect(url)
    keys, contents = backend.stored(4)
    assert backend.remote.remove(keys[2])
    found = backend.call(backend.remote.batched_get_non_blocking("id", keys))
    assert [bits(obj) for obj in found] == contents[:2]
    release(found)
    assert backend.in_use == 0


def test_a_single_get(url: str, connect: Any) -> None:
    backend = connect(url)
    keys, contents = backend.stored(1)
    obj = backend.remote.get_blocking(keys[0])
    assert bits(obj) == contents[0]
    release([obj])
    assert backend.remote.get_blocking(backend.keys(1)[0]) is None
    assert backend.in_use == 0


def test_a_chunk_that_is_there_is_not_sent_again(url: str, connect: Any) -> None:
    backend = connect(url)
    keys, contents = backend.stored(3)
    sent = backend.connector.engine.counts["bytes_stored"]
    others = backend.chunks(4)
    backend.put([*keys, *backend.keys(1)], others)
    release(others)
    counts = backend.connector.engine.counts
    assert counts["bytes_stored"] == sent * 4 // 3
    assert counts["there"] == 3
    assert backend.get(keys) == contents


def test_references_are_counted_right(
    url: str, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    backend = connect(url)
    caplog.clear()
    keys, objects = backend.keys(2), backend.chunks(2)
    backend.put(keys, objects)
    assert [obj.get_ref_count() for obj in objects] == [1, 1]
    found = backend.remote.batched_get_blocking(keys)
    assert [obj.get_ref_count() for obj in found] == [1, 1]
    twice = objects[0]
    release([*objects, *found])
    del objects, found
    gc.collect()
    assert backend.in_use == 0
    assert not caplog.records
    release([twice])
    assert "Double free" in caplog.text  # so it would have been seen


def test_partial_chunks(url: str, connect: Any) -> None:
    backend = connect(url)
    keys, objects = backend.keys(3), [backend.chunk(17), backend.chunk(), backend.chunk(1)]
    backend.put(keys, objects)
    found = backend.remote.batched_get_blocking(keys)
    assert [obj.get_shape()[2] for obj in found] == [17, CHUNK, 1]
    for obj, stored in zip(found, objects, strict=True):
        assert torch.equal(obj.tensor.view(torch.uint8), stored.tensor.view(torch.uint8))
    release([*objects, *found])
    assert backend.in_use == 0


def test_other_layouts_and_prefixes_are_other_keys(url: str, connect: Any) -> None:
    keys, contents = connect(url).stored(1)
    longer = (engines.LAYERS, 2, 2 * CHUNK, engines.HEADS, engines.HEAD_SIZE)
    strangers = [
        connect(url, of(torch.bfloat16)),
        connect(url, of(torch.float16)),
        connect(url, of(torch.bfloat16, shape=longer)),
        connect(url, prefix="another/"),
        connect(url, vquant="fp16"),
    ]
    for stranger in strangers:
        assert stranger.remote.batched_contains(keys) == 0
        assert stranger.get(keys) == [None]
    assert connect(url).get(keys) == contents


def test_what_is_not_whole_is_not_there(url: str, connect: Any) -> None:
    backend = connect(url)
    (key,), (content,) = backend.stored(1)
    name, layout = backend.connector._name(key), backend.connector.layout
    with Client(url) as client:
        client.prefix_drop(name)
        client.prefix_register(name, layout.dim, layout.codec, layers=1, tokens=layout.rows)
        half = content[: len(content) // 2]
        rows = half[: len(half) // layout.rows * (layout.rows - 1)]
        client.prefix_store(name, 0, layout.rows - 1, [(rows, rows)], fmt="NATIVE")
    assert not backend.remote.contains(key)
    assert backend.get([key]) == [None]


@pytest.mark.parametrize("codec", names())
def test_a_codec_of_the_server(url: str, connect: Any, codec: str) -> None:
    backend = connect(url, of(torch.float32), vquant=codec)
    keys, objects = backend.keys(1), backend.chunks(1)
    objects[0].tensor.normal_()
    backend.put(keys, objects)
    (found,) = backend.remote.batched_get_blocking(keys)
    format_, dim = by_name(codec), backend.connector.layout.dim
    rows = objects[0].tensor.numpy().reshape(-1, dim)
    assert np.array_equal(
        found.tensor.numpy().reshape(-1, dim), format_.decode(format_.encode(rows), dim)
    )
    release([*objects, found])


def test_a_batch_is_one_round_trip_each_way(
    url: str, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trips: list[int] = []
    pipeline = Client.pipeline

    def counted(client: Client, calls: Any, **options: Any) -> Any:
        trips.append(len(calls))
        return pipeline(client, calls, **options)

    backend = connect(url)
    keys, objects = backend.keys(100), backend.chunks(10)
    monkeypatch.setattr(Client, "pipeline", counted)
    assert backend.remote.batched_contains(keys) == 0
    assert len(trips) == 1
    backend.put(keys[:10], objects)
    assert len(trips) == 1 + 3  # what is there: the leading run and the rest; then the chunks
    release(objects)
    assert None not in backend.get(keys[:10])
    assert len(trips) == 4 + 1
    assert backend.call(backend.remote.connection.batched_async_contains("id", keys)) == 10
    assert len(trips) == 5 + 1


def test_short_memory_is_a_miss(url: str, connect: Any) -> None:
    backend = connect(url)
    keys, contents = backend.stored(4)
    room = backend.local.memory_allocator.size // backend.metadata.get_shapes()[0].numel() // 2
    held = backend.chunks(room - 2)
    assert backend.get(keys) == [*contents[:2], None, None]
    release(held)
    assert backend.in_use == 0


def test_ping(url: str, connect: Any) -> None:
    backend = connect(url)
    assert backend.remote.connection.support_ping()
    assert backend.call(backend.remote.connection.ping()) == 0


def test_a_password(own_pion: Any, connect: Any) -> None:
    place = own_pion("--requirepass", "p@ss:word/").url.removeprefix("pion://")
    backend = connect(f"pion://default:p%40ss%3Aword%2F@{place}")
    keys, contents = backend.stored(1)
    assert backend.get(keys) == contents
    stranger = connect(f"pion://default:wrong@{place}")
    assert not stranger.remote.contains(keys[0])
    assert stranger.get(keys) == [None]


def test_users_see_keys_of_their_own(own_pion: Any, connect: Any) -> None:
    users = "--tenant", "ann:secret-a", "--tenant", "bob:secret-b"
    place = own_pion(*users).url.removeprefix("pion://")
    ann, bob = (connect(f"pion://{name}:secret-{name[0]}@{place}") for name in ("ann", "bob"))
    keys, contents = ann.stored(2)
    assert ann.get(keys) == contents
    assert bob.remote.batched_contains(keys) == 0
    assert bob.get(keys) == [None, None]
