"""Attention to a prefix, wherever it is computed, answers as mlx-lm alone, or refuses by name."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from families import FAMILIES, ships
from mlx_lm import generate, stream_generate
from mlx_lm.models import base
from pion_vllm_mlx import (
    PionPromptCache,
    PrefixUnavailableError,
    Sparse,
    UnsupportedAttentionError,
    install_pion_attention_patch,
    make_pion_prompt_cache,
    uninstall_pion_attention_patch,
)
from pion_vllm_mlx.attention.stage2 import NO_INPROC
from pion_vllm_mlx.attention.suffix import SuffixCache
from pion_vllm_mlx.caches import make_caches
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.processes import pion_server
from stage2 import IDS, LANES, URLS, alone, distance, steps, stored

from pion_server.client import Client

Tiny = Callable[..., nn.Module]
Stage2 = Callable[..., PionPromptCache]

NAME = "scaled_dot_product_attention"
# Every block there is: the sparse way, computed exactly.
ALL = Sparse(16, 1 << 20)
# One family for each way of not being reached, and what is said about it.
REFUSED = {
    "gemma2": "keys of a layer elsewhere",
    "plamo2": "keys of a layer elsewhere",
    "gemma4_text": "keys of a layer elsewhere",
    "iquestloopcoder": "keys of a layer elsewhere",
    "afm7": "reads the rows",
    "deepseek_v32": "reads the rows",
    "deepseek_v3": "other keys",
    "stablelm": "other keys",
}


pytestmark = pytest.mark.usefixtures("patched")


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss", "gemma3_text", "qwen3_5"])
def test_the_logits_are_those_of_mlx_lm(
    tiny: Tiny, stage2: Stage2, namespace: str, family: str, lane: str
) -> None:
    """With sinks, windows that are full, recurrent layers; one token at a time and several."""
    model = tiny(family)
    pion = stage2(model, lane)
    stored(pion, namespace)
    wanted = alone(model)
    for _ in range(2):
        caches = make_pion_prompt_cache(model, namespace, pion, len(IDS))
        assert {cache.offset for cache in caches if hasattr(cache, "offset")} == {len(IDS)}
        assert distance(steps(model, caches), wanted) <= (0 if lane == "inproc" else 1e-5)
    assert pion.stats()["errors"] == {}
    far = sum(isinstance(cache, SuffixCache) for cache in caches)
    assert pion.stats()["attend_calls"] == far * 3 * 2
    assert bool(far) == (lane != "inproc")


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_models_in_half_precision(
    tiny: Tiny, stage2: Stage2, namespace: str, dtype: mx.Dtype
) -> None:
    model = tiny("llama", dtype)
    pion = stage2(model)
    stored(pion, namespace)
    found = steps(model, make_pion_prompt_cache(model, namespace, pion, len(IDS)))
    assert found.dtype == dtype
    assert distance(found, alone(model)) < 0.03


@pytest.mark.parametrize("lane", URLS)
def test_another_process_needs_the_namespace_only(
    tiny: Tiny, stage2: Stage2, namespace: str, lane: str
) -> None:
    """It neither prefills nor fetches rows."""
    model = tiny("llama")
    stored(stage2(model), namespace)
    other = stage2(model, lane)
    assert other.lookup(namespace)
    caches = make_pion_prompt_cache(model, namespace, other, len(IDS))
    assert distance(steps(model, caches), alone(model)) < 1e-5
    stats = other.stats()
    assert (stats["hits"], stats["misses"], stats["bytes_fetched"]) == (1, 0, 0)


def test_state_is_found_on_whichever_worker_it_lives(tiny: Tiny, stage2: Stage2) -> None:
    model = tiny("llama")
    wanted = alone(model)
    with pion_server("-w", "2") as port:
        for lane in URLS:
            for number in range(3):
                stored(stage2(model, lane, port), f"{lane}-{number}")
                other = stage2(model, lane, port)
                caches = make_pion_prompt_cache(model, f"{lane}-{number}", other, IDS)
                assert distance(steps(model, caches), wanted) < 1e-5
                assert other.stats()["errors"] == {}


def test_no_inproc_shows_what_other_processes_see(
    tiny: Tiny, stage2: Stage2, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    pion = stage2(model, "inproc")
    stored(pion, namespace)
    for value, far in (("0", False), ("1", True), ("0", False)):
        monkeypatch.setenv(NO_INPROC, value)
        caches = make_pion_prompt_cache(model, namespace, pion, len(IDS))
        assert [isinstance(cache, SuffixCache) for cache in caches] == [far] * 4


def test_generate_and_stream_generate(smollm2: Any, stage2: Stage2, namespace: str) -> None:
    model, tokenizer = smollm2.model, smollm2.tokenizer
    prefix = tokenizer.encode("You are a helpful assistant of a museum of clocks. ")
    prompt = tokenizer.encode("The capital of France is", add_special_tokens=False)
    pion = stage2(model, "inproc")
    stored(pion, namespace, prefix)
    wanted = generate(model, tokenizer, prompt=prefix + prompt, max_tokens=8)
    cache = make_pion_prompt_cache(model, namespace, pion, len(prefix))
    assert generate(model, tokenizer, prompt=prompt, prompt_cache=cache, max_tokens=8) == wanted
    stage2(model, "resp")
    cache = make_pion_prompt_cache(model, namespace, pion, len(prefix))
    assert isinstance(cache[0], SuffixCache)
    parts = stream_generate(model, tokenizer, prompt, prompt_cache=cache, max_tokens=8)
    assert "".join(part.text for part in parts) == wanted


# The patch itself.


def bindings() -> dict[str, Any]:
    modules = [name for name in sys.modules if name.startswith("mlx_lm.models.")]
    return {name: getattr(sys.modules[name], NAME, None) for name in modules}


def test_the_patch_is_taken_away_exactly() -> None:
    for family in ("llama", "gpt_oss", "gemma2"):
        importlib.import_module(f"mlx_lm.models.{family}")
    uninstall_pion_attention_patch()
    before, original = bindings(), getattr(base, NAME)
    for _ in range(2):
        install_pion_attention_patch()
        patched = bindings()
        assert patched["mlx_lm.models.llama"] is not original
        assert {name for name in before if patched[name] is not before[name]} == {
            name for name in before if before[name] is original
        }
    uninstall_pion_attention_patch()
    uninstall_pion_attention_patch()
    assert bindings() == before


def test_a_module_that_is_loaded_later_is_patched() -> None:
    sys.modules.pop("mlx_lm.models.helium", None)
    module = importlib.import_module("mlx_lm.models.helium")
    assert getattr(module, NAME) is getattr(base, NAME)
    uninstall_pion_attention_patch()
    assert getattr(module, NAME) is getattr(base, NAME)


@pytest.mark.parametrize("bits", [None, 8])
def test_other_caches_pass_through(tiny: Tiny, bits: int | None) -> None:
    model = tiny("llama", hidden_size=128, head_dim=32)

    def answer() -> mx.array:
        caches = make_caches(model, bits, 32)
        return steps(model, prefill(model, IDS, caches))

    patched = answer()
    uninstall_pion_attention_patch()
    assert mx.array_equal(patched, answer())


def test_other_threads_pass_through(tiny: Tiny, stage2: Stage2, namespace: str) -> None:
    model = tiny("llama")
    pion = stage2(model)
    stored(pion, namespace)
    wanted, far = np.asarray(alone(tiny("qwen3"))), alone(model)
    found: list[bool] = []

    def run() -> None:
        other = tiny("qwen3")  # here, since what is not evaluated yet belongs to its thread
        found.extend(np.array_equal(alone(other), wanted) for _ in range(5))

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(5):
        caches = make_pion_prompt_cache(model, namespace, pion, len(IDS))
        assert distance(steps(model, caches), far) < 1e-5
    thread.join()
    assert found == [True] * 5


# Models that it does not reach.


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_are_not_reached_are_refused_by_name(
    tiny: Tiny, stage2: Stage2, namespace: str, family: str
) -> None:
    """At the server and sparsely. In the process they are continued like any other."""
    model = tiny(family)
    pion = stage2(model, "inproc")
    stored(pion, namespace)
    with pytest.raises(UnsupportedAttentionError, match=f"{family} .*{REFUSED[family]}"):
        make_pion_prompt_cache(model, namespace, pion, len(IDS), sparse=ALL)
    caches = make_pion_prompt_cache(model, namespace, pion, len(IDS))
    assert mx.array_equal(steps(model, caches), alone(model))
    stage2(model, "resp")
    with pytest.raises(UnsupportedAttentionError):
        make_pion_prompt_cache(model, namespace, pion, len(IDS))


def assert_served_or_refused(tiny: Tiny, stage2: Stage2, families: Sequence[str]) -> list[str]:
    """Those that are refused."""
    refused = []
    for family in families:
        model = tiny(family)
        pion = stage2(model, "inproc")
        pion.get_or_prefill(IDS, namespace=f"family-{family}")
        wanted = alone(model)
        caches = make_pion_prompt_cache(model, f"family-{family}", pion, len(IDS))
        assert mx.array_equal(steps(model, caches), wanted), family
        try:
            caches = make_pion_prompt_cache(model, f"family-{family}", pion, len(IDS), sparse=ALL)
        except UnsupportedAttentionError:
            refused.append(family)
            continue
        found = steps(model, caches)
        assert mx.allclose(found, wanted, rtol=0, atol=1e-5 * float(mx.abs(wanted).max())), family
    return refused


def test_some_families_are_served(tiny: Tiny, stage2: Stage2) -> None:
    """One for each combination of caches, and the odd ones."""
    families = ["falcon_h1", "gpt2", "llama4", "mamba2", "mimo_v2_flash", "nemotron-nas"]
    assert assert_served_or_refused(tiny, stage2, families) == []


@pytest.mark.long
def test_every_family_is_served_or_refused(tiny: Tiny, stage2: Stage2) -> None:
    families = [family for family in FAMILIES if ships(family)]
    page = (Path(__file__).parents[3] / "docs" / "MLX_PATCH.md").read_text(encoding="utf-8")
    refused = assert_served_or_refused(tiny, stage2, families)
    assert ", ".join(f"`{family}`" for family in refused) in " ".join(page.split())


# What goes wrong.


def test_what_is_asked_wrongly_is_said(tiny: Tiny, stage2: Stage2, connect: Stage2) -> None:
    model = tiny("llama")
    pion = stage2(model)
    for lane in ("inproc", "resp"):
        stored(stage2(model, lane), f"wrong-{lane}")
    with pytest.raises(ValueError, match="another model"):
        make_pion_prompt_cache(tiny("llama"), "wrong-resp", pion, len(IDS))
    with pytest.raises(ValueError, match="stage2=True"):
        make_pion_prompt_cache(model, "wrong-resp", connect(model), len(IDS))
    with pytest.raises(ValueError, match="kv_bits"):
        connect(model, stage2=True, kv_bits=8)
    with pytest.raises(PrefixUnavailableError, match="130 tokens, not 5"):
        make_pion_prompt_cache(model, "wrong-resp", pion, 5)
    with pytest.raises(PrefixUnavailableError, match=r"no complete prefix .* get_or_prefill"):
        make_pion_prompt_cache(model, "never-stored", pion, 5)
    here = stage2(model, "inproc")
    here.get_or_prefill(IDS, namespace="wrong-inproc")
    with pytest.raises(PrefixUnavailableError, match="130 tokens, not 5"):
        make_pion_prompt_cache(model, "wrong-inproc", here, 5)
    uninstall_pion_attention_patch()
    make_pion_prompt_cache(model, "wrong-inproc", here, len(IDS))
    with pytest.raises(RuntimeError, match="install_pion_attention_patch"):
        make_pion_prompt_cache(model, "wrong-inproc", here, len(IDS), sparse=ALL)
    stage2(model, "resp")
    with pytest.raises(RuntimeError, match="install_pion_attention_patch"):
        make_pion_prompt_cache(model, "wrong-resp", pion, len(IDS))


def test_a_patch_taken_away_too_soon_is_noticed(tiny: Tiny, stage2: Stage2, namespace: str) -> None:
    model = tiny("llama")
    pion = stage2(model)
    stored(pion, namespace)
    caches = make_pion_prompt_cache(model, namespace, pion, len(IDS))
    uninstall_pion_attention_patch()
    model(mx.array([[5]]), cache=caches)
    with pytest.raises(UnsupportedAttentionError, match="patch was taken away"):
        model(mx.array([[5]]), cache=caches)


def test_several_sequences_at_a_time_are_refused(
    tiny: Tiny, stage2: Stage2, namespace: str
) -> None:
    model = tiny("llama")
    pion = stage2(model)
    stored(pion, namespace)
    caches = make_pion_prompt_cache(model, namespace, pion, len(IDS))
    with pytest.raises(UnsupportedAttentionError, match="several sequences"):
        model(mx.array([[5], [6]]), cache=caches)


@pytest.mark.parametrize("lane", URLS)
def test_what_gets_cold_in_mid_conversation_heals(tiny: Tiny, stage2: Stage2, lane: str) -> None:
    model = tiny("llama")
    with pion_server("--attend-slots", "4") as port:  # the layers of one prefix
        pion = stage2(model, lane, port)
        others = [*IDS, 1]
        stored(pion, "first")
        stored(pion, "second", others)
        assert not pion.lookup("first")  # its rows are there, its attention state is not
        first = make_pion_prompt_cache(model, "first", pion, len(IDS))
        found = [steps(model, first, [5, 6, 7])]
        second = make_pion_prompt_cache(model, "second", pion, len(others))
        aside = steps(model, second, [5, 6, 7], [8], [9])
        assert pion.cold_rehydrates_observed == 0
        found.append(steps(model, first, [8], [9]))
        assert pion.cold_rehydrates_observed == 1
    assert distance(mx.concatenate(found), alone(model)) < 1e-5
    assert distance(aside, alone(model, ids=others)) < 1e-5
    assert pion.stats()["errors"] == {}


def test_a_server_that_dies_in_mid_answer_costs_a_prefill(tiny: Tiny, stage2: Stage2) -> None:
    model = tiny("gpt_oss")
    with pion_server() as port:
        pion = stage2(model, port=port, timeout=5.0)
        stored(pion, "gone")
        caches = make_pion_prompt_cache(model, "gone", pion, len(IDS))
        found = [steps(model, caches, [5, 6, 7])]
        calls = pion.stats()["attend_calls"]
    found.append(steps(model, caches, [8], [9, 1], [2]))
    assert distance(mx.concatenate(found), alone(model, [5, 6, 7], [8], [9, 1], [2])) < 1e-5
    assert pion.stats()["attend_calls"] == calls
    assert pion.stats()["errors"]["ConnectionFailed"] >= 1


def test_a_server_that_hangs_in_mid_answer_costs_a_prefill(tiny: Tiny, stage2: Stage2) -> None:
    model = tiny("llama")
    with pion_server() as port:
        stored(stage2(model, port=port), "hangs")
        pion = stage2(model, port=port, timeout=2.0)
        caches = make_pion_prompt_cache(model, "hangs", pion, IDS)
        with Client(f"pion://127.0.0.1:{port}") as client:
            (worker,) = client.pion_workers()
        found = [steps(model, caches, [5, 6, 7])]
        os.kill(worker.pid, signal.SIGSTOP)
        found.append(steps(model, caches, [8], [9]))
        os.kill(worker.pid, signal.SIGCONT)
    assert distance(mx.concatenate(found), alone(model)) < 1e-5
    assert pion.stats()["errors"]["DeadlineExceeded"] == 2  # no attention, no rows


def test_tokens_are_checked_and_prefilled_if_all_else_fails(tiny: Tiny, stage2: Stage2) -> None:
    """Also in a process that has only heard of them."""
    model = tiny("llama")
    with pion_server() as port:
        stored(stage2(model, port=port), "known")
        pion = stage2(model, port=port, timeout=5.0)
        with pytest.raises(PrefixUnavailableError, match="another model"):
            make_pion_prompt_cache(model, "known", pion, IDS[::-1])
        caches = make_pion_prompt_cache(model, "known", pion, IDS)
    assert distance(steps(model, caches), alone(model)) < 1e-5


def test_without_the_tokens_a_dead_server_is_an_error(tiny: Tiny, stage2: Stage2) -> None:
    model = tiny("llama")
    with pion_server() as port:
        stored(stage2(model, port=port), "gone")
        pion = stage2(model, port=port, timeout=5.0)
        caches = make_pion_prompt_cache(model, "gone", pion, len(IDS))
    with pytest.raises(PrefixUnavailableError, match="get_or_prefill"):
        steps(model, caches)


# SmolLM2: 20 prompts that share a prefix, 50 greedy tokens each.

SYSTEM = "You are the guide of a small museum of clocks. It opens at ten and closes at five. "
QUESTIONS = [
    "The capital of France is",
    "My favourite book is about",
    "Two plus two equals",
    "Once upon a time there was",
    "The weather today is",
    "def add(a, b):\n    ",
    "In the year 1492,",
    "Water boils at a temperature",
    "The best way to learn",
    "A haiku about spring:",
    "She opened the door and",
    "Dear Sir or Madam,",
    "The museum opens at",
    "Clocks are made of",
    "The three primary colours are",
    "To bake bread you need",
    "He said that the",
    "The largest planet is",
    "Once the clock struck ten",
    "Question: who are you?",
]
TOKENS = 50


class Answers(NamedTuple):
    """Token ids of the prefix, of what follows it, and of mlx-lm's answers."""

    prefix: list[int]
    suffixes: list[list[int]]
    answers: list[list[int]]


@pytest.fixture(scope="module")
def vanilla(smollm2: Any) -> Answers:
    """What mlx-lm answers without Pion. All prompts at a time, which their equal lengths allow."""
    prefix = smollm2.tokenizer.encode(SYSTEM)
    suffixes = [smollm2.tokenizer.encode(q, add_special_tokens=False)[:4] for q in QUESTIONS]
    caches = make_caches(smollm2.model)
    tokens = mx.array([prefix + suffix for suffix in suffixes])
    found = []
    for _ in range(TOKENS):
        tokens = mx.argmax(smollm2.model(tokens, cache=caches)[:, -1:], axis=-1)
        found.append(tokens[:, 0].tolist())
    return Answers(prefix, suffixes, [list(answer) for answer in zip(*found, strict=True)])


def greedy(model: Any, caches: list[Any], suffix: list[int]) -> list[int]:
    """50 tokens, one at a time."""
    tokens = mx.array([suffix])
    found: list[int] = []
    for _ in range(TOKENS):
        tokens = mx.argmax(model(tokens, cache=caches)[:, -1:], axis=-1)
        found.append(int(tokens.item()))
    return found


def forced(model: Any, caches: list[Any], suffix: list[int], answer: list[int]) -> list[int]:
    """In one step, what follows the suffix and each token of `answer`. Where that is `answer`
    itself, it is the greedy answer."""
    logits = model(mx.array([suffix + answer[:-1]]), cache=caches)[0]
    found: list[int] = mx.argmax(logits[len(suffix) - 1 :], axis=-1).tolist()
    return found


@pytest.mark.parametrize(("lane", "prompts"), [("inproc", 3), ("resp", 20), ("binary", 3)])
def test_smollm2_answers_as_without_pion(
    smollm2: Any, stage2: Stage2, vanilla: Answers, lane: str, prompts: int
) -> None:
    """Each prompt with its answer at once; over the binary lane, one of them token by token."""
    model, (prefix, suffixes, answers) = smollm2.model, vanilla
    pion = stage2(model, lane)
    stored(pion, f"smollm2-{lane}", prefix)

    def caches() -> list[Any]:
        return make_pion_prompt_cache(model, f"smollm2-{lane}", pion, len(prefix))

    if lane == "binary":
        assert greedy(model, caches(), suffixes[0]) == answers[0]
    for suffix, answer in list(zip(suffixes, answers, strict=True))[:prompts]:
        assert forced(model, caches(), suffix, answer) == answer
    assert pion.stats()["errors"] == {}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("lane", LANES)
def test_smollm2_answers_all_prompts_token_by_token(
    smollm2: Any, stage2: Stage2, vanilla: Answers, lane: str
) -> None:
    model, (prefix, suffixes, answers) = smollm2.model, vanilla
    pion = stage2(model, lane)
    stored(pion, f"long-{lane}", prefix)
    for suffix, answer in zip(suffixes, answers, strict=True):
        caches = make_pion_prompt_cache(model, f"long-{lane}", pion, len(prefix))
        assert greedy(model, caches, suffix) == answer
