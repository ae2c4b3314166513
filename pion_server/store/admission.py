"""Admission: which newcomers are kept at all, so that what is written once and never again does not
push out what is used.

A session, namespace or key is kept from the n-th time on that somebody writes it. Reads do not
count: engines look up what they are about to store, so each first write would have one before it.
What is there may always be written, or an old value would stay. Only hashes of names are
remembered, GHOSTS of them; those written longest ago are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeAlias

from pion_server.store.mutations import CreateSession, RegisterPrefix, SetKey
from pion_server.store.prefixes import sides
from pion_server.store.store import Store
from pion_server.store.units import key_unit

Newcomer: TypeAlias = CreateSession | RegisterPrefix | SetKey
Name: TypeAlias = tuple[type[Newcomer], int, bytes]

# About 10 MB at the most. A name that comes back after this many others is one of a kind.
GHOSTS = 1 << 16


class Admission:
    """Lets in what comes for the `visits`-th time (1: everything)."""

    def __init__(self, visits: int = 1) -> None:
        self._visits = visits
        self._ghosts: OrderedDict[int, int] = OrderedDict()  # hash of a name -> visits so far

    def lets_in(self, store: Store, mutation: Newcomer) -> bool:
        """Whether to carry the mutation out; a visit. Raises what applying it would raise."""
        if self._visits == 1 or any(unit in store.recency for unit in store.plan(mutation).uses):
            return True
        if isinstance(mutation, SetKey):
            first = key_unit(mutation.db, mutation.key).keys[0]
            if first != mutation.key and self._turned_away((SetKey, mutation.db, first)):
                return False  # its other half, which comes first, is not there
        name = hash(_name(mutation))
        seen = self._ghosts[name] = min(self._ghosts.pop(name, 0) + 1, self._visits)
        if len(self._ghosts) > GHOSTS:
            self._ghosts.popitem(last=False)
        return seen == self._visits

    def ignores(self, sid: bytes) -> bool:
        """Whether a session that is not there, or its namespace, was turned away: then what is
        written to it is to be dropped without an error."""
        namespace = sid[:-3]
        of_prefix = sid in sides(namespace) and self._turned_away((RegisterPrefix, 0, namespace))
        return of_prefix or self._turned_away((CreateSession, 0, sid))

    def _turned_away(self, name: Name) -> bool:
        return 0 < self._ghosts.get(hash(name), 0) < self._visits


def _name(mutation: Newcomer) -> Name:
    match mutation:
        case SetKey(db, key):
            return SetKey, db, key
        case CreateSession(sid):
            return CreateSession, 0, sid
        case RegisterPrefix(namespace):
            return RegisterPrefix, 0, namespace
