"""mlx_lm.server's prompt cache with Pion behind it.

What this process has in memory is used first, and Pion where it has more. All calls come from the
one generation thread, where an exception would end the server for good, and where an answer without
a token left to run would, too: neither leaves this class.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache

from pion_vllm_mlx.caches import KINDS, kind_of, leaves
from pion_vllm_mlx.model import Cache
from pion_vllm_mlx.prefix_store import PrefixStore
from pion_vllm_mlx.serve.backing import Backing

logger = logging.getLogger(__name__)

# The type of a segment that ends at a block boundary; it goes to Pion only.
BLOCK = "block"
# Fewer tokens than these are prefilled in the time that asking for them takes.
LEAST_GAIN = 32
# Prompts whose prefill is being timed; one that was cancelled is never heard of again.
MAX_TIMED = 64

Found = tuple[list[Cache] | None, list[int]]


class PionLRUPromptCache(LRUPromptCache):
    """In the place of mlx_lm.server.LRUPromptCache."""

    def __init__(self, backing: Backing, max_size: int = 10) -> None:
        super().__init__(max_size)
        self.backing = backing
        # Where the segments of the prompt end that is asked for next: others may share them.
        self.ends: Sequence[int] = ()
        self._timed: OrderedDict[int, tuple[float, int]] = OrderedDict()

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> Found:
        """Caches of the longest known prefix, and the tokens that are left to run, at least one."""
        cache, rest = self._local(model, tokens)
        try:
            cache, rest = self._longer(tokens, cache, rest)
            self._start(tokens, len(rest))
        except Exception:
            logger.exception("going on without Pion")
        return cache, rest

    def insert_cache(
        self,
        model: Any,
        tokens: list[int],
        prompt_cache: list[Cache],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Keep caches that hold `tokens`, in Pion too."""
        try:
            self._insert(tokens, prompt_cache, cache_type)
        except Exception:
            logger.exception("going on without Pion")
        if cache_type != BLOCK:
            super().insert_cache(model, tokens, prompt_cache, cache_type=cache_type)

    def _local(self, model: Any, tokens: list[int]) -> Found:
        """What this process has in memory; where that is the whole prompt, all but one token."""
        cache, rest = super().fetch_nearest_cache(model, tokens)
        if cache is not None and not rest:
            if can_trim_prompt_cache(cache):
                trim_prompt_cache(cache, 1)
                rest = tokens[-1:]
            else:
                cache, rest = super().fetch_nearest_cache(model, tokens[:-1])
                rest = rest + tokens[-1:]
        # Trimming a ChunkedKVCache that has moved does not trim all of it.
        if cache is not None and not _holds(cache, len(tokens) - len(rest)):
            return None, tokens
        return cache, rest

    def _longer(self, tokens: list[int], cache: list[Cache] | None, rest: list[int]) -> Found:
        """What Pion has, where that is more than the process has."""
        store, have = self._store(tokens), len(tokens) - len(rest)
        if store is None or len(rest) - 1 < LEAST_GAIN:
            return cache, rest
        start = time.perf_counter()
        match = store.match(tokens[:-1], self.ends)
        restored = store.restore(match, beyond=have)
        if restored is None:
            return cache, rest
        milliseconds = (time.perf_counter() - start) * 1e3
        logger.info(
            "Pion: %d of %d prompt tokens restored in %.0f ms",
            match.length,
            len(tokens),
            milliseconds,
        )
        return restored, tokens[match.length :]

    def _insert(self, tokens: list[int], caches: list[Cache], cache_type: str) -> None:
        store = self._store(tokens)
        if store is None:
            return
        started = self._timed.pop(hash(tuple(tokens)), None)
        if started is not None:
            store.prefilled(started[1], time.perf_counter() - started[0])
        # Nobody can name the end of an answer, so what is behind its last block stays here.
        store.insert(tokens, caches, tail=bool(started) or cache_type in ("system", "user"))

    def _start(self, tokens: list[int], count: int) -> None:
        """A prefill of `count` tokens begins. It is over when all but the last token are in."""
        self._timed[hash(tuple(tokens[:-1]))] = (time.perf_counter(), count)
        if len(self._timed) > MAX_TIMED:
            self._timed.popitem(last=False)

    def _store(self, tokens: list[int]) -> PrefixStore | None:
        """Where these tokens are looked up and stored. Not those of images, which have negative
        ids: a prefix could end inside one."""
        return self.backing.store() if min(tokens, default=-1) >= 0 else None


def _holds(caches: list[Cache], tokens: int) -> bool:
    """Whether no cache contradicts that."""
    return all(
        type(cache).__name__ not in KINDS or kind_of(cache).tokens(cache) in (tokens, None, 0)
        for cache in leaves(caches)
    )
