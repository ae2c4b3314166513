"""A snapshot: the shortest log that leads to a state, written while the state goes on changing.

`capture` takes references to what is immutable (extents, entries of keys), on the event loop, at a
cost that goes by their number and not by their bytes. The rest happens on a thread: the file is
written under another name, synced in steps, and renamed into place when all of it is on the disk;
so at any time one whole snapshot is there, or none.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
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
from pion_server.store.layer import Extent
from pion_server.store.prefixes import sides
from pion_server.store.recency import Stamp
from pion_server.store.schema import Schema
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

# About 5 ms.
SORTED_AT_ONCE = 10_000

Runs: TypeAlias = dict[int, tuple[Extent, ...]]


@dataclass(frozen=True, slots=True)
class Capture:
    """A state at one moment: when each unit was used, and what they hold, by reference."""

    used: dict[Unit, Stamp]
    sessions: dict[bytes, tuple[Schema, Runs]]
    prefixes: dict[bytes, m.RegisterPrefix]
    recurrent: dict[bytes, dict[int, bytes | memoryview]]
    keys: list[dict[bytes, Entry]]
    nbytes: int

    def mutations(self) -> Iterator[m.Mutation]:
        """What leads to the state from nothing, the least recently used unit first."""
        for unit in _in_order(self.used):
            match unit:
                case m.DropPrefix(namespace):
                    yield self.prefixes[namespace]
                    for sid in sides(namespace):
                        yield from self._rows(sid)
                    yield from self._states(namespace)
                case m.DropState(sid):
                    yield from self._states(sid)
                case m.DropSession(sid):
                    yield m.CreateSession(sid, self.sessions[sid][0])
                    yield from self._rows(sid)
                case m.DeleteKeys(db, keys):
                    for key in keys:
                        if entry := self.keys[db].get(key):
                            yield m.SetKey(db, key, entry.value, entry.expires_ms)

    def _states(self, sid: bytes) -> Iterator[m.StoreState]:
        for layer, blob in self.recurrent.get(sid, {}).items():
            yield m.StoreState(sid, layer, blob)

    def _rows(self, sid: bytes) -> Iterator[m.StoreRows]:
        group: list[m.RowBlock] = []
        size = 0
        for layer, extents in self.sessions[sid][1].items():
            for e in extents:
                if group and size + e.data.nbytes > RECORD_BYTES:
                    yield m.StoreRows(tuple(group))
                    group, size = [], 0
                group.append(m.RowBlock(sid, layer, e.start, e.end - e.start, e.data))
                size += e.data.nbytes
        if group:
            yield m.StoreRows(tuple(group))


def _in_order(used: dict[Unit, Stamp]) -> Iterator[Unit]:
    """The least recently used one first. In parts: sorted() lets no other thread run."""
    items = iter(used.items())
    parts = iter(lambda: sorted(islice(items, SORTED_AT_ONCE), key=itemgetter(1)), [])
    return (unit for unit, _ in merge(*parts, key=itemgetter(1)))


def capture(state: State) -> Capture:
    """The state as it is now."""
    return Capture(
        state.recency.stamps(),
        {sid: (session.schema, session.runs()) for sid, session in state.sessions.items()},
        {
            namespace: m.RegisterPrefix(
                namespace,
                prefix.keys.schema,
                prefix.values.schema,
                prefix.declared,
                prefix.fingerprint,
                prefix.blocks,
                parent=state.parent(namespace),
            )
            for namespace, prefix in state.prefixes.items()
        },
        {sid: dict(held.blobs) for sid, held in state.recurrent.items()},
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
                disk.release(fd)
                synced = size
        disk.sync(fd)
        disk.release(fd)
    finally:
        disk.close(fd)
    return size


def _pieces(view: Capture, salt: int) -> Iterator[list[Buffer]]:
    """The records, some at a time: about PIECE_BYTES, or one larger record."""
    piece: list[Buffer] = []
    size = 0
    for number, mutation in enumerate(chain(view.mutations(), [None]), start=1):
        record = encode(number, 0, mutation, salt)
        piece += record
        size += sum(map(len, record))
        if size >= PIECE_BYTES:
            yield piece
            piece, size = [], 0
    yield piece
