"""Sparse attention sees the same blocks here and at the server; with all of them it is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm import generate
from pion_vllm_mlx import (
    PionPromptCache,
    Sparse,
    UnsupportedAttentionError,
    make_pion_prompt_cache,
)
from pion_vllm_mlx.attention.sparse import SparseCache
from pion_vllm_mlx.attention.wire import SparseWireCache
from pion_vllm_mlx.processes import pion_server
from stage2 import IDS, LANES, URLS, alone, distance, steps, stored

Tiny = Callable[..., nn.Module]
Stage2 = Callable[..., PionPromptCache]

# 130 tokens are 8 blocks of 16, and one of 2.
MOST = Sparse(16, 9)
FILLER = (
    "The old harbour was quiet in the morning, and the fishermen mended their nets.",
    "A train passed every hour, and nobody looked up from the newspaper.",
    "In autumn the leaves of the chestnut trees covered the whole square.",
    "The baker opened at six and sold the last loaf before noon.",
)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "qwen3_5", "gpt2"])
def test_all_blocks_are_the_whole_prefix(
    tiny: Tiny, stage2: Stage2, namespace: str, family: str, lane: str
) -> None:
    model = tiny(family)
    pion = stage2(model, lane)
    stored(pion, namespace)
    caches = make_pion_prompt_cache(model, namespace, pion, len(IDS), sparse=MOST)
    kind = SparseCache if lane == "inproc" else SparseWireCache
    assert any(type(cache) is kind for cache in caches)
    assert distance(steps(model, caches), alone(model)) < 1e-5
    assert pion.stats()["errors"] == {}


@pytest.mark.parametrize("lane", URLS)
@pytest.mark.parametrize("sparse", [Sparse(16, 2), Sparse(7, 3), Sparse(1, 20), Sparse(200, 1)])
def test_here_and_there_the_same_blocks_are_seen(
    tiny: Tiny, stage2: Stage2, namespace: str, lane: str, sparse: Sparse
) -> None:
    """Several tokens at a time, each of which picks for itself, and one."""
    model = tiny("llama")
    found = []
    pion = stage2(model, "inproc")
    stored(pion, namespace)
    for where in ("inproc", lane):
        pion = stage2(model, where)
        pion.get_or_prefill(IDS, namespace=namespace)
        caches = make_pion_prompt_cache(model, namespace, pion, len(IDS), sparse=sparse)
        found.append(steps(model, caches, [5, 6, 7], [8], [9, 1], [2]))
    assert distance(found[1], found[0]) < 1e-5
    exact = sparse.block * sparse.blocks >= len(IDS)
    wanted = alone(model, [5, 6, 7], [8], [9, 1], [2])
    assert (distance(found[1], wanted) < 1e-5) == exact


def test_a_needle_is_found(smollm2: Any, stage2: Stage2, namespace: str) -> None:
    """Where a query sees 64 of 217 tokens, in the process and at the server."""
    model, tokenizer = smollm2.model, smollm2.tokenizer
    before, after = " ".join(FILLER[i % 4] for i in range(6)), " ".join(FILLER[2:] + FILLER) + " "
    text = f"{before} The magic number is 7481. {after}{FILLER[0]} {FILLER[1]}"
    prefix = tokenizer.encode(f"<|im_start|>system\n{text}<|im_end|>\n")
    question = "<|im_start|>user\nWhat is the magic number?<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(question, add_special_tokens=False)
    for lane in ("binary", "inproc"):
        pion = stage2(model, lane)
        stored(pion, namespace, prefix)
        cache = make_pion_prompt_cache(model, namespace, pion, len(prefix), sparse=Sparse(16, 4))
        answer = generate(model, tokenizer, prompt=prompt, prompt_cache=cache, max_tokens=10)
        assert answer == "The magic number is 7481."


def test_a_server_that_dies_leaves_exact_answers(tiny: Tiny, stage2: Stage2) -> None:
    model = tiny("llama")
    with pion_server() as port:
        pion = stage2(model, port=port, timeout=5.0)
        stored(pion, "gone")
        caches = make_pion_prompt_cache(model, "gone", pion, len(IDS), sparse=Sparse(16, 2))
    assert distance(steps(model, caches), alone(model)) < 1e-5


def test_sinks_are_for_the_process_only(tiny: Tiny, stage2: Stage2, namespace: str) -> None:
    model = tiny("gpt_oss")
    pion = stage2(model, "inproc")
    stored(pion, namespace)
    caches = make_pion_prompt_cache(model, namespace, pion, len(IDS), sparse=MOST)
    assert distance(steps(model, caches), alone(model)) < 1e-5
    stage2(model, "resp")
    with pytest.raises(UnsupportedAttentionError, match="no sinks"):
        make_pion_prompt_cache(model, namespace, pion, len(IDS), sparse=MOST)


@pytest.mark.parametrize(("block", "blocks"), [(0, 1), (1, 0), (-5, 3)])
def test_nothing_is_no_block(block: int, blocks: int) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        Sparse(block, blocks)


def test_half_precision(tiny: Tiny, stage2: Stage2, namespace: str) -> None:
    model = tiny("llama", mx.bfloat16)
    for lane in LANES:
        pion = stage2(model, lane)
        pion.get_or_prefill(IDS, namespace=namespace)
        assert pion.flush()
        caches = make_pion_prompt_cache(model, namespace, pion, len(IDS), sparse=MOST)
        found = steps(model, caches)
        assert found.dtype == mx.bfloat16
        assert distance(found, alone(model)) < 0.03
