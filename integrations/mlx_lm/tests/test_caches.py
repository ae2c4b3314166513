"""Every class of cache goes to rows or states and comes back, so that the model cannot tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import CHUNK, WINDOW, ships
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from pion_vllm_mlx import UnsupportedCacheError
from pion_vllm_mlx.caches import Part, kind_of, leaves, make_caches, part_of
from pion_vllm_mlx.contents import fill, rows_of, states_of
from pion_vllm_mlx.layout import Layout, read_layout
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.states import pack

from pion_server.errors import Mismatch

Tiny = Callable[..., nn.Module]

PROMPT = [(7 * number) % 100 for number in range(70)]
# A family for each class of cache and each way to combine them.
FAMILIES = [
    "llama",  # KVCache
    "afm7",  # ConcatenateKVCache, and fewer caches than layers
    "nemotron-nas",  # a cache that is never used
    "gemma4_text",  # RotatingKVCache, a width per layer, shared layers
    "recurrent_gemma",  # RotatingKVCache and ArraysCache
    "llama4",  # ChunkedKVCache
    "mamba2",  # ArraysCache only
    "qwen3_5",
    "falcon_h1",  # CacheList of ArraysCache and KVCache
    "baichuan_m1",  # CacheList of ArraysCache and RotatingKVCache
    "deepseek_v32",  # CacheList of two KVCaches
    "longcat_flash_ngram",  # token ids as a state
    "minimax_m3_vl",  # V without values
    "deepseek_v41",  # its own class
]


def steps(model: Any, caches: Sequence[Any], count: int = 4) -> mx.array:
    """Logits of a short prompt and of single tokens after it."""
    logits = [model(mx.array([[5, 6, 7]]), cache=caches)[:, -1:]]
    logits += [model(mx.array([[8 + step]]), cache=caches) for step in range(count)]
    return mx.concatenate(logits, axis=1)


def layout_of(model: Any, **options: Any) -> Layout:
    return read_layout(model, make_caches(model, **options), "native", blocks=False)


def copy(caches: Sequence[Any], layout: Layout, tokens: int, fresh: Sequence[Any]) -> None:
    """`caches` into `fresh`, through bytes where they are states."""
    blobs = [pack(state) for state in states_of(caches, layout).values()]
    fill(fresh, layout, tokens, rows=rows_of(caches, layout, Part.ROWS), states=blobs)


@pytest.mark.parametrize("decoded", [0, 1, 30])
@pytest.mark.parametrize("family", list(filter(ships, FAMILIES)))
def test_a_copy_goes_on_bit_for_bit(tiny: Tiny, family: str, decoded: int) -> None:
    """Also where decoding has turned a ring, or moved a chunk, before."""
    model = tiny(family)
    prompt = PROMPT * (8 if family == "llama4" else 1)  # past two chunks
    caches = prefill(model, prompt)
    for step in range(decoded):
        prefill(model, [step], caches)
    fresh = make_caches(model)
    copy(caches, layout_of(model), len(prompt) + decoded, fresh)
    assert mx.array_equal(steps(model, fresh), steps(model, caches))


@pytest.mark.parametrize("family", ["llama", "mamba2", "lfm2", "falcon_h1", "plamo2"])
def test_every_array_keeps_its_dtype(tiny: Tiny, family: str) -> None:
    """A bf16 model's states may be bf16 and fp32 side by side."""
    model = tiny(family, mx.bfloat16)
    caches, fresh = prefill(model, PROMPT), make_caches(model)
    copy(caches, layout_of(model), len(PROMPT), fresh)
    assert mx.array_equal(steps(model, fresh), steps(model, caches))


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized(tiny: Tiny, bits: int) -> None:
    model, options = tiny("llama", head_dim=64), {"kv_bits": bits, "kv_group_size": 32}
    caches = prefill(model, PROMPT, make_caches(model, **options))
    fresh = make_caches(model, **options)
    assert {type(cache) for cache in fresh} == {QuantizedKVCache}
    copy(caches, layout_of(model, **options), len(PROMPT), fresh)
    assert mx.array_equal(steps(model, fresh), steps(model, caches))


@pytest.mark.parametrize("decoded", [0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 50])
@pytest.mark.parametrize("prompt", [1, WINDOW - 1, WINDOW, WINDOW + 1, 70])
def test_a_ring_unrolls_to_its_last_rows(prompt: int, decoded: int) -> None:
    ring = RotatingKVCache(WINDOW)
    update(ring, 0, prompt)
    for step in range(decoded):
        update(ring, prompt + step, prompt + step + 1)
    keys, values = kind_of(ring).rows(ring)
    tokens = prompt + decoded
    kept = keys.shape[2]
    assert kept >= min(tokens, WINDOW)
    assert keys[0, 0, :, 0].tolist() == list(range(tokens - kept, tokens))
    assert values[0, 0, :, 0].tolist() == [-number for number in range(tokens - kept, tokens)]


@pytest.mark.parametrize("tokens", [1, 24, 100, 256, 700])
@pytest.mark.parametrize(("make", "size"), [(RotatingKVCache, WINDOW), (ChunkedKVCache, CHUNK)])
def test_a_window_is_rebuilt_from_any_rows(make: Any, size: int, tokens: int) -> None:
    """The window of a cache that saw everything at once, whatever came before it."""
    live, fresh = make(size), make(size)
    update(live, 0, tokens)
    kind_of(fresh).set_rows(fresh, kind_of(live).rows(live), tokens)
    assert kind_of(fresh).tokens(fresh) == tokens
    assert fresh.keys.shape[2] == min(tokens, size)
    for cache in (live, fresh):
        if make is ChunkedKVCache:
            cache.maybe_trim_front()
    for start, end in ((tokens, tokens + 3), (tokens + 3, tokens + 4)):
        wanted, got = update(live, start, end), update(fresh, start, end)
        # mlx-lm 0.31 may drop rows of earlier chunks, which a chunk never attends to.
        assert mx.array_equal(got[:, :, -wanted.shape[2] :], wanted)


def update(cache: Any, start: int, end: int) -> mx.array:
    """Rows whose value is their position (K) and its negative (V); what attention would see."""
    keys = mx.arange(start, end, dtype=mx.float32).reshape(1, 1, -1, 1)
    return mx.concatenate(cache.update_and_fetch(keys, -keys), axis=-1)


def test_parts() -> None:
    def parts(*caches: Any) -> list[tuple[str, str]]:
        return [
            (part_of(cache, blocks=False).value, part_of(cache, blocks=True).value)
            for cache in leaves(caches)
        ]

    assert parts(KVCache(), QuantizedKVCache()) == [("rows", "rows")] * 2
    assert parts(CacheList(ArraysCache(2), CacheList(KVCache()))) == [
        ("state", "state"),
        ("rows", "rows"),
    ]
    assert parts(RotatingKVCache(8)) == [("state", "window")]
    slides = hasattr(ChunkedKVCache, "keys_and_values")  # since mlx-lm 0.32
    assert parts(ChunkedKVCache(8)) == [("state", "window" if slides else "state")]
    assert parts(RotatingKVCache(8, keep=4)) == [("state", "state")]


class KVCacheOfAnotherModule(KVCache):  # type: ignore[misc]
    """A subclass may keep more than its parent."""


def test_unknown_classes_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedCacheError, match=r"\.KVCacheOfAnotherModule"):
        part_of(KVCacheOfAnotherModule(), blocks=False)


def test_states_of_another_model_or_length_are_refused(tiny: Tiny) -> None:
    model = tiny("recurrent_gemma")
    layout, caches = layout_of(model), prefill(model, PROMPT)
    blobs = [pack(state) for state in states_of(caches, layout).values()]
    fill(make_caches(model), layout, len(PROMPT), states=blobs)
    with pytest.raises(Mismatch, match="not one of this model's"):
        fill(make_caches(model), layout, len(PROMPT), states=blobs[::-1])
    with pytest.raises(Mismatch, match="another length"):
        fill(make_caches(model), layout, len(PROMPT) + 1, states=blobs)
