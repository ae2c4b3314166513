"""mlx_lm.server's generator with prompts cut where Pion keeps states.

The server hands caches to its prompt cache at the end of every segment of a prompt. A model with
recurrent states can go on only from where a state was kept, so its prompts get more segments; a
model with sliding windows needs them before the windows forget.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from mlx_lm.generate import BatchGenerator
from mlx_lm.server import ResponseGenerator

from pion_vllm_mlx.model import Model
from pion_vllm_mlx.prefill import segments as cuts
from pion_vllm_mlx.serve.backing import Backing
from pion_vllm_mlx.serve.prompt_cache import BLOCK, PionLRUPromptCache

Segment = tuple[list[int], str]

# The end of what opens an answer, such as `<|im_start|>`, `assistant`, newline.
OPENING_TOKENS = 3
# How many turns to look back.
MOST_TURNS = 8


class BlockResponseGenerator(ResponseGenerator):
    """In the place of mlx_lm.server.ResponseGenerator."""

    prompt_cache: PionLRUPromptCache

    def __init__(self, model_provider: Any, prompt_cache: PionLRUPromptCache) -> None:
        prompt_cache.backing.provider = model_provider
        super().__init__(model_provider, prompt_cache)

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        found = super()._tokenize(tokenizer, request, args)  # type: ignore[no-untyped-call]
        prompt, segments, types, *rest = found
        self.prompt_cache.ends = [*accumulate(map(len, segments)), *earlier_ends(prompt)]
        if step := self._step():
            pieces = list(split(list(zip(segments, types, strict=True)), step))
            segments, types = [piece for piece, _ in pieces], [kind for _, kind in pieces]
        return prompt, segments, types, *rest

    def _step(self) -> int | None:
        """How often a prompt is cut, at least once a step of the server's prefill."""
        store = self.prompt_cache.backing.store()
        if store is None or store.step is None:
            return None
        longest = self.cli_args.prefill_step_size // store.stride * store.stride
        return int(min(store.step, max(longest, store.stride)))


def batch_generator(backing: Backing, model: Model, **options: Any) -> BatchGenerator:
    """In the place of mlx_lm.server.BatchGenerator: prompts of a model with states or windows are
    prefilled one at a time. Those of a batch are padded to one length. Many of mlx-lm's models
    (mamba, jamba and rwkv7 in 0.32, qwen3_5 in 0.31) compute the padding into their states, and a
    padded window that gets one token alone, then several, loses its order. That answer would be
    wrong without Pion, too; with it, everybody's would."""
    store = backing.store()
    if store is not None and store.step is not None:
        options["prefill_batch_size"] = 1
    return BatchGenerator(model, **options)


def earlier_ends(prompt: list[int]) -> list[int]:
    """Where earlier prompts of the same conversation ended, less their last token.

    Every prompt of a chat ends with the words that open an answer, and these stand before each
    earlier answer in it. Positions found by chance cost a small question each.
    """
    opening = prompt[-OPENING_TOKENS:]
    found = []
    for end in range(len(prompt) - 1, OPENING_TOKENS - 1, -1):
        if prompt[end - 1] == opening[-1] and prompt[end - OPENING_TOKENS : end] == opening:
            found.append(end - 1)
            if len(found) == MOST_TURNS:
                break
    return found


def split(segments: list[Segment], step: int) -> Iterator[Segment]:
    """Segments cut at every multiple of `step` tokens from the prompt's beginning.

    A last token is never left alone: it is what generation begins with, and the server keeps the
    caches that come before it as the end of the prompt.
    """
    last = sum(len(tokens) for tokens, _ in segments) - 1
    begin = 0
    for tokens, kind in segments:
        end = begin + len(tokens)
        start = begin
        for _, stop in cuts(begin, end, step):
            if stop == last and end > last:
                continue
            yield tokens[start - begin : stop - begin], kind if stop == end else BLOCK
            start = stop
        begin = end
