"""The tables of the state, and the counts that go with them.

Only the rules of `Store.apply` (rules.py) change them. For eviction the units are kept in order of
use. A unit is what goes as a whole (a namespace with both sessions, a session without one, a plain
key), written as the mutation that drops it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeAlias

from pion_server.store.keys import Keys
from pion_server.store.mutations import DeleteKeys, DropPrefix, DropSession
from pion_server.store.prefixes import Prefix
from pion_server.store.schema import Schema
from pion_server.store.session import Session

Unit: TypeAlias = DropPrefix | DropSession | DeleteKeys  # the last with one key


class State:
    """Namespaces, sessions and plain keys."""

    def __init__(self) -> None:
        self.sessions: dict[bytes, Session] = {}
        self.prefixes: dict[bytes, Prefix] = {}
        self.keys = Keys()
        self.recency: OrderedDict[Unit, None] = OrderedDict()  # least recently used first
        self.row_bytes = 0  # of all rows, as they are stored
        self.label_bytes = 0  # names of sessions, and block tables

    @property
    def bytes_used(self) -> int:
        """What the memory budget is about: rows, block tables, values, names of sessions and
        keys. Rows that were overwritten in part can hold as much again (layer.py)."""
        return self.row_bytes + self.label_bytes + self.keys.nbytes

    @property
    def session_count(self) -> int:
        return len(self.sessions)

    @property
    def prefix_count(self) -> int:
        return len(self.prefixes)

    @property
    def prefix_tokens(self) -> int:
        """The lengths of all prefixes together."""
        return sum(prefix.tokens for prefix in self.prefixes.values())

    def size(self, unit: Unit) -> int:
        """The bytes that dropping a unit gives back."""
        if isinstance(unit, DropPrefix):
            return self.prefixes[unit.namespace].nbytes
        if isinstance(unit, DropSession):
            return self.sessions[unit.sid].nbytes
        return self.keys.size(unit.db, unit.keys[0])

    def touch(self, unit: Unit) -> None:
        """Make a unit the most recently used one; one that is not there is passed over."""
        if unit in self.recency:
            self.recency.move_to_end(unit)

    def open(self, sid: bytes, schema: Schema, unit: DropPrefix | DropSession) -> Session:
        """Enter a new session that goes with `unit`."""
        session = self.sessions[sid] = Session(sid, schema, unit)
        self.label_bytes += len(sid)
        return session

    def close(self, session: Session) -> None:
        """Take a session and its rows out."""
        del self.sessions[session.sid]
        self.label_bytes -= len(session.sid)
        self.row_bytes -= session.row_bytes
