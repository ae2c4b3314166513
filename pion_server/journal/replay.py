"""Recovery's way to the state: mutations in order, some of which may be damaged.

A unit of more than one record is lost with any of them: a session, with its namespace; the two keys
of a chunk. It stays out of the state, whatever the log says about it afterwards, until a record
drops it, for only then is all of it known again. So the state is that which was acknowledged, less
what is lost: a unit may be missing, never be different. Other keys, and recurrent states, are set
as a whole, so one that is lost is back with the next record that sets it.
"""

from __future__ import annotations

from pion_server.store import mutations as m
from pion_server.store.prefixes import sides
from pion_server.store.store import Store
from pion_server.store.units import key_unit


class Replay:
    """A state in the making. `blind`: there may have been units that nothing tells of, so each one
    that is not in the state is lost."""

    def __init__(self) -> None:
        self.store = Store()
        self.blind = False
        self._lost: dict[bytes, m.DropPrefix | m.DropSession] = {}  # sid -> the unit it went with
        self._lost_chunks: set[m.DeleteKeys] = set()

    def apply(self, mutation: m.Mutation) -> None:
        """Carry out what of the mutation is not about something lost. Raises PionError, with the
        state as it was, where it does not fit the state."""
        match mutation:
            case m.CreateSession(sid) if self._is_lost(sid):
                return
            case m.StoreRows(blocks):
                kept = tuple(block for block in blocks if not self._is_lost(block.sid))
                mutation = m.StoreRows(kept)
            case m.RegisterPrefix(namespace) if any(map(self._is_lost, sides(namespace))):
                self._lose_prefix(namespace)
                return
            case m.SetKey(db, key) if self._is_of_lost_chunk(db, key):
                return
            case m.DropPrefix() | m.DropSession() | m.DeleteKeys() | m.FlushDb():
                self._drop_lost(mutation)
        self.store.apply(mutation)

    def lose(self, mutation: m.Mutation) -> None:
        """Take what the mutation was about out of the state."""
        match mutation:
            case m.CreateSession(sid) | m.DropSession(sid):
                self._lose_session(sid)
            case m.StoreRows(blocks):
                for block in blocks:
                    self._lose_session(block.sid)
            case m.RegisterPrefix(namespace) | m.DropPrefix(namespace):
                self._lose_prefix(namespace)
            case m.StoreState(sid, layer):
                self.store.apply(m.DropState(sid, layer))
            case m.SetKey(db, key) | m.SetExpiry(db, key):
                unit = key_unit(db, key)
                self.store.apply(unit)
                if len(unit.keys) > 1:
                    self._lost_chunks.add(unit)
            case m.DropState() | m.DeleteKeys() | m.FlushDb():
                pass  # about nothing that would be there afterwards

    def forget(self) -> None:
        """Nothing up to here can be trusted to be current."""
        self.store = Store()
        self.blind = True
        self._lost = {}
        self._lost_chunks = set()

    def _is_lost(self, sid: bytes) -> bool:
        return sid in self._lost or (self.blind and sid not in self.store.sessions)

    def _is_of_lost_chunk(self, db: int, key: bytes) -> bool:
        if not (self._lost_chunks or self.blind):
            return False
        unit = key_unit(db, key)
        lost = unit in self._lost_chunks or (self.blind and unit not in self.store.recency)
        return lost and len(unit.keys) > 1

    def _drop_lost(self, mutation: m.DropPrefix | m.DropSession | m.DeleteKeys | m.FlushDb) -> None:
        """What the mutation drops is not lost any more: it is known to be gone."""
        match mutation:
            case m.DeleteKeys(db, keys):
                gone = {
                    unit for unit in self._lost_chunks if unit.db == db and {*unit.keys} <= {*keys}
                }
                self._lost_chunks -= gone
            case m.FlushDb(db):
                self._lost_chunks = {
                    unit for unit in self._lost_chunks if db not in (None, unit.db)
                }
            case m.DropPrefix(namespace) if self.blind or mutation in self._lost.values():
                # Its states are there without it, and go with it.
                self.store.apply(m.DropState(namespace))
        self._lost = {sid: unit for sid, unit in self._lost.items() if unit != mutation}

    def _lose_session(self, sid: bytes) -> None:
        session = self.store.sessions.get(sid)
        unit = session.unit if session else self._lost.get(sid, m.DropSession(sid))
        if isinstance(unit, m.DropPrefix):
            self._lose_prefix(unit.namespace)
        else:
            self.store.apply(unit)
            self._lost[sid] = unit

    def _lose_prefix(self, namespace: bytes) -> None:
        unit = m.DropPrefix(namespace)
        self.store.apply(unit)
        for sid in sides(namespace):
            self.store.apply(m.DropSession(sid))  # it may be there without the namespace
            self._lost[sid] = unit
