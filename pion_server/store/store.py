"""The whole state of a server, and the one way to change it.

No clock and no I/O: live commands, eviction and recovery all go through `apply`. Naming a unit uses
it, which is what eviction goes by: session(), prefix(), view(), gather(), recurrent_state() and
key() do so for reads, the mutations but for drops for writes; lease() and match() hold it for a
while, for a client that asks whether something is there wants to read it next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pion_server.store.keys import Entry
from pion_server.store.mutations import Mutation
from pion_server.store.prefixes import Prefix
from pion_server.store.rules import RULES, Plan, find_session
from pion_server.store.session import Session
from pion_server.store.state import State
from pion_server.store.units import Unit, key_unit
from pion_server.store.views import RowView

# A LMCache looks up all chunks of a prompt and gets them when the engine has a free slot for it:
# seconds later under load, and its remote calls give up after 10 s.
LEASE_MS = 10_000


class Store(State):
    """Namespaces, sessions, recurrent states and plain keys: reads, and apply()."""

    def plan(self, mutation: Mutation) -> Plan:
        """What `mutation` would cost; raises what apply() would raise."""
        return RULES[type(mutation)].plan(self, mutation)

    def apply(self, mutation: Mutation) -> int:
        """Carry a mutation out, or raise PionError (Mismatch for a fingerprint) with nothing
        changed. Returns how many things were made, stored or taken away: sessions, rows,
        namespaces, states or keys."""
        plan = self.plan(mutation)
        count = RULES[type(mutation)].act(self, mutation)
        for unit in plan.uses:
            self.recency.touch(unit)
        return count

    def lease(self, unit: Unit, now_ms: int, for_ms: int = LEASE_MS) -> None:
        """Let a unit be evicted only after everything that is used until the lease ends. `now_ms`:
        milliseconds since any fixed moment."""
        self.recency.tell(now_ms)
        self.recency.touch(unit, for_ms)

    def session(self, sid: bytes) -> Session:
        """The session called `sid`; raises PionError where there is none."""
        session = find_session(self, sid)
        self.recency.touch(session.unit)
        return session

    def prefix(self, namespace: bytes) -> Prefix | None:
        """The record of a namespace, a hit or not yet one."""
        prefix = self.prefixes.get(namespace)
        if prefix is not None:
            self.recency.touch(prefix.unit)
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
            self.recency.touch(key_unit(db, key))
        return entry

    def recurrent_state(self, sid: bytes, layer: int) -> bytes | memoryview | None:
        """One layer's blob, or None."""
        held = self.recurrent.get(sid)
        if held is None:
            return None
        self.recency.touch(held.unit)
        return held.blobs.get(layer)

    def match(
        self,
        namespaces: Sequence[bytes],
        fingerprint: bytes | None,
        now_ms: int,
        elsewhere: Callable[[bytes], bool] = lambda namespace: False,
    ) -> int:
        """How many leading namespaces are hits, with this fingerprint where one is given. Leases
        them. `elsewhere`: whether one that is not here is a hit all the same."""
        hits: list[Prefix] = []
        count = 0
        for namespace in namespaces:
            prefix = self.prefixes.get(namespace)
            if prefix is not None and prefix.sealed and fingerprint in (None, prefix.fingerprint):
                hits.append(prefix)
            elif prefix is not None or not elsewhere(namespace):
                break
            count += 1
        # Last to first: of a chain of blocks the end should be evicted before its root, also where
        # nobody named PARENTs.
        for prefix in reversed(hits):
            self.lease(prefix.unit, now_ms)
        return count
