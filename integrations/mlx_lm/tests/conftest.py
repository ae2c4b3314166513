"""What these tests share: a real server, the real model, and tiny models of other families."""

# ruff: noqa: E402 - a fast BLAS must be in the process before mlx is
from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from pion_vllm_mlx import load_fast_blas

load_fast_blas()

import mlx.nn as nn
from families import build
from mlx_lm import load
from pion_vllm_mlx import (
    PionPromptCache,
    install_pion_attention_patch,
    uninstall_pion_attention_patch,
)
from pion_vllm_mlx.attention.stage2 import NO_INPROC
from pion_vllm_mlx.demo.smollm2 import model_folder
from pion_vllm_mlx.processes import pion_server
from stage2 import URLS


@pytest.fixture(scope="session")
def tiny() -> Callable[..., nn.Module]:
    """`tiny(family, dtype)`: a small model of random weights, the same at every call."""
    return build


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


@pytest.fixture
def patched() -> Iterator[None]:
    """The patch of mlx-lm's attention is in place."""
    install_pion_attention_patch()
    yield
    uninstall_pion_attention_patch()


@pytest.fixture
def stage2(
    connect: Callable[..., PionPromptCache],
    patched: None,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., PionPromptCache]:
    """`stage2(model, lane)`: a PionPromptCache that has attention computed there, bit-exact rows
    behind it. From then on no cache is continued in the process unless `lane` is inproc."""

    def make(model: nn.Module, lane: str = "resp", port: int = port, **options: Any) -> Any:
        monkeypatch.setenv(NO_INPROC, "0" if lane == "inproc" else "1")
        url = URLS[lane](port) if lane in URLS else None
        options = {"vquant": "native", "stage2": True, "attention_url": url, **options}
        return connect(model, port=port, **options)

    return make
