"""The whole state of a server, and the one way to change it.

No clock and no I/O: live commands, eviction and recovery all go through `apply`. Naming a unit uses
it, which is what eviction goes by: session(), prefix(), view(), gather() and key() do so for reads;
CreateSession, StoreRows, RegisterPrefix, SetKey and SetExpiry for writes; match() uses its hits.
"""

from __future__ import annotations

from collections.abc import Sequence

from pion_server.store.keys import Entry
from pion_server.store.mutations import DeleteKeys, Mutation
from pion_server.store.prefixes import Prefix
from pion_server.store.rules import RULES, Plan, find_session
from pion_server.store.session import Session
from pion_server.store.state import State
from pion_server.store.views import RowView


class Store(State):
    """Namespaces, sessions and plain keys: reads, and apply()."""

    def plan(self, mutation: Mutation) -> Plan:
        """What `mutation` would cost; raises what apply() would raise."""
        return RULES[type(mutation)].plan(self, mutation)

    def apply(self, mutation: Mutation) -> int:
        """Carry a mutation out, or raise PionError (Mismatch for a fingerprint) with nothing
        changed. Returns how many things were made, stored or taken away: sessions, rows,
        namespaces or keys."""
        plan = self.plan(mutation)
        count = RULES[type(mutation)].act(self, mutation)
        for unit in plan.units:
            self.touch(unit)
        return count

    def session(self, sid: bytes) -> Session:
        """The session called `sid`; raises PionError where there is none."""
        session = find_session(self, sid)
        self.touch(session.unit)
        return session

    def prefix(self, namespace: bytes) -> Prefix | None:
        """The record of a namespace, a hit or not yet one."""
        prefix = self.prefixes.get(namespace)
        if prefix is not None:
            self.touch(prefix.unit)
        return prefix

    def view(self, sid: bytes, layer: int, start: int, end: int) -> RowView:
        """Rows [start, end) of a layer. Raises PionError if the session or a row is missing."""
        return self.session(sid).view(layer, start, end)

    def gather(self, sid: bytes, layer: int, ids: Sequence[int]) -> RowView:
        """Rows by id, in the order of `ids` (at least one). Raises PionError like view()."""
        return self.session(sid).gather(layer, ids)

    def key(self, db: int, key: bytes, now_ms: int) -> Entry | None:
        """A plain key's entry unless it has expired by `now_ms`."""
        entry = self.keys.get(db, key, now_ms)
        if entry is not None:
            self.touch(DeleteKeys(db, (key,)))
        return entry

    def match(self, namespaces: Sequence[bytes], fingerprint: bytes | None) -> int:
        """How many leading namespaces are hits, with this fingerprint where one is given."""
        hits: list[Prefix] = []
        for namespace in namespaces:
            prefix = self.prefixes.get(namespace)
            if prefix is None or not prefix.sealed:
                break
            if fingerprint is not None and prefix.fingerprint != fingerprint:
                break
            hits.append(prefix)
        # Last to first: of a chain of blocks the end should be evicted before its root.
        for prefix in reversed(hits):
            self.touch(prefix.unit)
        return len(hits)
