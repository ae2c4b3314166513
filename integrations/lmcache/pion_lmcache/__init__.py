"""LMCache on Pion: chunks that one vLLM stored are a hit for every other.

    remote_storage_plugins: ["pion"]
    extra_config:
      remote_storage_plugin.pion.module_path: pion_lmcache
      remote_storage_plugin.pion.class_name: PionConnectorAdapter
      remote_storage_plugin.pion.url: pion://127.0.0.1:1974

`PionConnectorAdapter` is LMCache's remote connector, `PionL2Adapter` the same for its
multiprocess mode, `PionStore` a small interface to rows without LMCache. Only the first two import
lmcache, and only when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pion_lmcache.store import PionStore

if TYPE_CHECKING:
    from pion_lmcache.adapter import PionConnectorAdapter
    from pion_lmcache.connector import PionConnector
    from pion_lmcache.l2 import PionL2Adapter

    LMCacheRemoteBackend = PionConnectorAdapter

__all__ = [
    "LMCacheRemoteBackend",
    "PionConnector",
    "PionConnectorAdapter",
    "PionL2Adapter",
    "PionStore",
]

_LAZY = {
    "LMCacheRemoteBackend": ("pion_lmcache.adapter", "PionConnectorAdapter"),
    "PionConnector": ("pion_lmcache.connector", "PionConnector"),
    "PionConnectorAdapter": ("pion_lmcache.adapter", "PionConnectorAdapter"),
    "PionL2Adapter": ("pion_lmcache.l2", "PionL2Adapter"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'pion_lmcache' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    return getattr(import_module(module), attribute)
