"""What `serve` puts into mlx_lm.server keeps that server's contract, whatever it is given."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import ChunkedKVCache
from pion_vllm_mlx.caches import make_caches
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.serve.backing import Backing
from pion_vllm_mlx.serve.generator import MOST_TURNS, earlier_ends, split
from pion_vllm_mlx.serve.options import parse
from pion_vllm_mlx.serve.prompt_cache import BLOCK, LEAST_GAIN, PionLRUPromptCache

Tiny = Callable[..., nn.Module]
Serving = Callable[..., PionLRUPromptCache]

KEY = ("model", None, None)
# Longer than a block, so that a fresh process finds something.
PROMPT = [(7 * number) % 100 for number in range(300)]


def provider(model: Any, **changes: Any) -> Any:
    """What the cache sees of mlx_lm.server's ModelProvider."""
    arguments = {"kv_bits": None, "kv_group_size": 64, "quantized_kv_start": 5000}
    facts = {"model_key": KEY, "model": model, "draft_model": None, "is_distributed": False}
    namespace = SimpleNamespace(**{**arguments, **changes})
    return SimpleNamespace(cli_args=namespace, **{**facts, **changes})


@pytest.fixture
def serving(port: int) -> Any:
    """`serving(model)`: the prompt cache of one server process."""
    made: list[Backing] = []

    def make(model: Any, url: str = f"pion://127.0.0.1:{port}", **changes: Any) -> Any:
        made.append(Backing(url, 30))
        made[-1].provider = provider(model, **changes)
        return PionLRUPromptCache(made[-1], 10)

    yield make
    for backing in made:
        backing.close()


def flush(cache: PionLRUPromptCache) -> None:
    store = cache.backing.store()
    assert store is not None
    assert store.flush()


def logits(model: Any, cache: Any, rest: list[int]) -> mx.array:
    return model(mx.array([rest]), cache=cache)[0, -1]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mamba2", "llama4"])
def test_one_token_is_always_left(tiny: Tiny, serving: Serving, family: str) -> None:
    """Also for a prompt that is known to its end, on which the stock server dies."""
    if family == "llama4" and not hasattr(ChunkedKVCache, "keys_and_values"):
        pytest.skip("mlx-lm 0.31 itself cannot go on from a chunk that it has trimmed")
    model = tiny(family)
    cache = serving(model, url="pion://127.0.0.1:1")
    cache.insert_cache(KEY, PROMPT, prefill(model, PROMPT), cache_type="user")
    for prompt in (PROMPT, PROMPT[:1], PROMPT[:200], [*PROMPT, 5], PROMPT[:-1], [99, 98]):
        found, rest = cache.fetch_nearest_cache(KEY, list(prompt))
        assert rest == prompt[len(prompt) - len(rest) :]
        assert len(rest) >= 1
        if found is None:
            assert rest == prompt
        else:
            wanted = logits(model, make_caches(model), prompt)
            assert mx.allclose(logits(model, found, rest), wanted, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mamba2"])
def test_another_process_finds_the_prompt(tiny: Tiny, serving: Serving, family: str) -> None:
    model = tiny(family)
    first, second = serving(model), serving(model)
    prompt = [len(family), *PROMPT]
    first.insert_cache(KEY, prompt, prefill(model, prompt), cache_type="user")
    flush(first)
    found, rest = second.fetch_nearest_cache(KEY, [*prompt, 5])
    assert rest == [5]
    assert mx.allclose(
        logits(model, found, rest), logits(model, make_caches(model), [*prompt, 5]), atol=1e-3
    )


def test_ends_of_segments_are_found(tiny: Tiny, serving: Serving) -> None:
    model = tiny("mamba2")
    first, second = serving(model), serving(model)
    system, user = [1, *PROMPT[:70]], [5] * 50
    first.insert_cache(KEY, system, prefill(model, system), cache_type="system")
    flush(first)
    assert second.fetch_nearest_cache(KEY, system + user) == (None, system + user)
    second.ends = [len(system), len(system + user)]
    assert second.fetch_nearest_cache(KEY, system + user)[1] == user


def test_what_is_in_memory_is_not_fetched(tiny: Tiny, serving: Serving) -> None:
    model = tiny("llama")
    cache = serving(model)
    cache.insert_cache(KEY, [2, *PROMPT], prefill(model, [2, *PROMPT]))
    assert cache.fetch_nearest_cache(KEY, [2, *PROMPT, 5])[1] == [5]
    assert len(cache.fetch_nearest_cache(KEY, [2, *PROMPT, *range(LEAST_GAIN)])[1]) == LEAST_GAIN
    store = cache.backing.store()
    assert store is not None
    assert (store.stats()["hits"], store.stats()["misses"]) == (0, 0)


def test_blocks_go_to_pion_only(tiny: Tiny, serving: Serving) -> None:
    model = tiny("mamba2")
    cache = serving(model)
    for length in (256, 300):
        kind = BLOCK if length == 256 else "user"
        prompt = [3, *PROMPT][:length]
        cache.insert_cache(KEY, prompt, prefill(model, prompt), cache_type=kind)
    assert len(cache) == 1
    flush(cache)
    other = serving(model)
    assert len(other.fetch_nearest_cache(KEY, [3, *PROMPT][:290])[1]) == 290 - 256


def test_a_chunk_that_was_trimmed_in_part_is_not_used(tiny: Tiny, serving: Serving) -> None:
    """mlx-lm says how far it trimmed the first layer; the others may differ."""
    model = tiny("llama4")
    cache = serving(model, url="pion://127.0.0.1:1")
    prompt = PROMPT * 2
    caches = prefill(model, prompt)
    prefill(model, [1], caches)
    assert any(type(each) is ChunkedKVCache and each.start_position for each in caches)
    cache.insert_cache(KEY, [*prompt, 1], caches)
    found, rest = cache.fetch_nearest_cache(KEY, [*PROMPT, 50])
    assert (found, rest) == (None, [*PROMPT, 50])


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_model": object()},
        {"is_distributed": True},
        {"kv_bits": 8},
        {"model": object()},  # whatever it is, it is no model
    ],
)
def test_what_cannot_be_shared_is_served_as_before(
    tiny: Tiny, serving: Serving, changes: dict[str, Any]
) -> None:
    model = tiny("llama")
    cache = serving(model, **changes) if "model" not in changes else serving(changes["model"])
    assert cache.backing.store() is None
    cache.insert_cache(KEY, PROMPT, prefill(model, PROMPT))
    assert cache.fetch_nearest_cache(KEY, [*PROMPT, 5])[1] == [5]


def test_quantized_caches(tiny: Tiny, serving: Serving) -> None:
    model = tiny("llama", head_dim=64)
    options = {"kv_bits": 8, "kv_group_size": 32}
    first, second = (serving(model, quantized_kv_start=0, **options) for _ in range(2))
    caches = prefill(model, [4, *PROMPT], make_caches(model, **options))
    first.insert_cache(KEY, [4, *PROMPT], caches, cache_type="user")
    flush(first)
    found, rest = second.fetch_nearest_cache(KEY, [4, *PROMPT, 5])
    assert rest == [5]
    assert mx.array_equal(logits(model, found, rest), logits(model, caches, rest))


def test_another_model_is_another_store(tiny: Tiny, serving: Serving) -> None:
    """The server drops a model before it loads the next one; nothing of ours holds it back."""
    cache = serving(tiny("llama"))
    first = cache.backing.store()
    cache.backing.provider.model_key = ("other", None, None)
    cache.backing.provider.model = tiny("llama", rope_theta=2e4)
    second = cache.backing.store()
    assert first is not None
    assert second is not None
    assert first is not second
    assert first.match(PROMPT).length == 0  # closed, and its model is gone
    cache.backing.provider.model_key = None
    assert cache.backing.store() is None


def test_prompts_with_images_stay_in_memory(tiny: Tiny, serving: Serving) -> None:
    model = tiny("llama")
    first, second = serving(model), serving(model)
    prompt = [5, -123456789, -123456789, *PROMPT]
    first.insert_cache(KEY, prompt, prefill(model, [5, *PROMPT, 1, 1]), cache_type="user")
    flush(first)
    assert first.fetch_nearest_cache(KEY, [*prompt, 5])[1] == [5]
    assert second.fetch_nearest_cache(KEY, [*prompt, 5])[0] is None


def test_the_pace_of_prefills_is_learned(tiny: Tiny, serving: Serving) -> None:
    model = tiny("llama")
    cache = serving(model)
    prompt = [6, *PROMPT]
    cache.fetch_nearest_cache(KEY, prompt)
    cache.insert_cache(KEY, prompt[:-1], prefill(model, prompt[:-1]), cache_type="assistant")
    store = cache.backing.store()
    assert store is not None
    assert store._pace.prefill_seconds(100)
    flush(cache)
    # The end of a prompt, whatever its type, is kept.
    assert serving(model).fetch_nearest_cache(KEY, prompt)[1] == prompt[-1:]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 30))
def test_segments_are_cut_at_every_step(lengths: list[int], step: int) -> None:
    total, begin, segments = sum(lengths), 0, []
    for number, length in enumerate(lengths):
        segments.append((list(range(begin, begin + length)), f"segment {number}"))
        begin += length
    pieces = list(split(segments, step))
    assert [token for tokens, _ in pieces for token in tokens] == list(range(total))
    assert all(tokens for tokens, _ in pieces)
    ends = [tokens[-1] + 1 for tokens, _ in pieces]
    kinds = dict(zip(ends, (kind for _, kind in pieces), strict=True))
    wanted = {tokens[-1] + 1: kind for tokens, kind in segments}
    assert {end: kind for end, kind in kinds.items() if kind != BLOCK} == wanted
    blocks = {end for end, kind in kinds.items() if kind == BLOCK}
    assert blocks == set(range(step, total - 1, step)) - set(wanted)


def test_earlier_prompts_of_a_conversation_are_known_by_how_answers_open() -> None:
    opening = [1, 2, 3]
    first = [10, 11, *opening]
    second = [*first, 20, 21, 1, 2, 22, *opening]
    assert earlier_ends(first) == []
    assert earlier_ends(second) == [len(first) - 1]
    third = [*second, 3, *opening]
    assert earlier_ends(third) == [len(second) - 1, len(first) - 1]
    long = opening * (MOST_TURNS + 5)
    assert earlier_ends(long) == [len(long) - 3 * n - 1 for n in range(1, MOST_TURNS + 1)]
    assert [earlier_ends(prompt) for prompt in ([], [1], [1, 1], [1, 1, 1])] == [[]] * 4


def test_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("PION_URL", raising=False)
    options, rest = parse(["--model", "m", "--port", "80", "--pion-budget-gb", "0.5"])
    assert (options.url, options.budget, rest) == (
        None,
        500_000_000,
        ["--model", "m", "--port", "80"],
    )
    assert parse(["--pion-dir", "d"])[0].folder == Path("d")
    assert parse(["--pion-url", "pion://h"])[0].url == "pion://h"
    monkeypatch.setenv("PION_URL", "pion://e")
    assert parse([])[0].url == "pion://e"
    for wrong in (["--pion-budget-gb", "1"], ["--pion-dir", "d"], ["--pion-timeout", "0"]):
        with pytest.raises(SystemExit):
            parse(wrong)
    said = capsys.readouterr().err
    assert "--max-memory" in said
    assert "--pion-timeout: must be a number above 0, not '0'" in said
    for url in ("redis://:s3cret@h", "pion://:s3cret@h:99999", "pion://:s3/cret@h"):
        with pytest.raises(SystemExit):
            parse(["--pion-url", url])
        said = capsys.readouterr().err
        assert "--pion-url (or $PION_URL): " in said
        assert "cret" not in said


def test_every_option_of_mlx_lms_server_goes_through() -> None:
    command = [sys.executable, "-m", "mlx_lm.server", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = sorted(set(re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", shown, re.MULTILINE)) - {"--help"})
    assert {"--model", "--prompt-cache-bytes", "--chat-template-args"} <= set(names)
    arguments = [word for name in names for word in (name, f"value of {name}")]
    assert parse(["--pion-url", "pion://h", *arguments])[1] == arguments
    joined = [f"{name}=1" for name in names]
    assert parse([*joined, "--pion-url=pion://h"])[1] == joined


def test_help_shows_both() -> None:
    command = [sys.executable, "-m", "pion_vllm_mlx.cli"]
    shown = subprocess.run([*command, "serve", "--help"], capture_output=True, text=True)
    assert shown.returncode == 0
    assert "--pion-budget-gb" in shown.stdout
    assert "--prompt-cache-bytes" in shown.stdout
    usage = subprocess.run([*command, "server"], capture_output=True, text=True)
    assert (usage.returncode, usage.stdout) == (2, "")
    assert "pion-vllm-mlx serve" in usage.stderr
