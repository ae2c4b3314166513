"""A real LMCacheEngine on CPU, whose paged GPU cache is one tensor kv[2, layers, tokens, width].

LMCache ships a connector for engines without a GPU, but that one copies nothing.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from typing import Any

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ.setdefault("PYTHONHASHSEED", "0")

import torch
from lmcache.v1.cache_engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata

LAYERS, HEADS, HEAD_SIZE, CHUNK = 4, 2, 16, 64
WIDTH = HEADS * HEAD_SIZE


class CpuCache(GPUConnectorInterface):
    """Copies chunks from and to the tensor that is passed as `kv`."""

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        memory_obj.tensor.copy_(kwargs["kv"][:, :, start:end])

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        kwargs["kv"][:, :, start:end].copy_(memory_obj.tensor)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(obj, start, end, **kwargs)

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(obj, start, end, **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, LAYERS, num_tokens, WIDTH])


def plugin(url: str, **options: Any) -> dict[str, Any]:
    """The configuration that names our connector."""
    own = "remote_storage_plugin.pion."
    extra = {own + "module_path": "pion_lmcache", own + "class_name": "PionConnectorAdapter"}
    extra |= {own + "url": url} | {own + name: value for name, value in options.items()}
    return {"remote_storage_plugins": ["pion"], "extra_config": extra}


def stock(url: str, **extra: Any) -> dict[str, Any]:
    """The configuration that names a client of LMCache's own."""
    return {"remote_url": url, "extra_config": {"save_chunk_meta": False, **extra}}


def metadata(dtype: torch.dtype = torch.bfloat16, model: str = "a/model") -> LMCacheMetadata:
    shape = (LAYERS, 2, CHUNK, HEADS, HEAD_SIZE)
    return LMCacheMetadata(model, 1, 1, 0, 0, dtype, shape, chunk_size=CHUNK, role="worker")


def config(settings: dict[str, Any], gigabytes: float = 0.05) -> LMCacheEngineConfig:
    return LMCacheEngineConfig.from_dict(
        {
            "chunk_size": CHUNK,
            "local_cpu": False,
            "max_local_cpu_size": gigabytes,
            "remote_serde": "naive",
            "save_unfull_chunk": False,
            "blocking_timeout_secs": 10,
            **settings,
        }
    )


def engine(settings: dict[str, Any], model: str = "a/model") -> LMCacheEngine:
    """A new engine; LMCacheEngineBuilder.destroy(engine.name) closes it."""
    name = uuid.uuid4().hex
    made = LMCacheEngineBuilder.get_or_create(
        name,
        config({**settings, "lmcache_instance_id": name}),
        metadata(model=model),
        CpuCache(),
        lambda tensor, source: None,
        lambda value, source: value,
    )
    made.name = name
    made.post_init()
    return made


def random_kv(tokens: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random bits, NaN of every kind among them."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, LAYERS, tokens, WIDTH * dtype.itemsize)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)


def digest(kv: torch.Tensor) -> str:
    return hashlib.sha256(kv.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
