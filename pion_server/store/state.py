"""The tables of the state, and the counts that go with them.

Only the rules of `Store.apply` (rules.py) change them.
"""

from __future__ import annotations

from pion_server.store.keys import DBS, Keys
from pion_server.store.mutations import DropPrefix, DropSession, DropState
from pion_server.store.prefixes import Prefix, table_bytes
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
        self.prefix_tokens = 0  # the lengths of all namespaces together
        self.recurrent_count = 0  # blobs of recurrent state
        self.recurrent_bytes = 0  # what these hold
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
        self.count_session(session, 1)
        return session

    def close(self, session: Session) -> None:
        """Take a session and its rows out."""
        del self.sessions[session.sid]
        self.count_session(session, -1)

    def count_session(self, session: Session, times: int) -> None:
        """Count a session with all that is in it, 1 or (before it changes) -1 times."""
        self.row_bytes += times * session.row_bytes
        self._bytes += times * session.nbytes

    def count_prefix(self, prefix: Prefix, times: int) -> None:
        """Count a namespace, but for its sessions."""
        self.prefix_tokens += times * prefix.tokens
        self._bytes += times * table_bytes(prefix.blocks)

    def count_recurrent(self, held: Recurrent, times: int) -> None:
        """Count the recurrent states of a session id."""
        self.recurrent_count += times * len(held.blobs)
        self.recurrent_bytes += times * held.blob_bytes
        self._bytes += times * held.nbytes


def sessions_of(unit: Unit) -> int:
    """How many sessions go with a unit."""
    return {DropPrefix: 2, DropSession: 1}.get(type(unit), 0)
