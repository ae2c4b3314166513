"""Invariant: redis-py, as it comes, stores and restores a prefix in either protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import redis


@pytest.fixture
def client(pion_server: Any, proto: int) -> Iterator[Any]:
    with redis.Redis(port=pion_server.port, protocol=proto) as client:
        yield client


def test_a_prefix_in_one_pipeline(client: Any) -> None:
    k, v = np.random.default_rng(1).random((2, 5, 8), np.float32).astype(np.float16)
    with client.pipeline(transaction=False) as pipe:
        declared = ("LAYERS", 1, "TOKENS", 5)
        pipe.execute_command("KV.PREFIX.REGISTER", "redis-py", 8, "fp16", *declared)
        blobs = (k.tobytes(), v.tobytes())
        pipe.execute_command("KV.PREFIX.STORE", "redis-py", 0, 5, "FMT", "NATIVE", "DATA", *blobs)
        pipe.execute_command("KV.PREFIX.LOOKUP", "redis-py")
        pipe.execute_command("KV.PREFIX.FETCH", "redis-py")
        registered, stored, found, (_, *fetched) = pipe.execute()
    assert (registered, stored, found) == (b"OK", b"OK", b"HIT")
    for blob, rows in zip(fetched, (k, v), strict=True):
        np.testing.assert_array_equal(np.frombuffer(blob, np.float32).reshape(5, 8), rows)


def test_errors_have_their_prefix(client: Any) -> None:
    client.execute_command("KV.PREFIX.REGISTER", "redis-py-fp", 8, "fp16", "FINGERPRINT", "aa")
    with pytest.raises(redis.ResponseError, match=r"^MISMATCH"):
        client.execute_command("KV.PREFIX.LOOKUP", "redis-py-fp", "FINGERPRINT", "bb")
    with pytest.raises(redis.ResponseError, match=r"^unknown session"):
        client.execute_command("V.FETCH", "nobody", 0, 0)
    assert client.ping()


def test_plain_keys(client: Any) -> None:
    assert client.set("redis-py-key", b"v", ex=100)
    assert client.get("redis-py-key") == b"v"
    assert 0 < client.ttl("redis-py-key") <= 100
    assert client.delete("redis-py-key") == 1
