"""The PrefixStore of the model that mlx_lm.server has loaded.

The server may load another model at any time; prefixes of the old one stay in Pion, where they wait
for the next process that runs it.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

from pion_vllm_mlx.prefix_store import PrefixStore

logger = logging.getLogger(__name__)


class Backing:
    """Use from the generation thread; `provider` is mlx_lm.server's ModelProvider."""

    def __init__(self, url: str, timeout: float) -> None:
        self._url = url
        self._timeout = timeout
        self._key: Any = None
        self._store: PrefixStore | None = None
        self.provider: Any = None

    def store(self) -> PrefixStore | None:
        """The store of the model that is loaded, None where Pion cannot serve it."""
        key = self.provider.model_key
        if key != self._key:
            self.close()
            self._key = key
            self._store = self._open() if key is not None else None
        return self._store

    def close(self) -> None:
        """Finish what is being stored."""
        if self._store is not None:
            self._store.close()
        self._store = self._key = None

    def _open(self) -> PrefixStore | None:
        arguments = self.provider.cli_args
        if reason := self._obstacle():
            logger.warning("Pion is not used: %s", reason)
            return None
        try:
            return PrefixStore(
                # A proxy, since the server drops a model before it loads the next one.
                weakref.proxy(self.provider.model),
                self._url,
                timeout=self._timeout,
                kv_bits=getattr(arguments, "kv_bits", None),
                kv_group_size=getattr(arguments, "kv_group_size", 64),
            )
        except Exception as error:
            logger.warning("Pion is not used for this model: %s: %s", type(error).__name__, error)
            return None

    def _obstacle(self) -> str | None:
        """Why the caches of this configuration are not those of one model at every length."""
        arguments = self.provider.cli_args
        quantized = getattr(arguments, "kv_bits", None) is not None
        obstacles = {
            "a draft model has caches of its own": self.provider.draft_model is not None,
            "the processes of a distributed model would have to agree on every prefix": (
                self.provider.is_distributed
            ),
            "with --kv-bits, only --quantized-kv-start 0 makes caches that can be cut anywhere": (
                quantized and arguments.quantized_kv_start > 0
            ),
        }
        return next((reason for reason, holds in obstacles.items() if holds), None)
