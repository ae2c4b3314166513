"""Invariant: a state answers with the K/V that it stands for as it is now, or says that it is cold
or not there; never with K/V of before a store, an overwrite, a drop or an eviction.

The oracle is a model of a few lines. The server keeps three layers warm and two namespaces.
"""

from __future__ import annotations

import socket
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from softmax_oracle import attention, normal

from pion_server.attention.table import COLD_ENTRIES
from pion_server.client import Client, ColdMiss, OutOfMemory, PionError
from pion_server.wire.encode import encode_request

SLOTS, LAYERS, TOKENS, HEADS, DIM = 3, 2, 3, 2, 4
NAMESPACES = ["a", "b", "c"]
# What stands for a namespace by its name, and what does since it was made of it.
SIDS = [*NAMESPACES, *(f"{ns}_attn" for ns in NAMESPACES), "other"]
QUERIES = normal(0, HEADS, 2, DIM)
GROUPS = np.arange(HEADS, dtype=np.uint8)
names, layers, sids = (st.sampled_from(each) for each in (NAMESPACES, range(LAYERS), SIDS))
seeds = st.integers(0, 2**32 - 1)


def as_rows(side: Any) -> Any:
    """(H, N, D) -> (N, H * D), as sessions hold it."""
    return np.ascontiguousarray(side.transpose(1, 0, 2)).reshape(TOKENS, HEADS * DIM)


class States(RuleBasedStateMachine):
    """Commands to a real server beside the model of it."""

    client: Client  # of a server that the test has started

    def __init__(self) -> None:
        super().__init__()
        for name in SIDS:
            self.client.prefix_drop(name)
        self.before = self.client.prefix_info()
        self.held: OrderedDict[str, list[Any]] = OrderedDict()  # K/V of each layer, LRU first
        self.warm: OrderedDict[Any, tuple[Any, str]] = OrderedDict()
        self.cold: dict[Any, str] = {}
        self.demotions = self.rehydrates = 0

    def _put(self, key: Any, pair: Any, ns: str) -> None:
        self.rehydrates += self.cold.pop(key, None) is not None
        self.warm.pop(key, None)
        self.warm[key] = pair, ns

    def _make_room(self) -> None:
        while len(self.warm) > SLOTS:
            self._demote(next(iter(self.warm)))

    def _demote(self, key: Any) -> None:
        self.cold[key] = self.warm.pop(key)[1]
        self.demotions += 1

    def _forget(self, ns: str) -> None:
        self.held.pop(ns, None)
        self.warm = OrderedDict((k, v) for k, v in self.warm.items() if v[1] != ns)
        self.cold = {key: of for key, of in self.cold.items() if of != ns}

    @rule(ns=names, seed=seeds)
    def store_namespace(self, ns: str, seed: int) -> None:
        """All of it, in the place of what is there; the third namespace costs the oldest."""
        pairs = [normal(seed + layer, 2, HEADS, TOKENS, DIM) for layer in range(LAYERS)]
        self.client.prefix_register(ns, HEADS * DIM, "fp32", layers=LAYERS, tokens=TOKENS)
        rows = [(as_rows(keys), as_rows(values)) for keys, values in pairs]
        self.client.prefix_store(ns, 0, TOKENS, rows)
        if ns not in self.held and len(self.held) == 2:
            self._forget(next(iter(self.held)))
        self.held[ns] = pairs
        self.held.move_to_end(ns)
        for key in [key for key, (_, of) in self.warm.items() if of == ns]:
            self._demote(key)

    @rule(ns=names, layer=layers, side=st.sampled_from([0, 1]), seed=seeds)
    def overwrite_a_side(self, ns: str, layer: int, side: int, seed: int) -> None:
        if ns not in self.held:
            return
        new = normal(seed, HEADS, TOKENS, DIM)
        self.client.v_storebatch(
            f"{ns}_{'pk' if side == 0 else 'pv'}", layer, 0, TOKENS, as_rows(new)
        )
        self.held.move_to_end(ns)
        pairs = list(self.held[ns])
        pairs[layer] = [new if i == side else old for i, old in enumerate(pairs[layer])]
        self.held[ns] = pairs
        for key in [key for key, (_, of) in self.warm.items() if of == ns and key[1] == layer]:
            self._demote(key)

    @rule(ns=names)
    def drop(self, ns: str) -> None:
        assert self.client.prefix_drop(ns) == (ns in self.held)
        self._forget(ns)

    @rule(sid=sids, layer=layers, seed=seeds)
    def store_state(self, sid: str, layer: int, seed: int) -> None:
        pair = normal(seed, 2, HEADS, TOKENS, DIM)
        self.client.attend_store(sid, layer, *pair)
        self._put((sid, layer), pair, sid.removesuffix("_attn"))
        self._make_room()

    @rule(ns=names, sid=st.none() | sids)
    def warm_up(self, ns: str, sid: str | None) -> None:
        if ns not in self.held:
            with pytest.raises(PionError, match="unknown namespace"):
                self.client.prefix_warm(ns, HEADS, DIM, sid)
            return
        assert self.client.prefix_warm(ns, HEADS, DIM, sid) == (LAYERS, 0)
        self.held.move_to_end(ns)
        for layer, pair in enumerate(self.held[ns]):
            self._put((sid or ns, layer), pair, ns)
        self._make_room()

    @rule(sid=sids, layer=layers)
    def look_up(self, sid: str, layer: int) -> None:
        key = (sid, layer)
        state = "HIT" if key in self.warm else "COLD" if key in self.cold else "MISS"
        assert self.client.attend_lookup(sid, layer) == state
        if key in self.warm:
            self.warm.move_to_end(key)

    @rule(sid=sids, layer=layers)
    def query(self, sid: str, layer: int) -> None:
        key = (sid, layer)
        if key in self.warm:
            self.warm.move_to_end(key)
            out, _ = self.client.attend_query(sid, layer, QUERIES)
            wanted, _ = attention(QUERIES, *self.warm[key][0], GROUPS)
            np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)
        else:
            words = "cold" if key in self.cold else "session not found"
            with pytest.raises(ColdMiss if key in self.cold else PionError, match=words):
                self.client.attend_query(sid, layer, QUERIES)

    @invariant()
    def it_is_counted(self) -> None:
        info = self.client.prefix_info()
        assert info["sdpa_warm"] == len(self.warm) <= SLOTS
        assert info["sdpa_cold"] == len(self.cold)
        assert info["sdpa_bytes"] == len(self.warm) * 2 * 4 * HEADS * TOKENS * DIM
        for name in ("demotions", "rehydrates"):
            counted = info[f"sdpa_{name}"] - self.before[f"sdpa_{name}"]
            assert counted == getattr(self, name)


@pytest.fixture
def small(connect: Callable[..., Client]) -> Client:
    """Room for SLOTS layers of state and for two namespaces."""
    return connect("--attend-slots", str(SLOTS), "--max-sessions", "4", "--attention", "numpy")


def test_any_order_of_events(small: Client) -> None:
    machine = type("Served", (States,), {"client": small})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )


def store(client: Client, ns: str, layers: int, codec: str = "fp32", seed: int = 1) -> list[Any]:
    """A namespace, and K/V of each of its layers."""
    pairs = [normal(seed + layer, 2, HEADS, TOKENS, DIM) for layer in range(layers)]
    client.prefix_register(ns, HEADS * DIM, codec, layers=layers, tokens=TOKENS)
    client.prefix_store(ns, 0, TOKENS, [(as_rows(k), as_rows(v)) for k, v in pairs])
    return pairs


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16"])
def test_warm_state_is_what_the_rows_are(served: Any, codec: str) -> None:
    """As a client would get them, and make state of them itself."""
    client, ns = served.client, f"warm-{codec}"
    store(client, ns, 2, codec)
    assert client.prefix_warm(ns, HEADS, DIM, ns + "_attn") == (2, 0)
    for layer in range(2):
        kept = []
        for side in ("_pk", "_pv"):
            rows = np.frombuffer(client.v_fetch(ns + side, layer, 0, TOKENS), "<f4")
            kept.append(np.ascontiguousarray(rows.reshape(TOKENS, HEADS, DIM).transpose(1, 0, 2)))
        out, lse = client.attend_query(ns + "_attn", layer, QUERIES)
        served.check(out, lse, QUERIES, *kept, GROUPS)


def test_layers_of_another_size_are_skipped(served: Any) -> None:
    client, row = served.client, np.ones((TOKENS, 12), np.float32)
    dims = [8, 12, 8, 8]
    sides = [[("fp32", dim) for dim in each] for each in (dims, [8, 12, 12, 8])]
    client.prefix_register_schema("mixed", *sides)
    for side, layouts in zip(("pk", "pv"), sides, strict=True):
        for layer, (_, dim) in enumerate(layouts):
            rows = np.ascontiguousarray(row[:, :dim])
            client.v_storebatch(f"mixed_{side}", layer, 0, TOKENS, rows)
    assert client.prefix_warm("mixed", 2, 4) == (2, 2)
    assert [client.attend_lookup("mixed", n) for n in range(4)] == ["HIT", "MISS", "MISS", "HIT"]
    assert client.prefix_warm("mixed", 12, 1) == (1, 3)
    assert client.prefix_warm("mixed", 5, 1) == (0, 4)


def test_a_warm_namespace_is_most_recent(small: Client) -> None:
    """The state that was brought back is not the next to go."""
    store(small, "a", 2)
    small.prefix_warm("a", HEADS, DIM)
    pair = normal(9, 2, HEADS, TOKENS, DIM)
    small.attend_store("x", 0, *pair)
    small.attend_store("x", 1, *pair)
    assert small.attend_lookup("a", 0) == "COLD"
    small.prefix_warm("a", HEADS, DIM)
    small.attend_store("y", 0, *pair)
    assert [small.attend_lookup("a", layer) for layer in range(2)] == ["HIT", "HIT"]


def test_more_layers_than_slots_are_refused_with_nothing_changed(small: Client) -> None:
    store(small, "deep", SLOTS + 1)
    pair = normal(9, 2, HEADS, TOKENS, DIM)
    small.attend_store("x", 0, *pair)
    with pytest.raises(OutOfMemory, match="--attend-slots"):
        small.prefix_warm("deep", HEADS, DIM)
    assert small.attend_lookup("deep", 0) == "MISS"
    assert small.attend_lookup("x", 0) == "HIT"


def test_the_budget_is_in_bytes_as_well(connect: Callable[..., Client]) -> None:
    """Of state that is 800 bytes a layer, five fit into 4,000."""
    client = connect("--attend-memory", "4000", "--attention", "numpy")
    pair = normal(9, 2, 1, 100, 1)
    for number in range(7):
        client.attend_store(f"s{number}", 0, *pair)
        assert client.prefix_info()["sdpa_bytes"] <= 4000
    states = [client.attend_lookup(f"s{number}", 0) for number in range(7)]
    assert states == ["COLD", "COLD", *["HIT"] * 5]
    with pytest.raises(OutOfMemory, match="--attend-memory"):
        client.attend_store("large", 0, *normal(9, 2, 1, 501, 1))
    client.prefix_register("wide", 100, "fp16")
    rows = np.ones((6, 100), np.float32)
    client.prefix_store("wide", 0, 6, [(rows, rows)])
    with pytest.raises(OutOfMemory, match="--attend-memory"):
        client.prefix_warm("wide", 1, 100)
    assert [client.attend_lookup(f"s{number}", 0) for number in range(7)] == states


def test_a_budget_of_the_store_is_one_of_state(connect: Callable[..., Client]) -> None:
    client = connect("--max-memory", "4000", "--attention", "numpy")
    with pytest.raises(OutOfMemory, match="limit of 4000"):
        client.attend_store("large", 0, *normal(9, 2, 1, 501, 1))


def test_so_many_are_cold_and_no_more(connect: Callable[..., Client]) -> None:
    client = connect("--attend-slots", "1", "--attention", "numpy")
    pair = normal(9, 2, 1, 1, 1)
    calls = [Client.attend_store(f"s{number}", 0, *pair) for number in range(COLD_ENTRIES + 3)]
    assert client.pipeline(calls) == [None] * len(calls)
    states = [client.attend_lookup(f"s{number}", 0) for number in (0, 1, 2, COLD_ENTRIES + 2)]
    assert states == ["MISS", "MISS", "COLD", "HIT"]
    assert client.prefix_info()["sdpa_cold"] == COLD_ENTRIES


def test_state_is_not_kept_on_disk(start_pion: Callable[..., Any], tmp_path: Path) -> None:
    """The namespace is, and a client makes state of it again."""
    for expected in ("HIT", "MISS"):
        server = start_pion("--data-dir", str(tmp_path))
        with Client(server.url, timeout=60) as client:
            if expected == "HIT":
                store(client, "a", 1)
                client.prefix_warm("a", HEADS, DIM)
            assert client.attend_lookup("a", 0) == expected
            assert client.prefix_lookup("a")
        server.stop()


def test_a_server_that_stops_in_the_midst_of_it(start_pion: Callable[..., Any]) -> None:
    """It ends with status 0, and no defect in its log (finish_pion looks)."""
    server = start_pion("--attention", "numpy")
    rows = np.ones((4000, 512), np.float16)
    with Client(server.url, timeout=60) as client:
        client.prefix_register("a", 512, "fp16", layers=30, tokens=4000)
        client.prefix_store("a", 0, 4000, [(rows, rows)] * 30, fmt="FP16")
        client.attend_store("x", 0, *np.ones((2, 8, 4000, 64), np.float32))
    with socket.create_connection((server.host, server.port)) as raw:
        queries = np.ones((8, 500, 64), np.float32)
        for call in (
            *[Client.attend_query("x", 0, queries)] * 4,
            Client.prefix_warm("a", 8, 64),
        ):
            for part in encode_request(call.args):
                raw.sendall(part)
        server.process.terminate()
        assert server.process.wait(60) == 0
