"""Invariant: attention state lives with the namespace that it stands for, and a client gets there
from any worker; state of no namespace lives where it was stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pion_server.client import Elsewhere, PionError

from .conftest import ROWS, store_prefix

# The prefix of conftest.py as attention state: one head, two tokens, four values.
KEYS = ROWS.reshape(1, 2, 4)
QUERY = np.zeros((1, 1, 4), np.float32)
MEAN = ROWS.reshape(2, 4).mean(axis=0)


def test_state_is_found_from_any_worker(crew: Any) -> None:
    store_prefix(crew.client(1), "att")
    for worker in (0, 1, 2):
        for sid in ("att", "att_attn"):
            client = crew.client(worker)
            assert client.attend_lookup(sid, 0) == ("MISS" if worker == 0 else "HIT")
            client.attend_store(sid, 0, KEYS, KEYS)
            np.testing.assert_allclose(client.attend_query(sid, 0, QUERY).out[0, 0], MEAN)
            assert client.prefix_warm("att", 1, 4, sid) == (1, 0)
    crew.client(2).prefix_drop("att")
    assert crew.client(1).attend_lookup("att_attn", 0) == "MISS"


def test_a_client_that_does_not_follow_is_told_where(crew: Any) -> None:
    store_prefix(crew.client(2), "told")
    client = crew.client(0, auto_redirect=False)
    for ask in (
        lambda: client.attend_store("told_attn", 0, KEYS, KEYS),
        lambda: client.attend_lookup("told_attn", 0),
        lambda: client.attend_query("told_attn", 0, QUERY),
        lambda: client.prefix_warm("told", 1, 4),
    ):
        with pytest.raises(Elsewhere) as caught:
            ask()
        assert caught.value.worker == 2


def test_state_of_no_namespace_lives_where_it_was_stored(crew: Any) -> None:
    crew.client(1).attend_store("nobodys", 0, KEYS, KEYS)
    assert [crew.client(n).attend_lookup("nobodys", 0) for n in range(3)] == ["MISS", "HIT", "MISS"]
    with pytest.raises(PionError, match="session not found"):
        crew.client(0).attend_query("nobodys", 0, QUERY)


def test_state_of_before_does_not_answer_for_a_namespace_elsewhere(crew: Any) -> None:
    """It was stored here, and then the namespace was made on another worker."""
    crew.client(0).attend_store("moved_attn", 0, KEYS, KEYS)
    store_prefix(crew.client(1), "moved")
    assert crew.client(0).attend_lookup("moved_attn", 0) == "MISS"


def test_what_is_computed_is_computed_everywhere(crew: Any) -> None:
    for worker in range(3):
        found = crew.client(worker).attend_querybatch(QUERY, KEYS, KEYS)
        np.testing.assert_allclose(found.out[0, 0], MEAN)
