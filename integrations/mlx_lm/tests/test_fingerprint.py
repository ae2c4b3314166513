"""A prefix is identified by everything its K/V depend on, and alike in every process."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from pion_vllm_mlx.fingerprint import model_fingerprint, prefix_fingerprint

Tiny = Callable[..., nn.Module]

LORA = {"rank": 4, "scale": 10.0, "dropout": 0.0}


def with_adapter(model: nn.Module, **changes: Any) -> nn.Module:
    mx.random.seed(1)
    linear_to_lora_layers(model, 2, {**LORA, **changes})
    return model


def with_other_weight(model: nn.Module, name: str) -> nn.Module:
    ((value),) = [array for path, array in tree_flatten(model.parameters()) if path == name]
    model.load_weights([(name, value + 0.01)], strict=False)
    return model


def quantized(model: nn.Module, **options: int) -> nn.Module:
    nn.quantize(model, **options)
    return model


def test_the_same_model_is_the_same(tiny: Tiny) -> None:
    model = tiny("llama")
    assert model_fingerprint(tiny("llama")) == model_fingerprint(model)
    assert model_fingerprint(weakref.proxy(model)) == model_fingerprint(model)


def test_whatever_changes_the_model_changes_it(tiny: Tiny) -> None:
    models = [
        tiny("llama"),
        tiny("qwen3"),
        tiny("llama", mx.float16),
        tiny("llama", mx.bfloat16),
        tiny("llama", rope_theta=2e4),
        tiny("llama", rms_norm_eps=1e-6),
        tiny("llama", rope_scaling={"type": "linear", "factor": 2.0}),
        tiny("llama", rope_traditional=True),
        with_other_weight(tiny("llama"), "model.layers.1.self_attn.k_proj.weight"),
        with_other_weight(tiny("llama"), "model.norm.weight"),
        with_adapter(tiny("llama")),
        with_adapter(tiny("llama"), scale=20.0),
        with_adapter(tiny("llama"), rank=2),
        quantized(tiny("llama"), group_size=32, bits=4),
        quantized(tiny("llama"), group_size=32, bits=8),
        quantized(tiny("llama"), group_size=64, bits=4),
    ]
    assert len({model_fingerprint(model) for model in models}) == len(models)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_single_weight_that_changes_is_seen(tiny: Tiny, dtype: mx.Dtype) -> None:
    """Wherever it is, such as in the row of one token of the vocabulary; by a single bit."""
    model = tiny("llama", dtype)
    seen = {model_fingerprint(model)}
    parameters = 2 * tree_flatten(model.parameters())
    numbers = np.random.default_rng(3)
    for name, value in parameters:
        bits = np.array(mx.contiguous(value.reshape(-1)).view(mx.uint8))
        bits[numbers.integers(bits.size)] ^= 1 << numbers.integers(8)
        model.load_weights([(name, mx.array(bits).view(dtype).reshape(value.shape))], strict=False)
        seen.add(model_fingerprint(model))
        model.load_weights([(name, value)], strict=False)
    assert len(seen) == 1 + len(parameters)


def test_rows_that_trade_places_are_seen(tiny: Tiny) -> None:
    """Two tokens of the vocabulary that are exchanged."""
    model = tiny("llama")
    before = model_fingerprint(model)
    rows = [0, 2, 1, *range(3, model.model.embed_tokens.weight.shape[0])]
    model.model.embed_tokens.weight = model.model.embed_tokens.weight[mx.array(rows)]
    assert model_fingerprint(model) != before


@pytest.mark.parametrize(
    "other",
    [
        ("model", ["fp16 2x16 float32"], [1, 2, 4]),
        ("model", ["fp16 2x16 float32"], [1, 2]),
        ("model", ["fp16 2x16 float32"], [1, 2, 3, 0]),
        ("model", ["fp32 2x16 float32"], [1, 2, 3]),
        ("model", ["fp16 4x8 float32"], [1, 2, 3]),
        ("model", ["fp16 2x16", "float32"], [1, 2, 3]),
        ("mode", ["lfp16 2x16 float32"], [1, 2, 3]),
        ("model", ["fp16 2x16 float32"], [258, 2, 3]),
    ],
)
def test_model_layout_and_every_token_count(other: tuple[str, list[str], list[int]]) -> None:
    assert prefix_fingerprint("model", ["fp16 2x16 float32"], [1, 2, 3]) != prefix_fingerprint(
        *other
    )


def test_another_process_finds_the_same(smollm2: Any) -> None:
    program = (
        "import sys; from mlx_lm import load; from pion_vllm_mlx.fingerprint import *; "
        "print(prefix_fingerprint(model_fingerprint(load(sys.argv[1])[0]), ['a'], [1, 2, 3]))"
    )
    # Another hash seed, so that nothing may depend on the order of a set.
    found = subprocess.run(
        [sys.executable, "-c", program, smollm2.folder],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout
    here = prefix_fingerprint(model_fingerprint(smollm2.model), ["a"], [1, 2, 3])
    assert found.splitlines()[-1] == here
