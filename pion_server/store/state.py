"""The tables of the state, and the counts that go with them.

Only the rules of `Store.apply` (rules.py) change them.
"""

from __future__ import annotations

from pion_server.store.keys import DBS, Keys
from pion_server.store.mutations import DropPrefix, DropSession, DropState
from pion_server.store.prefixes import Prefix
from pion_server.store.recency import Recency
from pion_server.store.recurrent import Recurrent
from pion_server.store.schema import Schema
from pion_server.store.session import Session
from pion_server.store.units import Unit


class State:
    """Namespaces, sessions, recurrent states and plain keys."""

    def __init__(self) -> None:
        self.sessions: dict[bytes, Session] = {}
        self.prefixes: dict[bytes, Prefix] = {}
        self.recurrent: dict[bytes, Recurrent] = {}
        self.keys = Keys()
        self.recency = Recency()
        self.row_bytes = 0  # of all rows, as they are stored
        self._bytes = 0  # what all sessions, namespaces and recurrent states count for

    @property
    def bytes_used(self) -> int:
        """What the memory budget is about: rows, values, block tables, states, names, and about
        what Python takes to keep them. Where rows were overwritten in part, an eighth more may be
        held (layer.py)."""
        return self._bytes + self.keys.nbytes

    @property
    def session_count(self) -> int:
        return len(self.sessions)

    @property
    def prefix_count(self) -> int:
        return len(self.prefixes)

    @property
    def key_count(self) -> int:
        """Plain keys of all dbs, expired ones that are not yet taken away included."""
        return sum(self.keys.count(db) for db in range(DBS))

    @property
    def prefix_tokens(self) -> int:
        """The lengths of all prefixes together."""
        return sum(prefix.tokens for prefix in self.prefixes.values())

    @property
    def recurrent_count(self) -> int:
        """Blobs of recurrent state."""
        return sum(len(each.blobs) for each in self.recurrent.values())

    @property
    def recurrent_bytes(self) -> int:
        """What these blobs hold."""
        return sum(each.blob_bytes for each in self.recurrent.values())

    def parent(self, namespace: bytes) -> bytes | None:
        """The namespace that this one goes on from."""
        unit = self.recency.parent(DropPrefix(namespace))
        return unit.namespace if isinstance(unit, DropPrefix) else None

    def size(self, unit: Unit) -> int:
        """The bytes that dropping a unit gives back."""
        match unit:
            case DropPrefix(namespace):
                recurrent = self.recurrent.get(namespace)
                return self.prefixes[namespace].nbytes + (recurrent.nbytes if recurrent else 0)
            case DropSession(sid):
                return self.sessions[sid].nbytes
            case DropState(sid):
                return self.recurrent[sid].nbytes
        return sum(self.keys.size(unit.db, key) for key in unit.keys)

    def open(self, sid: bytes, schema: Schema, unit: DropPrefix | DropSession) -> Session:
        """Enter a new session that goes with `unit`."""
        session = self.sessions[sid] = Session(sid, schema, unit)
        self.recount(session.nbytes)
        return session

    def close(self, session: Session) -> None:
        """Take a session and its rows out."""
        del self.sessions[session.sid]
        self.row_bytes -= session.row_bytes
        self.recount(-session.nbytes)

    def recount(self, nbytes: int) -> None:
        """Sessions, namespaces and recurrent states count for `nbytes` more."""
        self._bytes += nbytes


def sessions_of(unit: Unit) -> int:
    """How many sessions go with a unit."""
    return {DropPrefix: 2, DropSession: 1}.get(type(unit), 0)
