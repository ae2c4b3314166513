"""A real RemoteBackend of LMCache's, with the event loop and the memory that an engine gives it."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

from integrations.lmcache.tests import engines

# For things that happen at once unless something is broken.
PATIENCE = 30.0
_numbers = itertools.count(1)


class Backend:
    """One backend; `connector` is the one under LMCache's instrumentation, or None."""

    def __init__(
        self,
        settings: dict[str, Any],
        metadata: LMCacheMetadata | None = None,
        gigabytes: float = 0.02,
    ) -> None:
        self.metadata = metadata or engines.metadata()
        config = engines.config(settings, gigabytes)
        self.local = LocalCPUBackend(config, self.metadata, dst_device="cpu")
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        plugins = config.remote_storage_plugins
        self.remote = RemoteBackend(
            config,
            self.metadata,
            self.loop,
            self.local,
            "cpu",
            plugin_name=plugins[0] if plugins else None,
        )
        wrapped = self.remote.connection
        self.connector: Any = wrapped.getWrappedConnector() if wrapped else None

    def chunk(self, tokens: int | None = None) -> MemoryObj:
        """A new chunk of random bits."""
        shapes, dtypes = self.metadata.get_shapes(tokens), self.metadata.get_dtypes()
        fmt = self.connector.meta_fmt
        obj = self.local.allocate(shapes, dtypes, fmt, busy_loop=False)
        bits = torch.randint(0, 256, (obj.get_size(),), dtype=torch.uint8)
        obj.raw_data[: obj.get_size()].copy_(bits)
        return obj

    def chunks(self, count: int) -> list[MemoryObj]:
        return [self.chunk() for _ in range(count)]

    def keys(self, count: int) -> list[CacheEngineKey]:
        """Keys that nobody had before."""
        first = next(_numbers) << 32
        dtype = self.metadata.kv_dtype
        return [CacheEngineKey("a/model", 1, 0, first + i, dtype) for i in range(count)]

    def put(self, keys: Sequence[CacheEngineKey], objects: Sequence[MemoryObj]) -> None:
        """Store, and wait for the end of it."""
        done = threading.Semaphore(0)
        self.remote.batched_submit_put_task(
            list(keys), list(objects), on_complete_callback=lambda key: done.release()
        )
        for _ in keys:
            assert done.acquire(timeout=PATIENCE), "a put did not end"

    def stored(self, count: int) -> tuple[list[CacheEngineKey], list[bytes]]:
        """So many new chunks, stored and freed: their keys and bytes."""
        keys, objects = self.keys(count), self.chunks(count)
        self.put(keys, objects)
        contents = [bits(obj) for obj in objects]
        release(objects)
        return keys, contents

    def get(self, keys: Sequence[CacheEngineKey]) -> list[bytes | None]:
        """The bytes of each chunk, None for a miss."""
        found = self.remote.batched_get_blocking(list(keys))
        contents = [obj and bits(obj) for obj in found]
        release(found)
        return contents

    def call(self, coroutine: Any) -> Any:
        """Run a coroutine of the connector as LMCache does."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE)

    @property
    def in_use(self) -> int:
        """Bytes of LMCache's memory that somebody holds."""
        return int(self.local.memory_allocator.pin_allocator.total_allocated_size)

    def close(self) -> None:
        """Close our connector, and stop the loop."""
        if self.connector is not None:
            self.remote.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self.loop.close()


def bits(obj: MemoryObj) -> bytes:
    return bytes(memoryview(obj.byte_array).cast("B"))


def release(objects: Sequence[MemoryObj | None]) -> None:
    for obj in objects:
        if obj is not None:
            obj.ref_count_down()
