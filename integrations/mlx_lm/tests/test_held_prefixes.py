"""A prefix held in the process is shared without a copy; nobody sees the tokens of another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import (
    KVCache,
    load_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from pion_vllm_mlx import PionPromptCache, make_pion_prompt_cache
from pion_vllm_mlx.attention.suffix import SuffixCache
from pion_vllm_mlx.caches import leaves, make_caches
from pion_vllm_mlx.prefill import prefill
from stage2 import IDS, LANES, alone, distance, steps, stored

Tiny = Callable[..., nn.Module]
Stage2 = Callable[..., PionPromptCache]


def test_caches_of_one_prefix_do_not_see_each_other(
    tiny: Tiny, stage2: Stage2, namespace: str
) -> None:
    model = tiny("gemma3_text")
    pion = stage2(model, "inproc")
    first = pion.get_or_prefill(IDS, namespace=namespace)
    wanted, other = alone(model), alone(model, [1], [2, 3], [4])
    second = pion.get_or_prefill(IDS, namespace=namespace)
    third = make_pion_prompt_cache(model, namespace, pion, len(IDS))
    found = [steps(model, first, [5, 6, 7]), steps(model, second, [1])]
    twin = copy.deepcopy(first)
    found += [steps(model, first, [8]), steps(model, second, [2, 3])]
    assert mx.array_equal(steps(model, third), wanted)
    assert mx.array_equal(mx.concatenate([found[0], steps(model, twin, [8], [9])]), wanted)
    found += [steps(model, first, [9]), steps(model, second, [4])]
    assert mx.array_equal(mx.concatenate(found[::2]), wanted)
    assert mx.array_equal(mx.concatenate(found[1::2]), other)
    assert (pion.stats()["hits"], pion.stats()["misses"]) == (2, 1)


def address(array: mx.array) -> int:
    mx.eval(array)
    return int(np.asarray(array).__array_interface__["data"][0])


def test_a_prefix_is_not_copied(tiny: Tiny, stage2: Stage2, namespace: str) -> None:
    """One answer after the other is written behind it, however long the one before was."""
    model = tiny("llama")
    pion = stage2(model, "inproc")
    caches = pion.get_or_prefill(IDS, namespace=namespace)
    steps(model, caches)
    places = [address(cache.keys) for cache in caches]
    for _ in range(3):
        caches = make_pion_prompt_cache(model, namespace, pion, len(IDS))
        assert mx.array_equal(steps(model, caches), alone(model))
        assert [address(cache.keys) for cache in caches] == places


@pytest.mark.parametrize("back", [2, 40, 133])
@pytest.mark.parametrize("lane", LANES)
def test_caches_can_be_trimmed(
    tiny: Tiny, stage2: Stage2, namespace: str, lane: str, back: int
) -> None:
    """Into the prefix as well, which others go on with."""
    model = tiny("llama")
    pion = stage2(model, lane)
    stored(pion, namespace)
    caches = make_pion_prompt_cache(model, namespace, pion, len(IDS))
    steps(model, caches, [5, 6, 7])
    assert trim_prompt_cache(caches, back) == back
    left = [*IDS, 5, 6, 7][:-back]
    assert caches[0].offset == caches[0].size() == len(left)
    wanted = steps(model, prefill(model, left) if left else make_caches(model), [8, 9], [1])
    assert distance(steps(model, caches, [8, 9], [1]), wanted) < 1e-5
    again = make_pion_prompt_cache(model, namespace, pion, len(IDS))
    assert distance(steps(model, again), alone(model)) < 1e-5


def test_caches_in_the_process_can_be_batched(tiny: Tiny, stage2: Stage2, namespace: str) -> None:
    """As mlx-lm's servers do it."""
    model = tiny("llama")
    pion = stage2(model, "inproc")
    pair = [pion.get_or_prefill(IDS, namespace=namespace) for _ in range(2)]
    merged = [caches[0].merge(caches) for caches in zip(*pair, strict=True)]
    logits = model(mx.array([[5], [6]]), cache=merged)
    for row, token in zip(logits, (5, 6), strict=True):
        assert distance(row, alone(model, [token])) < 1e-5


@pytest.mark.parametrize("lane", ["inproc", "resp"])
def test_a_draft_model_may_guess(tiny: Tiny, stage2: Stage2, namespace: str, lane: str) -> None:
    """What it guessed wrong is trimmed, so that the answer is the one without it."""
    model, draft = tiny("llama"), tiny("qwen3")
    pion = stage2(model, lane)
    stored(pion, namespace)
    prompt, caches = mx.array([5, 6, 7]), prefill(model, IDS)
    wanted = [token for token, _ in generate_step(prompt, model, prompt_cache=caches, max_tokens=9)]
    caches = make_pion_prompt_cache(model, namespace, pion, IDS) + prefill(draft, IDS)
    guessed = speculative_generate_step(
        prompt, model, draft, num_draft_tokens=3, prompt_cache=caches, max_tokens=9
    )
    assert [int(token) for token, *_ in guessed] == wanted


def test_a_cache_in_the_process_can_be_saved(
    tiny: Tiny, stage2: Stage2, namespace: str, tmp_path: Path
) -> None:
    model = tiny("llama")
    caches = stage2(model, "inproc").get_or_prefill(IDS, namespace=namespace)
    path = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(path, caches)
    loaded = load_prompt_cache(path)
    assert [type(cache) for cache in loaded] == [KVCache] * 4
    assert mx.array_equal(steps(model, loaded), steps(model, caches))


def test_a_budget_holds_prefixes_in_the_process(tiny: Tiny, stage2: Stage2) -> None:
    """The least recently used one goes, and is then continued at the server."""
    model = tiny("llama")
    size = sum(cache.nbytes for cache in leaves(prefill(model, IDS)))
    pion = stage2(model, "inproc", inproc_bytes=2 * size)
    for name in ("budget-1", "budget-2", "budget-1", "budget-3"):
        stored(pion, name)
    for name, far in (("budget-1", False), ("budget-2", True), ("budget-3", False)):
        caches = make_pion_prompt_cache(model, name, pion, len(IDS))
        assert isinstance(caches[0], SuffixCache) == far
        assert distance(steps(model, caches), alone(model)) < 1e-5


def test_a_namespace_that_is_used_anew_is_not_mixed_up(
    tiny: Tiny, stage2: Stage2, namespace: str
) -> None:
    model = tiny("llama")
    pion = stage2(model, "inproc")
    stored(pion, namespace)
    for ids in (IDS[::-1], IDS[:50], IDS):
        caches = pion.get_or_prefill(ids, namespace=namespace)
        assert mx.array_equal(steps(model, caches), alone(model, ids=ids))
