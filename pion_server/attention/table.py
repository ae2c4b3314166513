"""Which layers can be queried: WARM, COLD or MISSING for each (session id, layer) of a tenant.

Attention state is a copy of K/V in the form that a backend wants: derived, in memory only, never
journaled. An entry stands for a namespace, by its name (`<ns>`, `<ns>_attn`) or because
KV.PREFIX.WARM made it; note() is told of every change to what is stored, so an entry never
outlives the rows that it stands for:

    WARM     -> COLD     it was used longest ago and there is no room, or its rows were overwritten
    WARM, COLD -> MISSING  its namespace was dropped or evicted, or COLD_ENTRIES newer ones are cold

A query that is under way keeps its K/V by reference through all of that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from pion_server.attention.base import Resident
from pion_server.errors import ColdMiss, OutOfMemory, PionError
from pion_server.store.mutations import DropPrefix, DropSession, Mutation, StoreRows
from pion_server.store.prefixes import name_of_session

# Metadata only: names of what was warm. The specification's figure.
COLD_ENTRIES = 1024
SUFFIX = b"_attn"

Key: TypeAlias = tuple[bytes, int]


class State(Enum):
    """As LOOKUP says it."""

    WARM = "HIT"
    COLD = "COLD"
    MISSING = "MISS"


def namespace_of(sid: bytes) -> bytes:
    """The namespace that state under a session id stands for by its name."""
    return sid.removesuffix(SUFFIX)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a table may keep warm: entries, and bytes (0: no limit)."""

    slots: int = 256
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Item:
    """State to keep: K/V of one layer, and the namespace that it stands for."""

    sid: bytes
    layer: int
    kept: Resident
    namespace: bytes


class Table:
    """The attention state of one tenant."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.nbytes = 0  # of all warm entries
        self.demotions = 0  # WARM -> COLD, ever
        self.rehydrates = 0  # COLD -> WARM, ever
        self._warm: OrderedDict[Key, Item] = OrderedDict()  # the least recently used first
        self._cold: OrderedDict[Key, bytes] = OrderedDict()  # namespaces, the oldest first
        self._of: dict[bytes, set[Key]] = {}  # what stands for each namespace, warm or cold

    @property
    def warm(self) -> int:
        return len(self._warm)

    @property
    def cold(self) -> int:
        return len(self._cold)

    def state(self, sid: bytes, layer: int) -> State:
        """Being asked for is a use: who asks will want to query."""
        key = (sid, layer)
        if key in self._warm:
            self._warm.move_to_end(key)
            return State.WARM
        return State.COLD if key in self._cold else State.MISSING

    def find(self, sid: bytes, layer: int) -> Resident:
        """The K/V to query. Raises ColdMiss where it is cold, PionError where there is none."""
        match self.state(sid, layer):
            case State.WARM:
                return self._warm[sid, layer].kept
            case State.COLD:
                raise ColdMiss("this attention state is cold; KV.PREFIX.WARM makes it warm again")
        raise PionError(
            "session not found: there is no attention state of this layer; ATTEND.PREFIX.STORE it, "
            "or KV.PREFIX.WARM its namespace"
        )

    def put(self, *items: Item) -> None:
        """Keep all items (no two of them of one layer), each in the place of what is there. What
        was used longest ago becomes cold for it. Raises OutOfMemory, with nothing changed, where
        they do not fit together."""
        self.check(len(items), sum(item.kept.nbytes for item in items))
        for item in items:
            key = (item.sid, item.layer)
            self.rehydrates += key in self._cold
            self._remove(key)
            self._warm[key] = item
            self.nbytes += item.kept.nbytes
            self._of.setdefault(item.namespace, set()).add(key)
        while self.warm > self.limits.slots or 0 < self.limits.memory < self.nbytes:
            self._demote(next(iter(self._warm)))

    def check(self, layers: int, nbytes: int) -> None:
        """Raise OutOfMemory where so much could not be warm at one time."""
        slots, memory = self.limits.slots, self.limits.memory
        if layers > slots:
            raise OutOfMemory(f"{layers} layers are more than --attend-slots, which is {slots}")
        if 0 < memory < nbytes:
            raise OutOfMemory(
                f"{nbytes} bytes of attention state are more than the limit of {memory} "
                "(--attend-memory)"
            )

    def note(self, mutation: Mutation) -> None:
        """Take in a change of what is stored; for each one, after it was carried out."""
        match mutation:
            case StoreRows(blocks):
                self._overwritten(
                    (name_of_session(block.sid), block.layer) for block in blocks if self._of
                )
            case DropPrefix(namespace):
                self._forget(namespace)
            case DropSession(sid):
                self._forget(name_of_session(sid))

    def _overwritten(self, changed: Iterable[Key]) -> None:
        for namespace, layer in changed:
            for key in [key for key in self._of.get(namespace, ()) if key[1] == layer]:
                if key in self._warm:
                    self._demote(key)

    def _forget(self, namespace: bytes) -> None:
        for key in list(self._of.get(namespace, ())):
            self._remove(key)

    def _demote(self, key: Key) -> None:
        item = self._warm.pop(key)
        self.nbytes -= item.kept.nbytes
        self._cold[key] = item.namespace
        self.demotions += 1
        if self.cold > COLD_ENTRIES:
            self._remove(next(iter(self._cold)))

    def _remove(self, key: Key) -> None:
        """Take an entry out, warm or cold or neither."""
        item = self._warm.pop(key, None)
        if item is not None:
            self.nbytes -= item.kept.nbytes
        namespace = item.namespace if item is not None else self._cold.pop(key, None)
        if namespace is None:
            return
        keys = self._of[namespace]
        keys.discard(key)
        if not keys:
            del self._of[namespace]
