"""From what a store holds to what its worker lists: one name for what belongs together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pion_server.store import mutations as m
from pion_server.store.prefixes import name_of_session, sides
from pion_server.store.store import Store
from pion_server.team import Listing

# What makes something under a name that may have been nobody's.
MAKERS = (m.CreateSession, m.RegisterPrefix, m.StoreState)


def _of_namespace(mutation: m.RegisterPrefix | m.DropPrefix) -> set[bytes]:
    return {mutation.namespace}


def _of_session(mutation: m.CreateSession | m.DropSession) -> set[bytes]:
    return {name_of_session(mutation.sid)}


def _of_states(mutation: m.StoreState | m.DropState) -> set[bytes]:
    return {mutation.sid}


# Mutations that are not here are about plain keys, which are listed nowhere.
_NAMES: dict[type[m.Mutation], Callable[[Any], set[bytes]]] = {
    m.RegisterPrefix: _of_namespace,
    m.DropPrefix: _of_namespace,
    m.CreateSession: _of_session,
    m.DropSession: _of_session,
    m.StoreRows: lambda mutation: {name_of_session(block.sid) for block in mutation.blocks},
    m.StoreState: _of_states,
    m.DropState: _of_states,
}


def names_of(mutation: m.Mutation) -> set[bytes]:
    """The names that a mutation is about."""
    of = _NAMES.get(type(mutation))
    return of(mutation) if of else set()


def names_in(store: Store) -> set[bytes]:
    """Every name that a store holds something under."""
    sessions = map(name_of_session, store.sessions)
    return {*store.prefixes, *store.recurrent, *sessions}


def listing_of(store: Store, name: bytes, worker: int) -> Listing | None:
    """What the others have to know of a name; None where nothing is held under it."""
    prefix = store.prefixes.get(name)
    if prefix is not None:
        return Listing(
            worker,
            namespace=True,
            sealed=prefix.sealed,
            tokens=prefix.tokens,
            prefill_ms=prefix.prefill_ms,
            fingerprint=prefix.fingerprint,
        )
    held = name in store.recurrent or any(True for _ in _sessions(store, name))
    return Listing(worker) if held else None


def drops_of(store: Store, name: bytes) -> Iterator[m.Mutation]:
    """What to carry out so that nothing is held under a name."""
    if name in store.prefixes:
        yield m.DropPrefix(name)
    if name in store.recurrent:
        yield m.DropState(name)
    yield from [m.DropSession(sid) for sid in _sessions(store, name)]


def _sessions(store: Store, name: bytes) -> Iterator[bytes]:
    # `a_pk` as a session is a side of `a`, also where there is a namespace called `a_pk`.
    of_name = (sid for sid in (name, *sides(name)) if name_of_session(sid) == name)
    return (sid for sid in of_name if sid in store.sessions)
