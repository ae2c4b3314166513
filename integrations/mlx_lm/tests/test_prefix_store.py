"""Whatever leading run of a prompt anyone stored is found, comes back as it was, and is there once;
whatever goes wrong makes it shorter, never wrong."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from pion_vllm_mlx import PrefixStore, remote
from pion_vllm_mlx.background import MAX_PENDING_BYTES, Job
from pion_vllm_mlx.caches import Part, make_caches
from pion_vllm_mlx.match import namespace
from pion_vllm_mlx.prefill import prefill, segments
from pion_vllm_mlx.processes import pion_server

from pion_server.client import Client

Tiny = Callable[..., nn.Module]
Stores = Callable[..., PrefixStore]

BLOCK = 32
# Rows only; rows and windows; rows and states; states only.
FAMILIES = ["llama", "gemma3_text", "qwen3_5", "mamba2"]


def ids(length: int, seed: int = 0) -> list[int]:
    return [(7 * number + 11 * seed + number // 40) % 100 for number in range(length)]


def steps(model: Any, caches: Sequence[Any]) -> mx.array:
    caches = copy.deepcopy(caches)
    logits = [model(mx.array([suffix]), cache=caches)[:, -1] for suffix in ([5, 6, 7], [8], [9])]
    return mx.concatenate(logits)


@pytest.fixture
def server() -> Iterator[int]:
    """A server of this test's own, so that what is there is what the test put there."""
    with pion_server() as port:
        yield port


@pytest.fixture
def stores(server: int) -> Iterator[Stores]:
    """`stores(model)`: a client of `server`, as another process would have it."""
    with ExitStack() as stack:

        def make(model: Any, port: int = server, **options: Any) -> PrefixStore:
            options = {"block_tokens": BLOCK, "timeout": 30, **options}
            return stack.enter_context(PrefixStore(model, f"pion://127.0.0.1:{port}", **options))

        yield make


def fill(store: PrefixStore, model: Any, tokens: Sequence[int]) -> Any:
    """Prefill block by block, inserting each; the caches."""
    caches = make_caches(model)
    for begin, end in segments(0, len(tokens), BLOCK):
        prefill(model, tokens[begin:end], caches)
        store.insert(tokens[:end], caches)
    assert store.flush()
    assert store.stats()["errors"] == {}
    return caches


def restored(store: PrefixStore, model: Any, tokens: Sequence[int], **options: Any) -> int:
    """How many of `tokens` came back; they are checked against a prefill of the same blocks."""
    match = store.match(tokens, **options)
    caches = store.restore(match)
    if caches is None:
        return 0
    live = make_caches(model)
    for begin, end in segments(0, match.length, BLOCK):
        prefill(model, tokens[begin:end], live)
    assert mx.array_equal(steps(model, caches), steps(model, live))
    return match.length


@pytest.mark.parametrize("family", FAMILIES)
def test_the_longest_shared_prefix(tiny: Tiny, stores: Stores, family: str) -> None:
    model = tiny(family)
    fill(stores(model), model, ids(150))
    other = stores(model)
    assert restored(other, model, ids(150)) == 150
    assert restored(other, model, ids(300)) == 128
    assert restored(other, model, ids(300), ends=(150,)) == 150
    assert restored(other, model, ids(149)) == 128
    assert restored(other, model, ids(128)) == 128
    assert restored(other, model, ids(100) + [1] * 100) == 96
    assert restored(other, model, ids(31)) == 0
    assert restored(other, model, ids(150, seed=1)) == 0
    assert restored(other, model, []) == 0
    assert other.stats()["errors"] == {}
    assert other.stats()["tokens_restored"] == 150 + 128 + 150 + 128 + 128 + 96


@pytest.mark.parametrize("family", FAMILIES)
def test_branches_share_what_they_share(
    tiny: Tiny, stores: Stores, server: int, family: str
) -> None:
    """Stored once, whoever computes it: the second branch adds only what is its own."""
    model = tiny(family)
    first, second = stores(model), stores(model)
    fill(first, model, ids(96))
    before = held(server)
    fill(second, model, ids(96))
    assert held(server) == before
    assert second.stats()["stores"] == 0
    fill(second, model, ids(64) + ids(64, seed=3))
    parts = first.stats()["stores"] // 3
    assert second.stats()["stores"] == 2 * parts
    assert restored(first, model, ids(64) + ids(100, seed=3)) == 128


def held(port: int) -> dict[str, int]:
    with Client(f"pion://127.0.0.1:{port}") as client:
        info = client.prefix_info()
    return {
        key: info[key] for key in ("registered_prefixes", "total_prefix_tokens", "vstore_bytes")
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_one_round_trip_to_match_and_one_to_restore(
    tiny: Tiny, stores: Stores, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    model = tiny(family)
    fill(stores(model), model, ids(150))
    trips: list[int] = []
    pipeline, execute = Client.pipeline, Client.execute

    def count(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(self: Client, *arguments: Any, **options: Any) -> Any:
            trips.append(1)
            return call(self, *arguments, **options)

        return counted

    monkeypatch.setattr(Client, "pipeline", count(pipeline))
    monkeypatch.setattr(Client, "execute", count(execute))
    other = stores(model)
    match = other.match(ids(300), ends=(150,))
    assert (match.length, len(trips)) == (150, 1)
    assert other.restore(match) is not None
    assert len(trips) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_every_block_can_be_the_last(tiny: Tiny, stores: Stores, family: str) -> None:
    """Also for windows, which a live cache of the longer prompt has forgotten."""
    model = tiny(family)
    fill(stores(model), model, ids(192))
    other = stores(model)
    for length in range(BLOCK, 192, BLOCK):
        assert restored(other, model, ids(length) + [1] * 40) == length


def test_a_cache_that_saw_its_prompt_at_once(tiny: Tiny, stores: Stores) -> None:
    """Rows are cut into blocks afterwards; what windows and states forgot is not made up."""
    for family, longest in (("llama", 128), ("gemma3_text", 128), ("qwen3_5", 0)):
        model = tiny(family)
        store = stores(model)
        store.insert(ids(150), prefill(model, ids(150)))
        assert store.flush()
        other = stores(model)
        assert other.match(ids(150)).length == 150
        assert other.match(ids(149)).length == longest
        caches = other.restore(other.match(ids(150)))
        assert caches is not None
        assert mx.array_equal(steps(model, caches), steps(model, prefill(model, ids(150))))


def test_without_a_tail_only_blocks_are_stored(tiny: Tiny, stores: Stores) -> None:
    for family in FAMILIES:
        model = tiny(family)
        store = stores(model)
        store.insert(ids(50), prefill(model, ids(50)), tail=False)
        assert store.flush()
        assert stores(model).match(ids(50)).length in (0, 32)
        assert store.match(ids(50)).length == stores(model).match(ids(40)).length


@pytest.mark.parametrize("family", FAMILIES)
def test_get_or_prefill(tiny: Tiny, stores: Stores, family: str) -> None:
    model = tiny(family)
    store = stores(model)
    live = store.get_or_prefill(ids(150))
    assert store.flush()
    other = stores(model)
    again = other.get_or_prefill(ids(150))
    assert other.stats()["tokens_restored"] == 150
    assert mx.array_equal(steps(model, again), steps(model, live))
    longer = other.get_or_prefill(ids(200))
    assert other.stats()["hits"] == 2
    assert mx.allclose(
        steps(model, longer), steps(model, prefill(model, ids(200))), rtol=1e-3, atol=1e-3
    )


def test_the_rows_may_be_narrower(tiny: Tiny, stores: Stores) -> None:
    model = tiny("llama")
    store = stores(model, vquant="fp16")
    live = fill(store, model, ids(96))
    other = stores(model, vquant="fp16")
    caches = other.restore(other.match(ids(96)))
    assert caches is not None
    assert mx.allclose(steps(model, caches), steps(model, live), rtol=2e-2, atol=2e-2)
    assert stores(model).match(ids(96)).length == 0  # another layout is another chain


def test_another_model_is_another_chain(tiny: Tiny, stores: Stores) -> None:
    model, other = tiny("llama"), tiny("llama", rope_theta=2e4)
    fill(stores(model), model, ids(96))
    assert stores(other).match(ids(96)).length == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_that_goes_makes_the_match_shorter(
    tiny: Tiny, stores: Stores, server: int, family: str
) -> None:
    model = tiny(family)
    fill(stores(model), model, ids(150))
    other = stores(model)
    chain = other.match(ids(150)).chain
    drop(server, *(namespace(chain, 96, part) for part in Part))
    assert restored(other, model, ids(96)) == 64
    # A state needs nothing before it; a window of 24 tokens reaches back one block.
    assert restored(other, model, ids(150)) == (150 if family == "mamba2" else 64)


def drop(port: int, *names: str) -> None:
    with Client(f"pion://127.0.0.1:{port}") as client:
        client.prefix_drop(*names)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", Part)
def test_a_block_that_goes_between_match_and_restore(
    tiny: Tiny, stores: Stores, server: int, family: str, part: Part
) -> None:
    model = tiny(family)
    fill(stores(model), model, ids(96))
    other = stores(model)
    match = other.match(ids(96))
    with Client(f"pion://127.0.0.1:{server}") as client:
        dropped = client.prefix_drop(namespace(match.chain, 96, part))
    assert (other.restore(match) is None) == bool(dropped)
    assert other.stats()["misses"] == dropped


def test_what_a_server_lost_is_stored_again(tiny: Tiny, stores: Stores, server: int) -> None:
    model = tiny("llama")
    store = stores(model)
    caches = fill(store, model, ids(96))
    chain = store.match(ids(96)).chain
    drop(server, *(namespace(chain, end, Part.ROWS) for end in chain.boundaries))
    assert store.match(ids(96)).length == 0  # which is when it learns of it
    store.insert(ids(96), caches)
    assert store.flush()
    assert restored(stores(model), model, ids(96)) == 96


def test_leaves_go_first(tiny: Tiny) -> None:
    """With room for so many blocks, the shared beginning outlives the branches."""
    model = tiny("llama", num_hidden_layers=1)
    with (
        pion_server("--max-memory", "300kb") as port,
        PrefixStore(model, f"pion://127.0.0.1:{port}", block_tokens=BLOCK, timeout=30) as store,
    ):
        for seed in range(1, 40):
            fill(store, model, ids(64) + ids(64, seed))
        newest = store.match(ids(64) + ids(64, 39)).length
        oldest = store.match(ids(64) + ids(64, 1)).length
    assert (newest, oldest) == (128, 64)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_used_stays(tiny: Tiny, stores: Stores, server: int, family: str) -> None:
    """States and windows in the middle of a chain are leaves, too: they stay as long as somebody
    goes on from there."""
    model = tiny(family)
    fill(stores(model), model, ids(128))
    with Client(f"pion://127.0.0.1:{server}") as client:
        budget = 3 * client.prefix_info()["memory_used"]
    with pion_server("--max-memory", str(budget)) as port:
        store = stores(model, port=port)
        for seed in range(1, 20):
            prompt = ids(64) + ids(64, seed)
            assert (store.restore(store.match(prompt)) is not None) == (seed > 1)
            fill(store, model, prompt)
        newest, oldest = (store.match(ids(64) + ids(64, seed)).length for seed in (19, 1))
    assert (newest, oldest) == (128, 64)


def test_the_receipt_has_one_entry_a_restore(tiny: Tiny, stores: Stores, server: int) -> None:
    model = tiny("qwen3_5")
    fill(stores(model), model, ids(150))
    other = stores(model)
    other.prefilled(100, 2.0)
    with Client(f"pion://127.0.0.1:{server}") as client:
        client.pion_stats_reset()
        assert restored(other, model, ids(150)) == 150
        receipt = client.pion_stats()
    assert (receipt["kvprefix_hits"], receipt["kvprefix_misses"]) == (1, 0)
    assert receipt["kvprefix_tokens_served"] == 150
    assert receipt["prefill_seconds_avoided"] == pytest.approx(3.0)


def test_what_the_caller_has_already_is_not_fetched(tiny: Tiny, stores: Stores) -> None:
    model = tiny("llama")
    fill(stores(model), model, ids(96))
    other = stores(model)
    match = other.match(ids(96))
    assert other.restore(match, beyond=96) is None
    assert other.restore(match, beyond=95) is not None


def test_a_restore_that_would_be_slower_is_skipped(tiny: Tiny, stores: Stores) -> None:
    model = tiny("llama")
    fill(stores(model), model, ids(96))
    other = stores(model)
    assert restored(other, model, ids(96)) == 96
    other.prefilled(1000, 1e-9)
    assert other.restore(other.match(ids(96))) is None
    assert other.stats()["restores_skipped"] == 1
    other.prefilled(1, 1e4)
    assert restored(other, model, ids(96)) == 96


def test_caches_of_another_length_or_kind_are_not_stored(tiny: Tiny, stores: Stores) -> None:
    model, other = tiny("llama"), tiny("gemma3_text")
    store = stores(model)
    store.insert(ids(96), prefill(model, ids(95)))
    store.insert(ids(96), prefill(other, ids(96)))
    store.insert(ids(96), [])
    assert (store.stats()["stores_dropped"], store.stats()["stores"]) == (3, 0)


def test_too_much_is_dropped_and_served_all_the_same(tiny: Tiny, stores: Stores) -> None:
    model = tiny("llama")
    store, gate = stores(model), threading.Event()

    def waits() -> None:
        gate.wait()

    assert store._background.submit(Job("other", MAX_PENDING_BYTES, waits))
    caches = store.get_or_prefill(ids(96))
    assert store.stats()["stores_dropped"] == 1
    gate.set()
    assert store.flush()
    store.insert(ids(96), caches)  # it was not remembered as stored
    assert store.flush()
    assert stores(model).match(ids(96)).length == 96


def test_storing_waits_for_nobody_and_is_waited_for_by_nobody(
    tiny: Tiny, stores: Stores, server: int
) -> None:
    """The caches go on meanwhile; what was stored is what they held."""
    model = tiny("llama")
    store, gate = stores(model), threading.Event()
    assert store._background.submit(Job("other", 0, gate.wait))
    caches = prefill(model, ids(96))
    wanted = steps(model, caches)
    store.insert(ids(96), caches)
    prefill(model, [1] * 200, caches)
    assert held(server)["registered_prefixes"] == 0
    gate.set()
    assert store.flush()
    other = stores(model)
    again = other.restore(other.match(ids(96)))
    assert again is not None
    assert mx.array_equal(steps(model, again), wanted)


def test_two_writers_at_once(tiny: Tiny, stores: Stores, server: int) -> None:
    model = tiny("qwen3_5")
    both = [stores(model), stores(model)]
    caches = make_caches(model)
    for begin, end in segments(0, 150, BLOCK):
        prefill(model, ids(150)[begin:end], caches)
        for store in both:
            store.insert(ids(150)[:end], caches)
    assert all(store.flush() for store in both)
    assert [store.stats()["errors"] for store in both] == [{}, {}]
    assert held(server)["registered_prefixes"] == 10
    assert restored(stores(model), model, ids(150)) == 150


@pytest.mark.parametrize("family", FAMILIES)
def test_no_server(
    tiny: Tiny, stores: Stores, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies and comes back empty: nothing is raised, nothing is wrong."""
    model = tiny(family)
    monkeypatch.setattr(remote, "RETRY_AFTER_S", 0.0)
    with pion_server() as port:
        store = stores(model, port=port)
        live = fill(store, model, ids(96))
        match = store.match(ids(96))
    assert store.restore(match) is None
    assert store.match(ids(96)).length == 0
    assert mx.allclose(steps(model, store.get_or_prefill(ids(96))), steps(model, live), atol=1e-4)
    with pion_server(port=port):
        assert store.match(ids(96)).length == 0
        store.insert(ids(96), live)
        assert store.flush()
        assert store.match(ids(96)).length == 96
