"""LMCache's multiprocess mode without its processes: a real StorageManager with one L2 adapter."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager

SHAPE = torch.Size([2, 4, 64, 32])
LAYOUT = MemoryLayoutDesc([SHAPE], [torch.bfloat16])
PATIENCE = 30.0


def plugin(url: str, **options: Any) -> dict[str, Any]:
    """The JSON that names our adapter."""
    return {
        "type": "plugin",
        "module_path": "pion_lmcache",
        "class_name": "PionL2Adapter",
        "adapter_params": {"url": url, **options},
    }


def resp(url: str) -> dict[str, Any]:
    """The JSON that names LMCache's own client."""
    host, _, port = url.removeprefix("pion://").partition(":")
    return {"type": "resp", "host": host, "port": int(port)}


def valkey(url: str) -> dict[str, Any]:
    """The JSON that names LMCache's own client on the library of Valkey's makers."""
    return {"type": "valkey", "startup_nodes": url.removeprefix("pion://")}


def manager(adapter: dict[str, Any]) -> StorageManager:
    """A StorageManager with 32 MB of memory and this adapter behind it."""
    memory = L1MemoryManagerConfig(size_in_bytes=32 << 20, use_lazy=False, shm_name="")
    namespace = argparse.Namespace(l2_adapter=[json.dumps(adapter)])
    return StorageManager(
        StorageManagerConfig(
            L1ManagerConfig(memory),
            EvictionConfig("LRU"),
            parse_args_to_l2_adapters_config(namespace),
        )
    )


def keys(count: int, label: str = "chunk") -> list[ObjectKey]:
    names = (hashlib.blake2b(f"{label} {i}".encode(), digest_size=32) for i in range(count))
    return [ObjectKey(name.digest(), "a/model", 0x01000100) for name in names]


def write(store: StorageManager, names: Sequence[ObjectKey], kv: torch.Tensor) -> None:
    """Put chunks, the first dimension of `kv`, into memory; they go on to L2 by themselves."""
    reserved = store.reserve_write(list(names), LAYOUT)
    for name, chunk in zip(names, kv, strict=True):
        reserved[name].tensor.copy_(chunk)
    store.finish_write(list(names))


def read(store: StorageManager, names: Sequence[ObjectKey]) -> list[torch.Tensor]:
    """The leading chunks that are there, prefetched from L2."""
    row = GroupedObjectKeys(list(names), 0, LAYOUT, -1)
    handle = store.submit_prefetch_task(PrefetchTaskSpec([row]))
    assert store.wait_prefetch_status(handle, PATIENCE), "the prefetch does not end"
    result = store.query_prefetch_status(handle)
    found = list(names)[: result.hit_cells[0].popcount()]
    if not found:
        return []
    with store.read_prefetched_results(found) as objects:
        chunks = [obj.tensor.clone() for obj in objects]
    store.finish_read_prefetched(found)
    return chunks
