"""`PionL2Adapter`: LMCache's multiprocess mode on an engine.

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "pion_lmcache",
        "class_name": "PionL2Adapter", "adapter_params": {"url": "pion://127.0.0.1:1974"}}'

LMCache submits tasks from two threads, sleeps on an event fd for each kind, and waits for ever: so
every task ends with a result, that of a failure being "nothing", and the result is there before the
fd is signalled. The keys of a group of layers do not tell its layout, so that is compared on every
load, and another one is a miss; deployments whose layouts differ should have a `prefix` each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj

from pion_lmcache.engine import Chunk, Engine, Outcome
from pion_lmcache.greeting import greet
from pion_lmcache.lanes import Lanes
from pion_lmcache.layout import fingerprint, layout_of, word
from pion_lmcache.options import parse
from pion_lmcache.tasks import Tasks
from pion_server.client import PionError

logger = init_logger("pion_lmcache")


class PionL2Adapter(L2AdapterInterface):
    """One server as the second level; the options are those of the connector (options.py).

    Raises ValueError or PionError on a configuration that cannot work, after a line in the log.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        super().__init__()
        try:
            options = parse(params, "adapter_params")
            self.engine = Engine(options)
            # Only a load or a store knows how wide rows are; any codec takes rows this wide.
            greet(self.engine, options.prefix, options.vquant, 256)
        except (ValueError, PionError) as error:
            logger.error("Pion is NOT in use: %s", error)
            raise
        self._prefix = options.prefix
        self._codec = options.vquant
        self._lanes = Lanes(options.connections)
        self._stores = Tasks(lambda keys: L2StoreResult(False, 0))
        self._lookups = Tasks(Bitmap)
        self._loads = Tasks(Bitmap)
        self._sizes: dict[int, int] = {}  # bytes of an object of each group
        self._closed = False

    # -- store -----------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return self._stores.fd

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._stores.add(len(keys), self._lanes.move(self._store, keys, objects))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.pop_all()

    def _store(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> L2StoreResult:
        usable = self._chunks(keys, objects)
        outcomes = self.engine.put([chunk for _, chunk in usable])
        stored = [
            at
            for (at, _), outcome in zip(usable, outcomes, strict=True)
            if outcome is Outcome.STORED
        ]
        sizes = [objects[at].get_size() for at in stored]
        groups = [keys[at].object_group_id for at in stored]
        self._sizes.update(zip(groups, sizes, strict=True))
        if stored:
            self._notify_keys_stored([keys[at] for at in stored], sizes)
        whole = len(usable) == len(keys) and Outcome.FAILED not in outcomes
        return L2StoreResult(whole, sum(sizes))

    # -- look-up ---------------------------------------------------------------------------------

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.fd

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        return self._lookups.add(len(keys), self._lanes.ask(self._lookup, keys))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing to do: what the server evicts in between makes a load a miss, nothing worse."""

    def _lookup(self, keys: Sequence[ObjectKey]) -> Bitmap:
        present = self.engine.present([self._name(key) for key in keys])
        return self._found(keys, [at for at, there in enumerate(present) if there])

    # -- load ------------------------------------------------------------------------------------

    def get_load_event_fd(self) -> int:
        return self._loads.fd

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._loads.add(len(keys), self._lanes.move(self._load, keys, objects))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.pop(task_id)

    def _load(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> Bitmap:
        usable = self._chunks(keys, objects)
        filled = self.engine.get([chunk for _, chunk in usable])
        return self._found(keys, [at for (at, _), n in zip(usable, filled, strict=True) if n])

    # -- the rest --------------------------------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete objects, and wait until it is done."""
        if self.engine.drop([self._name(key) for key in keys]):
            sizes = [self._sizes.get(key.object_group_id, 0) for key in keys]
            self._notify_keys_deleted(keys, sizes)

    def report_status(self) -> dict[str, Any]:
        """What `/status` shows of this adapter."""
        return {
            "is_healthy": not self._closed,
            "type": "PionL2Adapter",
            "server": str(self.engine.remote),
            "away": self.engine.remote.away,
            "counts": self.engine.counts.snapshot(),
            "errors": self.engine.remote.errors.snapshot(),
        }

    def close(self) -> None:
        """Whoever waits for a task gets its failure; what runs ends by its deadline, so that no
        object is touched afterwards."""
        self._closed = True
        self.engine.close()
        self._lanes.close()
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()

    def _found(self, keys: Sequence[ObjectKey], positions: Sequence[int]) -> Bitmap:
        found = Bitmap(len(keys))
        for at in positions:
            found.set(at)
        if positions:
            self._notify_keys_accessed([keys[at] for at in positions])
        return found

    def _name(self, key: ObjectKey) -> bytes:
        """LMCache's own form of the key: @ is in no part of it."""
        salt = f"@{key.cache_salt}" if key.cache_salt else ""
        where = f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id:x}"
        return f"{self._prefix}{where}@{key.chunk_hash.hex()}{salt}".encode()

    def _chunks(
        self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]
    ) -> list[tuple[int, Chunk]]:
        """The objects that can be stored, each with its position."""
        chunks = []
        for at, (key, obj) in enumerate(zip(keys, objects, strict=True)):
            try:
                chunks.append((at, self._chunk(key, obj)))
            except ValueError as error:
                self.engine.remote.note(error)
        return chunks

    def _chunk(self, key: ObjectKey, obj: MemoryObj) -> Chunk:
        meta = obj.metadata
        shapes, dtypes = (meta.shapes or [meta.shape]), (meta.dtypes or [meta.dtype])
        data = memoryview(obj.byte_array).cast("B")
        layout = layout_of(len(data), shapes, dtypes, self._codec)
        identity = fingerprint(word(shapes, dtypes), self._codec or "exact")
        return Chunk(self._name(key), data, layout, identity, len(data))
