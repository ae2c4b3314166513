"""What these tests share: a real server, the real model, and tiny models of other families."""

# ruff: noqa: E402 - a fast BLAS must be in the process before mlx is
from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from pion_vllm_mlx import load_fast_blas

load_fast_blas()

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import load
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.demo.children import pion_server
from pion_vllm_mlx.demo.smollm2 import model_folder

# Arguments of small models, by mlx-lm's module name. Vocabulary 100, two layers.
_COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
}
_MLA = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 100,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
_ARGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {
        "head_dim": 24,
        "max_position_embeddings": 1000,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
    },
    # K rows are 4 x (16 + 8) values, V rows 4 x 12.
    "deepseek_v2": _MLA,
    # One head: K is the latent (16 values), V the rotated key (8 values).
    "deepseek_v3": _MLA,
    "gemma3_text": {
        "num_hidden_layers": 6,
        "head_dim": 16,
        "sliding_window": 8,
        "sliding_window_pattern": 6,
    },
    "mamba": {
        "state_size": 4,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
}


@pytest.fixture(scope="session")
def tiny() -> Callable[..., nn.Module]:
    """`tiny(family, dtype)`: a small model of random weights, the same at every call."""

    def make(family: str, dtype: mx.Dtype = mx.float32, **changes: Any) -> nn.Module:
        module = importlib.import_module(f"mlx_lm.models.{family}")
        arguments = {"model_type": family, **_COMMON, **_ARGS[family], **changes}
        mx.random.seed(7)
        model: nn.Module = module.Model(module.ModelArgs.from_dict(arguments))
        model.set_dtype(dtype)
        mx.eval(model.parameters())
        return model

    return make


class Loaded(NamedTuple):
    """The real model."""

    folder: str
    model: nn.Module
    tokenizer: Any


@pytest.fixture(scope="session")
def smollm2() -> Loaded:
    """SmolLM2-135M-Instruct, its folder built at the first use ever."""
    folder = str(model_folder())
    model, tokenizer, *_ = load(folder)
    return Loaded(folder, model, tokenizer)


@pytest.fixture(scope="session")
def port() -> Iterator[int]:
    """The port of a real pion-server process."""
    with pion_server() as listening:
        yield listening


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses."""
    return uuid.uuid4().hex


@pytest.fixture
def connect(port: int) -> Iterator[Callable[..., PionPromptCache]]:
    """`connect(model, ...)`: a PionPromptCache on the server, closed after the test."""
    made: list[PionPromptCache] = []

    def make(model: nn.Module, **options: Any) -> PionPromptCache:
        made.append(PionPromptCache(model, **{"port": port, "timeout": 30.0, **options}))
        return made[-1]

    yield make
    for pion in made:
        pion.close()
