"""Invariant: what another worker of the server holds is found there, whatever worker a store lands
on; without auto_redirect the server's answer is what the caller sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pion_lmcache import PionStore

from pion_server.client import Client, Elsewhere, PionError

WORKERS = 3
ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)
HASHES = np.arange(5, dtype=np.uint64)


@pytest.fixture
def ports(own_pion: Callable[..., Any]) -> list[int]:
    """The own port of each worker of a server."""
    with Client(own_pion("-w", str(WORKERS)).url) as client:
        return [each.port for each in client.pion_workers()]


def test_every_worker_is_found(ports: list[int]) -> None:
    for owner, port in enumerate(ports):
        with PionStore(port=port, vquant="fp32") as store:
            store.register(f"ns-{owner}", kv_dim=4, blocks=(64, HASHES))
    for port in ports:
        with PionStore(port=port) as store:
            for owner in range(WORKERS):
                name = f"ns-{owner}"
                store.store_layer(name, "K", layer=0, token_offset=0, tensor_fp32=ROWS)
                assert np.array_equal(store.fetch_layer(name, "K", layer=0, start=0, end=2), ROWS)
                assert store.lookup(name)
                assert store.blocks(name) is not None
                assert np.all(store.membership(name, HASHES))
    with PionStore(port=ports[0]) as store:
        assert [store.drop(f"ns-{owner}") for owner in range(WORKERS)] == [True] * WORKERS
        assert not store.lookup("ns-2")


def test_without_it_the_answer_is_raised(ports: list[int]) -> None:
    with PionStore(port=ports[2]) as store:
        store.register("ns", kv_dim=4)
    with PionStore(port=ports[0], auto_redirect=False) as store:
        assert store.lookup("ns")
        with pytest.raises(Elsewhere, match=r"V\.FETCH session lives on worker 2"):
            store.fetch_layer("ns", "K", layer=0, start=0, end=1)


def test_other_errors_are_not_chased(pion: Any) -> None:
    with PionStore(port=pion.port) as store, pytest.raises(PionError, match="unknown session"):
        store.store_layer("ns", "K", layer=0, token_offset=0, tensor_fp32=ROWS)
