"""A snapshot: the shortest log that leads to a state, written while the state goes on changing.

`capture` takes references to what is immutable (all layers of a session, entries of keys), on the
event loop, at a cost that goes by how many sessions and keys there are, not by what is in them. The
rest happens on a thread: the file is written under another name, synced in steps, and renamed into
place when all of it is on the disk; so at any time one whole snapshot is there, or none.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from heapq import merge
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias

from pion_server.journal.disk import Buffer, Disk, write_all
from pion_server.journal.frames import FileHeader, FileKind
from pion_server.journal.records import encode
from pion_server.store import mutations as m
from pion_server.store.keys import DBS, Entry
from pion_server.store.layer import Layer
from pion_server.store.prefixes import sides
from pion_server.store.recency import Stamp
from pion_server.store.recurrent import Blob
from pion_server.store.session import Session
from pion_server.store.state import State
from pion_server.store.units import Unit

NAME = "snapshot"
UNFINISHED = "snapshot.tmp"
LINK = "snapshot.link"  # on its way to become another name of the snapshot

# Rows of one session that make a record. Larger saves nothing; smaller pieces keep a damaged spot,
# and the memory that recovery has in its hands at once, small.
RECORD_BYTES = 8 << 20
# Written at once: a call for each small key would be most of the cost.
PIECE_BYTES = 1 << 20
# Dirty pages are given to the disk in steps, or the log's own syncs would wait for all of them.
SYNC_BYTES = 32 << 20

# The event loop may have the interpreter in between: else it would get it as Python sees fit, and
# where other processes want the CPU that is a hundred milliseconds once in a while.
YIELD_RECORDS = 10
# About 5 ms.
SORTED_AT_ONCE = 10_000

# What a client has said about a namespace.
Said: TypeAlias = tuple[m.Declaration | None, bytes | None, m.BlockTable | None]


@dataclass(frozen=True, slots=True)
class Capture:
    """A state at one moment: when each unit was used, what it goes on from, and what is in it, by
    reference."""

    used: dict[Unit, Stamp]
    parents: dict[Unit, Unit]
    sessions: dict[bytes, Session]  # for what never changes: their schemas
    filled: dict[bytes, Mapping[int, Layer]]
    prefixes: dict[bytes, Said]
    recurrent: dict[bytes, Mapping[int, Blob]]
    keys: list[dict[bytes, Entry]]
    nbytes: int

    def mutations(self) -> Iterator[m.Mutation]:
        """What leads to the state from nothing, the least recently used unit first."""
        for unit in _in_order(self.used):
            match unit:
                case m.DropPrefix(namespace):
                    yield self._registration(unit)
                    for sid in sides(namespace):
                        yield from self._rows(sid)
                    yield from self._states(namespace)
                case m.DropState(sid):
                    yield from self._states(sid)
                case m.DropSession(sid):
                    yield m.CreateSession(sid, self.sessions[sid].schema)
                    yield from self._rows(sid)
                case m.DeleteKeys(db, keys):
                    for key in keys:
                        if entry := self.keys[db].get(key):
                            yield m.SetKey(db, key, entry.value, entry.expires_ms)

    def _registration(self, unit: m.DropPrefix) -> m.RegisterPrefix:
        keys, values = (self.sessions[sid].schema for sid in sides(unit.namespace))
        declared, fingerprint, blocks = self.prefixes[unit.namespace]
        above = self.parents.get(unit)
        parent = above.namespace if isinstance(above, m.DropPrefix) else None
        return m.RegisterPrefix(
            unit.namespace, keys, values, declared, fingerprint, blocks, parent=parent
        )

    def _states(self, sid: bytes) -> Iterator[m.StoreState]:
        for layer, blob in self.recurrent.get(sid, {}).items():
            yield m.StoreState(sid, layer, blob)

    def _rows(self, sid: bytes) -> Iterator[m.StoreRows]:
        group: list[m.RowBlock] = []
        size = 0
        for number, layer in self.filled[sid].items():
            for e in layer.runs():
                if group and size + e.data.nbytes > RECORD_BYTES:
                    yield m.StoreRows(tuple(group))
                    group, size = [], 0
                group.append(m.RowBlock(sid, number, e.start, e.end - e.start, e.data))
                size += e.data.nbytes
        if group:
            yield m.StoreRows(tuple(group))


def _in_order(used: dict[Unit, Stamp]) -> Iterator[Unit]:
    """The least recently used one first. In parts: sorted() lets no other thread run."""
    items = iter(used.items())
    parts = iter(lambda: sorted(islice(items, SORTED_AT_ONCE), key=itemgetter(1)), [])
    return (unit for unit, _ in merge(*parts, key=itemgetter(1)))


def capture(state: State) -> Capture:
    """The state as it is now: some 10 ms for 40,000 sessions, however much is in them."""
    return Capture(
        state.recency.stamps(),
        state.recency.parents(),
        state.sessions.copy(),
        {sid: session.filled for sid, session in state.sessions.items()},
        {
            namespace: (prefix.declared, prefix.fingerprint, prefix.blocks)
            for namespace, prefix in state.prefixes.items()
        },
        {sid: held.blobs for sid, held in state.recurrent.items()},
        [state.keys.entries(db) for db in range(DBS)],
        state.bytes_used,
    )


def write(disk: Disk, folder: Path, view: Capture, covers: int, go_on: Callable[[], None]) -> int:
    """Make the snapshot of `folder` anew from `view`, the state after record `covers`; returns its
    bytes. `go_on` is called between pieces, and gives up by raising. Raises OSError; then, and
    also where the process dies, the snapshot that was there is still there."""
    unfinished = folder / UNFINISHED
    try:
        size = _write_file(disk, unfinished, view, covers, go_on)
        disk.rename(unfinished, folder / NAME)
    except BaseException:
        with suppress(OSError):
            disk.unlink(unfinished)
        raise
    disk.sync_folder(folder)
    return size


def export(disk: Disk, folder: Path, target: Path) -> None:
    """Make `target` another name of the snapshot, in the place of a file that is there. Raises
    OSError."""
    link = folder / LINK
    with suppress(FileNotFoundError):
        disk.unlink(link)
    disk.link(folder / NAME, link)
    disk.rename(link, target)
    disk.sync_folder(folder)


def _write_file(
    disk: Disk, path: Path, view: Capture, covers: int, go_on: Callable[[], None]
) -> int:
    """Write and sync everything; returns how many bytes."""
    fd = disk.create(path)
    try:
        header = FileHeader(FileKind.SNAPSHOT, covers, secrets.randbits(64))
        size = synced = write_all(disk, fd, [header.pack()])
        for piece in _pieces(view, header.salt):
            go_on()
            size += write_all(disk, fd, piece)
            if size - synced >= SYNC_BYTES:
                disk.sync(fd)
                disk.release(fd, synced, size)
                synced = size
        disk.sync(fd)
        disk.release(fd, synced, size)
    finally:
        disk.close(fd)
    return size


def _pieces(view: Capture, salt: int) -> Iterator[list[Buffer]]:
    """The records, some at a time: about PIECE_BYTES, or one larger record."""
    piece: list[Buffer] = []
    size = 0
    for number, mutation in enumerate(chain(view.mutations(), [None]), start=1):
        if number % YIELD_RECORDS == 0:
            time.sleep(0)
        record = encode(number, 0, mutation, salt)
        piece += record
        size += sum(map(len, record))
        if size >= PIECE_BYTES:
            yield piece
            piece, size = [], 0
    yield piece
