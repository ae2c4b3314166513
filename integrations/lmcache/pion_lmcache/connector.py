"""`PionConnector`: LMCache's RemoteConnector on an engine.

LMCache calls the coroutines on its event loop and the `_sync` methods, `batched_contains` among
them, on any thread. Transfers run on threads of our own. A coroutine may be cancelled at any time
(LMCache does so after blocking_timeout_secs), but never the thread under it: so a transfer holds a
reference to each MemoryObj of its own until its last byte is in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from pion_lmcache.engine import Chunk, Engine
from pion_lmcache.lanes import Lanes
from pion_lmcache.layout import Layout, fingerprint, layout_of, word
from pion_lmcache.options import Options
from pion_lmcache.remote import Unavailable

# Of blocking_timeout_secs, after which LMCache calls a whole batch a miss: what is left is for the
# way through its event loop.
SHARE_OF_PATIENCE = 0.9


class PionConnector(RemoteConnector):
    """Chunks of one model and layout: both are part of every key.

    `prefix` is what the keys start with, `layout` that of a full chunk. Raises ValueError where the
    chunks cannot be stored with the options given, PionError on a URL that is none.
    """

    def __init__(
        self, options: Options, config: LMCacheEngineConfig, backend: LocalCPUBackend
    ) -> None:
        super().__init__(config, backend.metadata)
        self._backend = backend
        self._codec = options.vquant
        # The last piece of a batch may start so late.
        self._patience = SHARE_OF_PATIENCE * config.blocking_timeout_secs - options.timeout
        if self._patience <= 0:
            raise ValueError(
                f"timeout {options.timeout:g} must be well below LMCache's blocking_timeout_secs "
                f"({config.blocking_timeout_secs}), since a batch is several answers"
            )
        self.layout = self._layout(self.full_chunk_size_bytes)
        parts = [word(self.meta_shapes, self.meta_dtypes), options.vquant or "exact"]
        self.prefix = f"{options.prefix}{'-'.join(parts)}/"
        self._fingerprint = fingerprint(*parts)
        self.engine = Engine(options)
        self._lanes = Lanes(options.connections)
        self._end_before(backend)

    # -- is it there -----------------------------------------------------------------------------

    async def exists(self, key: CacheEngineKey) -> bool:
        return await asyncio.wrap_future(self._lanes.ask(self.exists_sync, key))

    def exists_sync(self, key: CacheEngineKey) -> bool:
        return self.engine.match([self._name(key)]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: list[CacheEngineKey]) -> int:
        return self.engine.match([self._name(key) for key in keys])

    async def batched_async_contains(
        self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False
    ) -> int:
        return await asyncio.wrap_future(self._lanes.ask(self.batched_contains, keys))

    # -- get -------------------------------------------------------------------------------------

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        (found,) = await self.batched_get([key])
        return found

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        objects = self._allocated(len(keys))
        chunks = [self._chunk(key, obj) for key, obj in zip(keys, objects, strict=False)]
        until = time.monotonic() + self._patience
        job = self._lanes.move(self.engine.get, chunks, until)
        try:
            filled = await asyncio.wrap_future(job)
        except BaseException:
            job.add_done_callback(_releasing(objects))
            raise
        found = [self._settled(*pair) for pair in zip(objects, filled, strict=True)]
        return found + [None] * (len(keys) - len(found))

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey]
    ) -> list[MemoryObj]:
        found = await self.batched_get(keys)
        run = found.index(None) if None in found else len(found)
        for late in found[run:]:
            if late is not None:
                late.ref_count_down()
        return found[:run]

    def _allocated(self, count: int) -> list[MemoryObj]:
        """Buffers to receive into, fewer where memory is short."""
        objects = []
        for _ in range(count):
            obj = self._backend.allocate(
                self.meta_shapes, self.meta_dtypes, self.meta_fmt, busy_loop=False
            )
            if obj is None:
                break
            objects.append(obj)
        return objects

    def _settled(self, obj: MemoryObj, nbytes: int) -> MemoryObj | None:
        if nbytes:
            return self.reshape_partial_chunk(obj, nbytes)
        obj.ref_count_down()
        return None

    # -- put -------------------------------------------------------------------------------------

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(
        self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj]
    ) -> None:
        chunks = [self._chunk(key, obj) for key, obj in zip(keys, memory_objs, strict=True)]
        job = self._lanes.move(self.engine.put, chunks)
        for obj in memory_objs:
            obj.ref_count_up()
        job.add_done_callback(_releasing(memory_objs))
        await asyncio.wrap_future(job)

    # -- the rest --------------------------------------------------------------------------------

    def remove_sync(self, key: CacheEngineKey) -> bool:
        return self.engine.drop([self._name(key)]) == 1

    async def list(self) -> list[str]:
        """Nothing: keys are not listed."""
        return []

    def support_ping(self) -> bool:
        return True

    async def ping(self) -> int:
        """0 where the server is well, else 1."""
        return await asyncio.wrap_future(self._lanes.ask(self._ping))

    async def close(self) -> None:
        await asyncio.to_thread(self.shut)

    def shut(self) -> None:
        """What is queued is cancelled, what runs ends by its deadline."""
        self.engine.close()
        self._lanes.close()

    def _end_before(self, backend: LocalCPUBackend) -> None:
        """LMCache frees the chunks' memory first and closes its connectors afterwards; a transfer
        that still runs then would take the process down."""
        free_memory = backend.close

        def close() -> None:
            self.shut()
            free_memory()

        backend.close = close

    def _ping(self) -> int:
        try:
            self.engine.remote.ping()
        except Unavailable:
            return 1
        return 0

    def _name(self, key: CacheEngineKey) -> bytes:
        return f"{self.prefix}{key.to_string()}".encode()

    def _chunk(self, key: CacheEngineKey, obj: MemoryObj) -> Chunk:
        data = memoryview(obj.byte_array).cast("B")
        layout = self._layout(len(data))
        return Chunk(self._name(key), data, layout, self._fingerprint, self.single_token_size)

    def _layout(self, nbytes: int) -> Layout:
        return layout_of(nbytes, self.meta_shapes, self.meta_dtypes, self._codec)


def _releasing(objects: Sequence[MemoryObj]) -> Callable[[Future[Any]], None]:
    def release(_: Future[Any]) -> None:
        for obj in objects:
            obj.ref_count_down()

    return release
