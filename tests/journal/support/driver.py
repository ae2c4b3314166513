"""A server's side of the journal, for tests: apply, append, wait; and what a state amounts to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from memory_disk import MemoryDisk

from pion_server.journal.disk import Disk
from pion_server.journal.journal import Journal
from pion_server.journal.recovery import recover
from pion_server.journal.wal import Policy
from pion_server.store.keys import DBS
from pion_server.store.mutations import Mutation, SetKey
from pion_server.store.store import Store

FOLDER = Path("/data")
PATIENCE = 20.0


class Driver:
    """A journal that was opened. `log` is every mutation that led to the state, in order; after
    each one, `acknowledged` says for how many of them a client has its reply."""

    def __init__(
        self,
        disk: Disk,
        log: Iterable[Mutation] = (),
        policy: Policy = "always",
        folder: Path = FOLDER,
    ) -> None:
        self.disk = disk
        self.journal, self.store, self.report = Journal.open(folder, policy, disk)
        self.log = list(log)[: self.journal.committed]
        self._changed = threading.Condition()
        self.journal.watch(self._wake)

    @property
    def acknowledged(self) -> int:
        return self.journal.committed

    def send(self, mutation: Mutation) -> None:
        """A write that does not wait for its reply. Raises what refuses it."""
        if (refusal := self.journal.refusal()) is not None:
            raise refusal
        self.store.apply(mutation)
        self.log.append(mutation)
        assert self.journal.append(mutation) == len(self.log)

    def settle(self) -> None:
        """Wait until everything that was sent is acknowledged, or never will be."""
        deadline = time.monotonic() + PATIENCE
        with self._changed:
            while not self._settled():
                assert time.monotonic() < deadline, "nothing happened for a long time"
                self._changed.wait(0.001)  # a disk that stops tells nobody

    def _settled(self) -> bool:
        done = self.journal.committed == len(self.log)
        return done or self.journal.is_final() or self._stopped()

    def _stopped(self) -> bool:
        return getattr(self.disk, "stopped", False)

    def do(self, *mutations: Mutation) -> None:
        for mutation in mutations:
            self.send(mutation)
            self.settle()

    def save(self, name: str | None = None) -> None:
        """Take a snapshot. Raises what it raises, and SystemExit where the disk stops meanwhile."""
        saved = self.journal.save(name)
        deadline = time.monotonic() + PATIENCE
        while not saved.done() and not self._stopped():
            assert time.monotonic() < deadline, "nothing happened for a long time"
            wait([saved], timeout=0.001)
        if not saved.done():
            raise SystemExit
        saved.result()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def state_of(store: Store) -> dict[str, Any]:
    """All that clients can get out of a state, by unit, and the order of eviction. Not
    prefill_ms, which a journal does not keep."""
    units: dict[Any, Any] = {}
    for namespace, prefix in store.prefixes.items():
        units["prefix", namespace] = (
            prefix.declared,
            prefix.fingerprint,
            prefix.sealed,
            prefix.blocks and (prefix.blocks.block_size, prefix.blocks.hashes.tolist()),
            store.parent(namespace),
        )
    for sid, session in store.sessions.items():
        units["session", sid] = (session.schema, session.unit, rows_of(session))
    for sid, held in store.recurrent.items():
        for layer, blob in held.blobs.items():
            units["state", sid, layer] = bytes(blob)
    for db in range(DBS):
        for key, entry in store.keys.entries(db).items():
            units["key", db, key] = (bytes(entry.value), entry.expires_ms)
    return {"units": units, "order": list(store.recency), "bytes": store.bytes_used}


def rows_of(session: Any) -> dict[tuple[int, int], bytes]:
    rows = {}
    for layer, held in session.filled.items():
        size = session.schema.layer(layer).row_bytes
        for run in held.runs():
            for i in range(run.end - run.start):
                rows[layer, run.start + i] = bytes(run.data[i * size : (i + 1) * size])
    return rows


def state_after(log: Iterable[Mutation]) -> dict[str, Any]:
    store = Store()
    for mutation in log:
        store.apply(mutation)
    return state_of(store)


def key(number: int, size: int = 1) -> SetKey:
    return SetKey(0, b"key %d" % number, b"%d" % (number % 10) * size)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for a long time"
        time.sleep(0.0005)


def reopened(disk: MemoryDisk, log: Sequence[Mutation]) -> None:
    """What the next process finds is all of `log`."""
    found = recover(disk.after(), FOLDER)
    assert found.report.damage == []
    assert state_of(found.store) == state_after(log)
