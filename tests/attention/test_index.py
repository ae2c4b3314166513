"""Invariant: an index answers over exactly the rows that were put into it, in whatever order and by
whichever command, and never has to be made warm.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from softmax_oracle import normal

from pion_server.client import Call, Client

BUDGET = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
HEADS, DIM = 2, 4
OK, NULL = b"+OK\r\n", b"$-1\r\n"


@pytest.fixture
def raw(served: Any) -> Any:
    with served.raw() as raw:
        yield raw


def as_rows(side: Any) -> bytes:
    """(H, N, D) -> (N, H * D), as bytes."""
    return bytes(np.ascontiguousarray(side.transpose(1, 0, 2)).tobytes())


def answer(reply: bytes, queries: Any) -> Any:
    blob = np.frombuffer(reply[reply.index(b"\n") + 1 : -2], "<f4")
    out, lse = blob[: queries.size].reshape(queries.shape), blob[queries.size :]
    return out, lse.reshape(queries.shape[:2])


@BUDGET
@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 5), st.booleans()), min_size=1),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_way_to_fill_it(served: Any, raw: Any, steps: Any, seed: int) -> None:
    """Head by head or token by token, asked now and then, and with some rows put right later."""
    raw.ask("KV.PREFIX.DROP", "ix")
    assert raw.ask("KV.INFO", "ix") == NULL
    keys = values = np.zeros((HEADS, 0, DIM), np.float32)
    for number, (by_head, count, ask) in enumerate(steps):
        new = normal(seed + number, 2, HEADS, count, DIM)
        if by_head:
            blobs = [side.tobytes() for side in new]
            assert raw.ask("ATTEND.STORE", "ix", 3, HEADS, count, DIM, *blobs) == OK
            at = keys.shape[1]
        else:
            at = max(0, keys.shape[1] - 2)
            assert raw.ask("KV.STORE", "ix", 3, at, count, *map(as_rows, new)) == OK
        keys, values = (
            np.concatenate([old[:, :at], side, old[:, at + count :]], axis=1)
            for old, side in zip((keys, values), new, strict=True)
        )
        if ask or number + 1 == len(steps):
            queries = normal(seed, 2 * HEADS, 3, DIM)
            reply = raw.ask("ATTEND.QUERY", "ix", 3, 2 * HEADS, DIM, 0, queries.tobytes())
            served.check(*answer(reply, queries), queries, keys, values, [0, 0, 1, 1])
    tokens = keys.shape[1]
    fetched = b"".join(b"$%d\r\n%b\r\n" % (len(r), r) for r in map(as_rows, (keys, values)))
    assert raw.ask("KV.FETCH", "ix", 3, 0, tokens) == b"*2\r\n" + fetched
    assert b":%d\r\n" % tokens in raw.ask("KV.INFO", "ix")


def test_an_index_is_a_namespace_like_any_other(served: Any, raw: Any) -> None:
    keys, values = normal(1, 2, HEADS, 6, DIM)
    queries = normal(2, HEADS, 1, DIM)
    ask = ["ATTEND.QUERY", "like", 0, HEADS, DIM, 0, queries.tobytes()]
    raw.ask("ATTEND.STORE", "like", 0, HEADS, 6, DIM, keys.tobytes(), values.tobytes())
    assert served.client.attend_lookup("like", 0) == "MISS"
    first = raw.ask(*ask)
    assert served.client.attend_lookup("like", 0) == "HIT"
    assert raw.ask(*ask) == first
    assert served.client.prefix_warm("like", HEADS, DIM) == (1, 0)
    assert served.client.prefix_lookup("like")
    assert served.client.prefix_fetch("like", fmt="NATIVE").tokens == 6
    assert served.client.prefix_drop("like") == 1
    assert raw.ask(*ask).startswith(b"-ERR unknown index")


def test_it_outlives_the_server(start_pion: Any, tmp_path: Any) -> None:
    rows = normal(1, 5, 8)
    for write in (True, False):
        server = start_pion("--data-dir", str(tmp_path))
        with Client(server.url, timeout=60) as client:
            if write:
                client.execute(stored(rows))
            assert client.prefix_fetch("kept", fmt="FP32").rows[0][0] == rows.tobytes()
        server.kill()


def stored(rows: Any) -> Any:
    words = ("KV.STORE", "kept", 0, 0, 5, rows.tobytes(), rows.tobytes())
    return Call(words, lambda reply: reply)
