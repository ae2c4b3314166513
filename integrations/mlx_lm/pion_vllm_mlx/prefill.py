"""Cold prefill, as mlx-lm's own `generate_step` does it, but over the whole prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
from mlx_lm.generate import generation_stream

from pion_vllm_mlx.caches import evaluate, make_caches
from pion_vllm_mlx.model import Cache, Model

PREFILL_STEP_SIZE = 2048  # mlx-lm's default chunk


def prefill(
    model: Model, token_ids: Sequence[int], caches: list[Cache] | None = None
) -> list[Cache]:
    """The caches after running all of `token_ids` through `model`, on top of what `caches` hold.

    Every array in them is evaluated, so any thread or stream may go on with them.
    """
    caches = make_caches(model) if caches is None else caches
    tokens = mx.array(list(token_ids))
    with mx.stream(generation_stream):
        for begin in range(0, tokens.size, PREFILL_STEP_SIZE):
            model(tokens[None, begin : begin + PREFILL_STEP_SIZE], cache=caches)
            evaluate(caches)
            mx.clear_cache()
    return caches


def segments(begin: int, end: int, step: int | None) -> Iterator[tuple[int, int]]:
    """`begin` to `end`, cut at every multiple of `step`."""
    while begin < end:
        stop = end if step is None else min((begin // step + 1) * step, end)
        yield begin, stop
        begin = stop
