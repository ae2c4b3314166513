"""mlx_lm.server with the attention of every prompt, but for its last tokens, at a pion-server.

python stage2_server.py PION_PORT <options of mlx_lm.server>
"""

# ruff: noqa: E402 - a fast BLAS must be in the process before mlx is
from __future__ import annotations

import sys
from typing import Any

from pion_vllm_mlx import load_fast_blas

load_fast_blas()

from mlx_lm import server
from pion_vllm_mlx import (
    PionPromptCache,
    install_pion_attention_patch,
    make_pion_prompt_cache,
)

LAST = 8
PORT = int(sys.argv.pop(1))


class Provider(server.ModelProvider):
    """Tells which model was loaded."""

    loaded: Any = None

    def _load(self, *arguments: Any, **options: Any) -> Any:
        found = super()._load(*arguments, **options)
        Provider.loaded = self.model
        return found


class PromptCache(server.LRUPromptCache):
    """Every look-up is a hit, at the pion-server."""

    pion: PionPromptCache | None = None

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> Any:
        if self.pion is None:
            self.pion = PionPromptCache(Provider.loaded, port=PORT, stage2=True, timeout=60)
        prefix, name = tokens[:-LAST], self.pion.make_namespace(str(tokens[:-LAST]))
        self.pion.get_or_prefill(prefix, namespace=name)
        caches = make_pion_prompt_cache(Provider.loaded, name, self.pion, len(prefix))
        return caches, tokens[-LAST:]


install_pion_attention_patch()
server.ModelProvider, server.LRUPromptCache = Provider, PromptCache
server.main()
