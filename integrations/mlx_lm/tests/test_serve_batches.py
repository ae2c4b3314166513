"""What prompts that are served together leave behind is what each of them alone would have left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import FAMILIES, LEFT_OUT, ships
from mlx_lm import server
from mlx_lm.models.cache import ArraysCache
from pion_vllm_mlx.caches import leaves, make_caches
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.prefix_store import PrefixStore
from pion_vllm_mlx.serve import run
from pion_vllm_mlx.serve.backing import Backing
from pion_vllm_mlx.serve.generator import BlockResponseGenerator, batch_generator
from pion_vllm_mlx.serve.prompt_cache import PionLRUPromptCache

Tiny = Callable[..., nn.Module]

LENGTHS = (37, 90, 11)  # so that the others are padded while one is prefilled
CUT = 32


PROMPTS = [[(7 * n + 11 * seed) % 100 for n in range(size)] for seed, size in enumerate(LENGTHS)]
OPTIONS = {"prefill_batch_size": 8, "completion_batch_size": 8}


def pieces(prompt: list[int]) -> list[list[int]]:
    """The last token is left alone, since generation begins with it."""
    body, last = prompt[:-1], prompt[-1:]
    return [*(body[begin : begin + CUT] for begin in range(0, len(body), CUT)), last]


def opened(store: PrefixStore) -> Backing:
    """A Backing that has this store."""
    backing = Backing("", 0)
    backing.store = lambda: store  # type: ignore[method-assign]
    return backing


def served(model: Any, store: PrefixStore) -> list[tuple[list[int], list[Any]]]:
    """Tokens and caches wherever mlx_lm.server takes caches out of a batch of ragged prompts."""
    generator: Any = batch_generator(opened(store), model, **OPTIONS)
    uids = generator.insert_segments(list(map(pieces, PROMPTS)), max_tokens=[4] * len(LENGTHS))
    found, finished = [], 0
    while finished < len(uids):
        prompts, answers = generator.next()
        ended = [each.uid for each in prompts if each.end_of_segment and not each.end_of_prompt]
        found += [(tokens[:], cache) for cache, tokens in generator.extract_cache(ended).values()]
        over = [each for each in answers if each.finish_reason]
        found += [(each.all_tokens[:], each.prompt_cache) for each in over]
        finished += len(over)
    generator.close()
    return found


def keeps_states(model: Any) -> bool:
    """Whether it has recurrent states, and mlx_lm.server makes batches of it."""
    caches = make_caches(model)
    batches = all(hasattr(cache, "merge") for cache in caches)
    return batches and any(type(leaf) is ArraysCache for leaf in leaves(caches))


def assert_as_alone(model: Any, store: PrefixStore, family: str) -> None:
    found = served(model, store)
    assert len(found) == sum(len(pieces(prompt)) for prompt in PROMPTS)
    for tokens, caches in found:
        alone = make_caches(model)
        for begin in range(0, len(tokens), CUT):
            prefill(model, tokens[begin : begin + CUT], alone)
        got, wanted = (model(mx.array([[5, 6]]), cache=each)[0, -1] for each in (caches, alone))
        assert mx.allclose(got, wanted, rtol=1e-3, atol=1e-3), family


def test_states_know_of_no_padding(tiny: Tiny) -> None:
    """In any family that has them."""
    tried = 0
    for family in FAMILIES:
        if family in LEFT_OUT or not ships(family) or not keeps_states(model := tiny(family)):
            continue
        with PrefixStore(model, "pion://127.0.0.1:1") as store:
            assert store.step is not None
            assert_as_alone(model, store, family)
        tried += 1
    assert tried > 20


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "exaone4"])
def test_windows_keep_their_order(tiny: Tiny, family: str) -> None:
    """A prompt whose first piece is one token, beside one that has filled its windows."""
    model = tiny(family)
    long, short = PROMPTS[1], PROMPTS[0]
    with PrefixStore(model, "pion://127.0.0.1:1") as store:
        generator: Any = batch_generator(opened(store), model, **OPTIONS)
        uids = generator.insert_segments(
            [[long[-1:]], [short[:1], short[1:]]],
            max_tokens=[1, 1],
            caches=[prefill(model, long[:-1]), make_caches(model)],
            all_tokens=[long[:-1], []],
        )
        answers = {each.uid: each for _ in range(6) for each in generator.next()[1]}
        generator.close()
    for uid, prompt in zip(uids, (long, short), strict=True):
        logits = model(mx.array([prompt]), cache=make_caches(model))[0, -1]
        assert mx.allclose(answers[uid].logprobs, logits - mx.logsumexp(logits), atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_rows_know_of_no_padding(tiny: Tiny, family: str) -> None:
    """These are prefilled together."""
    model = tiny(family)
    with PrefixStore(model, "pion://127.0.0.1:1") as store:
        assert store.step is None
        assert_as_alone(model, store, family)


def test_mlx_lms_server_runs_with_what_takes_the_place_of_its_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_up = {*server.main.__code__.co_names}
    looked_up |= {
        *server.run.__code__.co_names,
        *server.ResponseGenerator._generate.__code__.co_names,
    }
    ours = {
        "LRUPromptCache": PionLRUPromptCache,
        "ResponseGenerator": BlockResponseGenerator,
        "BatchGenerator": batch_generator,
    }
    assert looked_up >= ours.keys()
    for name in ours:
        monkeypatch.setattr(server, name, None)
    monkeypatch.setattr(server, "main", lambda: None)
    monkeypatch.setattr("sys.argv", [])
    run._run("pion://127.0.0.1:1", 1, [])
    placed = {name: getattr(server, name) for name in ours}
    assert {name: getattr(it, "func", it) for name, it in placed.items()} == ours
