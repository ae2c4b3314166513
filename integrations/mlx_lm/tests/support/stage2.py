"""What the tests of Stage 2 share: the ways to a prefix, and what a model answers behind one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.prefill import prefill

from pion_server.client import Client

# A PionPromptCache's attention_url, from the port of its server.
URLS: dict[str, Callable[[int], str]] = {
    "resp": lambda port: f"pion://127.0.0.1:{port}",
    "binary": lambda port: f"pion+fast://127.0.0.1:{fast_port(port)}",
}
LANES = ("inproc", *URLS)

# Longer than all windows, and no multiple of a block.
IDS = [(7 * number + number // 50) % 100 for number in range(130)]


def fast_port(port: int) -> int:
    """Where that server speaks the binary lane."""
    with Client(f"pion://127.0.0.1:{port}") as client:
        return client.pion_workers()[0].fast_port


def stored(pion: PionPromptCache, namespace: str, ids: Sequence[int] = IDS) -> None:
    """Have the server hold a prefix, rows and attention state."""
    pion.get_or_prefill(ids, namespace=namespace)
    assert pion.flush()


def steps(model: Any, caches: list[Any], *tokens: Sequence[int]) -> mx.array:
    """All logits (T, vocabulary) of one step for each of `tokens`."""
    found = []
    for step in tokens or ([5, 6, 7], [8], [9]):
        found.append(model(mx.array([list(step)]), cache=caches)[0])
        mx.eval(found)
    logits = mx.concatenate(found)
    mx.eval(logits)
    return logits


def alone(model: Any, *tokens: Sequence[int], ids: Sequence[int] = IDS) -> mx.array:
    """The same behind a prefix that mlx-lm has just prefilled."""
    return steps(model, prefill(model, ids), *tokens)


def distance(found: mx.array, wanted: mx.array) -> float:
    """The largest difference, relative to the largest value."""
    return float((mx.abs(found - wanted).max() / mx.abs(wanted).max()).item())
