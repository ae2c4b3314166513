"""What comes back from Pion is what was stored: bit for bit with `native`, rounded once else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.caches import make_caches
from pion_vllm_mlx.layout import CODECS
from pion_vllm_mlx.prefill import prefill

Connect = Callable[..., PionPromptCache]
Tiny = Callable[..., nn.Module]

IDS = [(7 * number) % 100 for number in range(300)]  # past 256, where mlx-lm grows its buffers
FAMILIES = ["llama", "qwen3", "deepseek_v2", "deepseek_v3"]


def sides(caches: Sequence[KVCache]) -> list[mx.array]:
    return [side[:, :, : c.offset] for c in caches for side in (c.keys, c.values)]


def restored(connect: Connect, model: Any, namespace: str, **options: Any) -> list[KVCache]:
    """The caches as a second client gets them."""
    first, second = connect(model, **options), connect(model, **options)
    first.get_or_prefill(IDS, namespace=namespace)
    assert first.flush()
    caches = second.get_or_prefill(IDS, namespace=namespace)
    assert (second.stats()["hits"], second.stats()["errors"]) == (1, {})
    return caches


def assert_same_bits(left: Sequence[mx.array], right: Sequence[mx.array]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert mx.array_equal(mx.contiguous(a).view(mx.uint8), mx.contiguous(b).view(mx.uint8))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_native_is_bit_identical(
    tiny: Tiny, connect: Connect, namespace: str, family: str, dtype: mx.Dtype
) -> None:
    model = tiny(family, dtype, n_routed_experts=None)  # mlx has fp32 experts only on a CPU
    caches = restored(connect, model, namespace, vquant="native")
    assert [cache.offset for cache in caches] == [len(IDS)] * len(caches)
    assert_same_bits(sides(caches), sides(prefill(model, IDS)))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_a_codec_rounds_once(
    tiny: Tiny, connect: Connect, namespace: str, codec: str, dtype: mx.Dtype
) -> None:
    model = tiny("llama", dtype)
    caches = restored(connect, model, namespace, vquant=codec)
    wanted = [side.astype(CODECS[codec]).astype(dtype) for side in sides(prefill(model, IDS))]
    assert_same_bits(sides(caches), wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_goes_on_as_from_the_live_cache(
    tiny: Tiny, connect: Connect, namespace: str, family: str
) -> None:
    model = tiny(family)
    caches, live = restored(connect, model, namespace, vquant="native"), prefill(model, IDS)
    for suffix in ([5, 6, 7], [8], [9]):  # a prompt, then two decode steps
        assert mx.array_equal(
            model(mx.array([suffix]), cache=caches), model(mx.array([suffix]), cache=live)
        )


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("recurrent_gemma", {}),  # a ring and a state, no rows at all
        ("qwen3_5", {}),  # rows and states
        ("llama4", {}),  # a chunk that has moved, and rows
        ("llama", {"kv_bits": 8, "kv_group_size": 32}),
    ],
)
@pytest.mark.parametrize("vquant", ["native", "fp16"])
def test_other_caches_go_on_as_the_live_ones(
    tiny: Tiny, connect: Connect, namespace: str,
    family: str, options: dict[str, int], vquant: str,
) -> None:  # fmt: skip
    """With fp16 as well, where it applies to rows only."""
    model = tiny(family, **({"head_dim": 32} if options else {}))
    caches = restored(connect, model, namespace, vquant=vquant, **options)
    live = prefill(model, IDS, make_caches(model, **options))
    for suffix in ([5, 6, 7], [8], [9]):
        left, right = (model(mx.array([suffix]), cache=each) for each in (caches, live))
        tolerance = 0 if vquant == "native" else 2e-2
        assert mx.allclose(left, right, rtol=tolerance, atol=tolerance)


def test_the_real_model_is_bit_identical(smollm2: Any, connect: Connect, namespace: str) -> None:
    ids = smollm2.tokenizer.encode("Pion gives back the very bits that prefill computed. " * 6)
    first = connect(smollm2.model, vquant="native")
    live = first.get_or_prefill(ids, namespace=namespace)
    second = connect(smollm2.model, vquant="native")
    assert first.flush()
    assert_same_bits(sides(second.get_or_prefill(ids, namespace=namespace)), sides(live))
    assert second.stats()["hits"] == 1


class Odd(nn.Module):  # type: ignore[misc]
    """Two layers whose K and V are NaNs with payloads, infinities, negative zeros, subnormals."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[nn.Module] = [nn.Identity(), nn.Identity()]
        bits = [0x7FC01234, 0xFFC00001, 0x7F800000, 0xFF800000, 0x80000000, 1, 0x807FFFFF, 0]
        self._row = mx.array(bits, mx.uint32).view(mx.float32)

    def __call__(self, inputs: mx.array, cache: Sequence[KVCache]) -> mx.array:
        for layer in cache:
            rows = mx.broadcast_to(self._row, (1, 2, inputs.shape[1], len(self._row)))
            layer.update_and_fetch(rows, rows)
        return mx.zeros((1, inputs.shape[1], 4))


def test_special_values_survive(connect: Connect, namespace: str) -> None:
    model = Odd()
    caches = restored(connect, model, namespace, vquant="native")
    assert_same_bits(sides(caches), sides(prefill(model, IDS)))
    assert mx.isnan(caches[0].keys).any()
    assert mx.isinf(caches[1].values).any()
