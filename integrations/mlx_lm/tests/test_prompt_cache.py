"""PionPromptCache keeps its promises to the caller: the seed's use of it, and its own contract."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm import generate
from mlx_lm.generate import generate_step
from pion_vllm_mlx import PionPromptCache, UnsupportedCacheError
from pion_vllm_mlx.background import MAX_PENDING_BYTES, Job

from pion_server.client import Client

Connect = Callable[..., PionPromptCache]
Tiny = Callable[..., nn.Module]

IDS = list(range(40))


def test_quick_start(smollm2: Any, port: int) -> None:
    model, tok = smollm2.model, smollm2.tokenizer
    system = "You are a support agent for Acme. Answer in one sentence."
    ns = PionPromptCache.make_namespace("smollm2-135m", "fp16", system)
    answers = []
    for _ in range(2):
        pc = PionPromptCache(model, port=port, vquant="fp16")
        cache = pc.get_or_prefill(tok.encode(system), namespace=ns)
        prompt = tok.encode(" The capital of France is", add_special_tokens=False)
        answers.append(generate(model, tok, prompt=prompt, prompt_cache=cache, max_tokens=40))
        pc.flush()
    assert answers[0]
    assert answers[0] == answers[1]
    stats = pc.stats()
    assert (stats["hits"], stats["misses"], stats["hit_rate"]) == (1, 0, 1.0)
    assert stats["fetch_ms_total"] > 0
    assert stats["store_ms_total"] == 0


def test_namespace_is_the_documented_hash() -> None:
    wanted = hashlib.sha256(b"a|b|\xc3\xbc").hexdigest()[:32]
    assert PionPromptCache.make_namespace("a", "b", "ü") == wanted


def test_the_caller_owns_the_caches(tiny: Tiny, connect: Connect, namespace: str) -> None:
    """Generating on one restored cache must not show in the next one, nor in the store."""
    model = tiny("llama")
    pion = connect(model, vquant="native")
    logits = []
    for _ in range(3):
        caches = pion.get_or_prefill(IDS, namespace=namespace)
        assert [cache.offset for cache in caches] == [len(IDS)] * 4
        logits.append(model(mx.array([[1, 2, 3]]), cache=caches))
        mx.eval(logits)
    assert (pion.stats()["misses"], pion.stats()["hits"]) == (1, 2)
    assert mx.array_equal(logits[0], logits[1])
    assert mx.array_equal(logits[0], logits[2])


def test_a_store_that_is_pending_is_waited_for(
    tiny: Tiny, connect: Connect, namespace: str
) -> None:
    """Two requests on end for the same prefix: the second is a hit without a flush between."""
    pion = connect(tiny("llama"))
    for _ in range(2):
        pion.get_or_prefill(IDS, namespace=namespace)
    assert (pion.stats()["misses"], pion.stats()["hits"]) == (1, 1)


def test_the_stored_rows_are_declared_and_credited(
    tiny: Tiny, connect: Connect, port: int, namespace: str
) -> None:
    with Client(f"pion://127.0.0.1:{port}") as client:
        client.pion_stats_reset()
        pion = connect(tiny("deepseek_v2"), vquant="fp16")
        pion.get_or_prefill(IDS, namespace=namespace)
        assert pion.flush()
        pion.get_or_prefill(IDS, namespace=namespace)
        receipt, rows = client.pion_stats(), client.prefix_fetch(namespace)
    assert (receipt["kvprefix_hits"], receipt["kvprefix_misses"]) == (1, 1)
    assert receipt["kvprefix_tokens_served"] == len(IDS)
    assert receipt["kvprefix_hits_measured"] == 1
    assert rows is not None
    assert rows.tokens == len(IDS)
    assert [tuple(layout) for layout in rows.keys] == [("fp16", 96)] * 4
    assert [tuple(layout) for layout in rows.values] == [("fp16", 48)] * 4
    assert pion.stats()["bytes_stored"] == pion.stats()["bytes_fetched"] == 40 * 4 * 144 * 2


def test_lookup(tiny: Tiny, connect: Connect, port: int, namespace: str) -> None:
    pion = connect(tiny("llama"))
    assert pion.lookup(namespace) is False
    pion.get_or_prefill(IDS, namespace=namespace)
    assert pion.flush()
    with Client(f"pion://127.0.0.1:{port}") as client:
        client.pion_stats_reset()
        assert pion.lookup(namespace) is True
        assert client.pion_stats()["kvprefix_hits"] == 0  # nothing was restored


@pytest.mark.parametrize(
    "ids", [np.array(IDS), np.array(IDS, np.uint16), mx.array(IDS), tuple(IDS)]
)
def test_ids_of_any_kind(tiny: Tiny, connect: Connect, namespace: str, ids: Any) -> None:
    pion = connect(tiny("llama"))
    pion.get_or_prefill(IDS, namespace=namespace)
    pion.get_or_prefill(ids, namespace=namespace)
    assert pion.stats()["hits"] == 1


@pytest.mark.parametrize("ids", [[], [[1, 2]], np.zeros((1, 3), int), [0.5], ["a"], 3])
def test_wrong_ids_are_the_callers_mistake(
    tiny: Tiny, connect: Connect, namespace: str, ids: Any
) -> None:
    pion = connect(tiny("llama"))
    with pytest.raises(ValueError, match="prefix_ids must be a flat, non-empty list"):
        pion.get_or_prefill(ids, namespace=namespace)
    assert pion.stats()["misses"] == 0


def test_an_empty_namespace_is_the_callers_mistake(tiny: Tiny, connect: Connect) -> None:
    with pytest.raises(ValueError, match="namespace must not be empty"):
        connect(tiny("llama")).get_or_prefill(IDS, namespace="")


def test_an_unknown_codec_is_refused(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="vquant must be one of native, fp16"):
        PionPromptCache(tiny("llama"), vquant="int3")


class OddCache:
    """A class of cache that mlx-lm does not have."""


def test_an_unknown_cache_is_refused_by_name(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    monkeypatch.setattr(type(model), "make_cache", lambda _: [OddCache()], raising=False)
    with pytest.raises(
        UnsupportedCacheError, match=r"does not know .+\.OddCache; it knows KVCache"
    ):
        PionPromptCache(model)


def test_an_exit_finishes_the_store(smollm2: Any, port: int, namespace: str) -> None:
    """A process that ends right after its answer, without close(), has stored its prefix."""
    program = (
        "import sys; from pion_vllm_mlx import PionPromptCache; from mlx_lm import load; "
        "pion = PionPromptCache(load(sys.argv[1])[0], port=int(sys.argv[2])); "
        "pion.get_or_prefill(list(range(99)), namespace=sys.argv[3])"
    )
    command = [sys.executable, "-c", program, smollm2.folder, str(port), namespace]
    subprocess.run(command, check=True)
    with Client(f"pion://127.0.0.1:{port}") as client:
        assert client.prefix_lookup(namespace)


def test_an_object_that_is_dropped_finishes_its_store(
    tiny: Tiny, port: int, namespace: str
) -> None:
    pion = PionPromptCache(tiny("llama"), port=port)
    pion.get_or_prefill(IDS, namespace=namespace)
    del pion
    with Client(f"pion://127.0.0.1:{port}") as client:
        assert client.prefix_lookup(namespace)


def test_after_close_it_prefills(tiny: Tiny, connect: Connect, namespace: str) -> None:
    pion = connect(tiny("llama"))
    pion.close()
    pion.close()
    for _ in range(2):
        assert pion.get_or_prefill(IDS, namespace=namespace)[0].offset == len(IDS)
    assert (pion.stats()["hits"], pion.stats()["misses"]) == (0, 2)


def test_too_many_stores_are_dropped_and_counted(
    tiny: Tiny, connect: Connect, namespace: str
) -> None:
    pion = connect(tiny("llama"))
    gate = threading.Event()
    assert pion._background.submit(Job("other", MAX_PENDING_BYTES, lambda: waits(gate)))
    pion.get_or_prefill(IDS, namespace=namespace)
    assert pion.stats()["stores_dropped"] == 1
    gate.set()
    assert pion.flush()
    assert pion.lookup(namespace) is False


def test_close_does_not_wait_for_ever(tiny: Tiny, connect: Connect) -> None:
    pion = connect(tiny("llama"), timeout=0.2)
    gate = threading.Event()
    assert pion._background.submit(Job("hangs", 0, lambda: waits(gate)))
    assert not pion.flush()
    pion.close()
    gate.set()


def waits(gate: threading.Event) -> None:
    gate.wait()


@pytest.mark.parametrize("warm", [False, True])
def test_the_caches_may_go_to_another_thread(
    tiny: Tiny, connect: Connect, namespace: str, warm: bool
) -> None:
    """mlx refuses lazy arrays of another thread, so none may be left in what is returned."""
    model = tiny("llama")
    pion = connect(model)
    if warm:
        pion.get_or_prefill(IDS, namespace=namespace)
    caches = pion.get_or_prefill(IDS, namespace=namespace)
    assert pion.stats()["hits"] == warm
    with ThreadPoolExecutor(1) as thread:
        tokens = thread.submit(
            lambda: list(generate_step(mx.array([1]), model, max_tokens=3, prompt_cache=caches))
        ).result()
    assert len(tokens) == 3
