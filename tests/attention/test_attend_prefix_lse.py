"""Invariant: behind the answer to M > 1 queries stands their log-sum-exp, fp32 (H, M), and with it
a client makes of two answers the one that neither server nor client could give alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from softmax_oracle import attention, normal

from pion_server.attention.base import Partial
from pion_server.attention.merge import merge


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_trailer(served: Any, sid: str, count: int) -> None:
    keys, values = normal(1, 2, 3, 20, 8)
    queries = normal(2, 3, count, 8)
    served.client.attend_store(sid, 0, keys, values)
    with served.raw() as raw:
        reply = raw.ask("ATTEND.PREFIX.QUERY", sid, 0, 3, 8, 0, queries.tobytes())
        batch = (queries.tobytes(), keys.tobytes(), values.tobytes())
        alike = raw.ask("ATTEND.QUERYBATCH", 3, 20, 8, 0, *batch)
    blob = np.frombuffer(reply[reply.index(b"\n") + 1 : -2], "<f4")
    out, lse = blob[: queries.size].reshape(queries.shape), blob[queries.size :]
    assert lse.size == (3 * count if count > 1 else 0)
    assert len(alike) == len(reply)
    served.check(out, lse.reshape(3, count) if count > 1 else None, queries, keys, values, range(3))


@pytest.mark.parametrize("split", [1, 250, 499])
@pytest.mark.parametrize("scale", [1, 30])
def test_two_halves_are_the_whole(served: Any, sid: str, split: int, scale: int) -> None:
    """One half from the server, the other from the client's own softmax."""
    keys, values = normal(1, 2, 2, 500, 32)
    queries = normal(2, 2, 6, 32, scale=scale)
    served.client.attend_store(sid, 0, keys[:, :split], values[:, :split])
    theirs = Partial(*served.client.attend_query(sid, 0, queries))
    groups = np.arange(2, dtype=np.uint8)
    mine = attention(queries, keys[:, split:], values[:, split:], groups)
    whole = merge(theirs, Partial(*(part.astype(np.float32) for part in mine)))
    rest = 500 - split
    served.check(whole.out, whole.lse, queries, keys, values, groups, sent_along=rest)


def test_merging_or_sending_the_suffix_is_the_same(served: Any, sid: str) -> None:
    keys, values = normal(1, 2, 2, 60, 16)
    queries = normal(2, 4, 4, 16)
    groups = np.array([0, 0, 1, 1], np.uint8)
    suffix = [side[:, 50:] for side in (keys, values)]
    served.client.attend_store(sid, 0, keys[:, :50], values[:, :50])
    sent = served.client.attend_query_fused(sid, 0, queries, *suffix, groups)
    theirs = Partial(*served.client.attend_query(sid, 0, queries))
    causal = np.arange(10) <= 6 + np.arange(4)[:, None]
    mine = attention(queries, *suffix, groups, causal)
    merged = merge(theirs, Partial(*(part.astype(np.float32) for part in mine)))
    np.testing.assert_allclose(sent, merged.out, rtol=1e-4, atol=1e-5)


def test_a_query_that_sees_nothing_weighs_nothing(served: Any, sid: str) -> None:
    """Its window ends before the prefix does: all comes from the suffix."""
    keys, values = normal(1, 2, 1, 30, 8)
    queries = normal(2, 1, 5, 8)
    served.client.attend_store(sid, 0, keys[:, :20], values[:, :20])
    out = served.client.attend_query_fused(
        sid, 0, queries, keys[:, 20:], values[:, 20:], [0], window=3
    )
    row, position = np.arange(30), 25 + np.arange(5)[:, None]
    seen = (row <= position) & (row > position - 3)
    served.check(out, None, queries, keys, values, [0], seen, sent_along=10)
