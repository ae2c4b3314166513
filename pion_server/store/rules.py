"""What each kind of mutation may do, and how it is done.

A rule is two functions over the state: `plan` refuses what cannot be done, by raising, and says
what the rest will cost; `act` follows a plan at once and cannot fail. So a mutation is carried out
wholly or leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pion_server.errors import Mismatch, PionError
from pion_server.store import mutations as m
from pion_server.store.keys import DBS, cost
from pion_server.store.prefixes import Prefix, sides, table_bytes
from pion_server.store.recurrent import Recurrent
from pion_server.store.schema import Schema, check_layer
from pion_server.store.session import MAX_TOKENS, SESSION_BYTES, Session
from pion_server.store.state import State
from pion_server.store.units import Unit, key_unit

NOTHING: frozenset[Unit] = frozenset()


@dataclass(frozen=True, slots=True)
class Plan:
    """What a mutation would do: `growth` is the bytes it adds (never less than it really does;
    rows that one StoreRows names twice count twice), `sessions` those it makes, `uses` the units
    that it is about, there or not, `needs` others that it would be pointless without."""

    growth: int = 0
    sessions: int = 0
    uses: frozenset[Unit] = NOTHING
    needs: frozenset[Unit] = NOTHING


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of mutation is judged and carried out. `act` returns how many things it made,
    stored or took away: sessions, rows, namespaces, states or keys."""

    act: Callable[[State, Any], int]
    plan: Callable[[State, Any], Plan] = lambda state, mutation: Plan()


# Sessions


def find_session(state: State, sid: bytes) -> Session:
    """The session called `sid`; raises PionError where there is none."""
    session = state.sessions.get(sid)
    if session is None:
        name = sid[:64].decode("ascii", "backslashreplace")
        raise PionError(f"unknown session '{name}'")
    return session


def _require_layout(session: Session, schema: Schema) -> None:
    if session.schema != schema:
        raise PionError(
            "it exists with another layout, and its rows are kept; use another name, or drop it "
            "first (KV.PREFIX.DROP)"
        )


def _plan_create_session(state: State, mutation: m.CreateSession) -> Plan:
    session = state.sessions.get(mutation.sid)
    if session is None:
        return Plan(SESSION_BYTES + len(mutation.sid), sessions=1)
    _require_layout(session, mutation.schema)
    return Plan(uses=frozenset([session.unit]))


def _create_session(state: State, mutation: m.CreateSession) -> int:
    if mutation.sid in state.sessions:
        return 0
    unit = m.DropSession(mutation.sid)
    state.open(mutation.sid, mutation.schema, unit)
    state.recency.add(unit)
    return 1


def _plan_store_rows(state: State, mutation: m.StoreRows) -> Plan:
    sessions = [find_session(state, block.sid) for block in mutation.blocks]
    growth = sum(map(Session.check, sessions, mutation.blocks))
    return Plan(growth, uses=frozenset(session.unit for session in sessions))


def _store_rows(state: State, mutation: m.StoreRows) -> int:
    for block in mutation.blocks:
        session = state.sessions[block.sid]
        prefix = _prefix_of(state, session)
        _count_rows(state, session, prefix, -1)
        session.put(block)
        _count_rows(state, session, prefix, 1)
    return sum(block.count for block in mutation.blocks)


def _prefix_of(state: State, session: Session) -> Prefix | None:
    """The namespace that a session is a side of."""
    unit = session.unit
    return state.prefixes[unit.namespace] if isinstance(unit, m.DropPrefix) else None


def _count_rows(state: State, session: Session, prefix: Prefix | None, times: int) -> None:
    state.count_session(session, times)
    if prefix is not None:  # where none were declared, its tokens are rows
        state.count_prefix(prefix, times)


def _plan_drop_session(state: State, mutation: m.DropSession) -> Plan:
    session = state.sessions.get(mutation.sid)
    if session is not None and session.unit != mutation:
        raise PionError("the session belongs to a namespace; KV.PREFIX.DROP takes both sides")
    return Plan()


def _drop_session(state: State, mutation: m.DropSession) -> int:
    session = state.sessions.get(mutation.sid)
    if session is None:
        return 0
    state.close(session)
    state.recency.remove(mutation)
    return 1


# Namespaces


def _schemas(mutation: m.RegisterPrefix) -> list[tuple[bytes, Schema]]:
    """The K and the V side of a namespace: session id and schema."""
    return list(zip(sides(mutation.namespace), (mutation.keys, mutation.values), strict=True))


def _check_declaration(mutation: m.RegisterPrefix, declared: m.Declaration) -> None:
    """Refuse a declaration that no rows could ever fulfil."""
    if not 1 <= declared.tokens <= MAX_TOKENS:
        raise PionError(f"TOKENS must be between 1 and {MAX_TOKENS}, got {declared.tokens}")
    for schema in (mutation.keys, mutation.values):
        schema.layer(declared.layers - 1)


def _check_parent(state: State, unit: m.DropPrefix, parent: m.DropPrefix) -> None:
    """Refuse a circle: nothing in it could be evicted before the rest."""
    known = state.recency.parent(unit) == parent
    if not known and state.recency.descends(parent, unit):
        raise PionError("the PARENT is this namespace itself, or goes on from it")


def _plan_register(state: State, mutation: m.RegisterPrefix) -> Plan:
    unit = m.DropPrefix(mutation.namespace)
    if mutation.declared is not None:
        _check_declaration(mutation, mutation.declared)
    needs = NOTHING
    if mutation.parent is not None:
        needs = frozenset([m.DropPrefix(mutation.parent)])
        _check_parent(state, unit, m.DropPrefix(mutation.parent))
    prefix = state.prefixes.get(mutation.namespace)
    if prefix and mutation.fingerprint not in (None, prefix.fingerprint):
        raise Mismatch(
            "this namespace belongs to another model, layout or token sequence; use another "
            "namespace, or KV.PREFIX.DROP it first"
        )
    growth = made = 0
    uses: set[Unit] = {unit}
    for sid, schema in _schemas(mutation):
        session = state.sessions.get(sid)
        if session is None:
            growth += SESSION_BYTES + len(sid)
            made += 1
        else:
            _require_layout(session, schema)
            uses.add(session.unit)
    if recurrent := state.recurrent.get(mutation.namespace):
        uses.add(recurrent.unit)
    if mutation.blocks is not None:
        growth += table_bytes(mutation.blocks) - table_bytes(prefix.blocks if prefix else None)
    return Plan(growth, made, frozenset(uses), needs)


def _register(state: State, mutation: m.RegisterPrefix) -> int:
    unit = m.DropPrefix(mutation.namespace)
    prefix = state.prefixes.get(mutation.namespace)
    made = prefix is None
    if prefix is None:
        prefix = state.prefixes[mutation.namespace] = _open_prefix(state, mutation, unit)
    else:
        state.count_prefix(prefix, -1)
    prefix.update(mutation)
    state.count_prefix(prefix, 1)
    if mutation.parent is not None:
        state.recency.follow(unit, m.DropPrefix(mutation.parent))
    return int(made)


def _open_prefix(state: State, mutation: m.RegisterPrefix, unit: m.DropPrefix) -> Prefix:
    """A new namespace; what is there of the same names becomes part of it."""
    keys, values = (_adopt(state, *side, unit) for side in _schemas(mutation))
    if recurrent := state.recurrent.get(mutation.namespace):
        state.recency.remove(recurrent.unit)
        recurrent.unit = unit
    state.recency.add(unit)
    return Prefix(mutation.namespace, keys, values, mutation.fingerprint)


def _adopt(state: State, sid: bytes, schema: Schema, unit: m.DropPrefix) -> Session:
    """One side of a new namespace: the session that is there, with its rows, or a new one."""
    session = state.sessions.get(sid)
    if session is None:
        return state.open(sid, schema, unit)
    state.recency.remove(session.unit)
    session.unit = unit
    return session


def _drop_prefix(state: State, mutation: m.DropPrefix) -> int:
    prefix = state.prefixes.pop(mutation.namespace, None)
    if prefix is None:
        return 0
    state.count_prefix(prefix, -1)
    state.close(prefix.keys)
    state.close(prefix.values)
    if recurrent := state.recurrent.pop(mutation.namespace, None):
        state.count_recurrent(recurrent, -1)
    state.recency.remove(mutation)
    return 1


# Recurrent states


def _recurrent(state: State, sid: bytes) -> Recurrent:
    """The states of a session id; where there are none, a new record that is not entered."""
    unit = m.DropPrefix(sid) if sid in state.prefixes else m.DropState(sid)
    return state.recurrent.get(sid) or Recurrent(sid, unit)


def _plan_store_state(state: State, mutation: m.StoreState) -> Plan:
    check_layer(mutation.layer)
    held = _recurrent(state, mutation.sid)
    entering = 0 if mutation.sid in state.recurrent else held.nbytes
    growth = entering + held.growth(mutation.layer, mutation.data)
    return Plan(growth, uses=frozenset([held.unit]))


def _store_state(state: State, mutation: m.StoreState) -> int:
    held = _recurrent(state, mutation.sid)
    if mutation.sid in state.recurrent:
        state.count_recurrent(held, -1)
    held.put(mutation.layer, mutation.data)
    state.recurrent[mutation.sid] = held
    state.recency.add(held.unit)
    state.count_recurrent(held, 1)
    return 1


def _drop_state(state: State, mutation: m.DropState) -> int:
    held = state.recurrent.get(mutation.sid)
    if held is None:
        return 0
    state.count_recurrent(held, -1)
    gone = held.drop(mutation.layer)
    if held.blobs:
        state.count_recurrent(held, 1)
        return gone
    del state.recurrent[mutation.sid]
    if isinstance(held.unit, m.DropState):
        state.recency.remove(held.unit)
    return gone


# Plain keys


def _plan_set_key(state: State, mutation: m.SetKey) -> Plan:
    growth = cost(mutation.key, mutation.value) - state.keys.size(mutation.db, mutation.key)
    return Plan(growth, uses=frozenset([key_unit(mutation.db, mutation.key)]))


def _set_key(state: State, mutation: m.SetKey) -> int:
    state.keys.put(mutation.db, mutation.key, mutation.value, mutation.expires_ms)
    state.recency.add(key_unit(mutation.db, mutation.key))
    return 1


def _plan_set_expiry(state: State, mutation: m.SetExpiry) -> Plan:
    return Plan(uses=frozenset([key_unit(mutation.db, mutation.key)]))


def _set_expiry(state: State, mutation: m.SetExpiry) -> int:
    return int(state.keys.expire(mutation.db, mutation.key, mutation.expires_ms))


def _delete_keys(state: State, mutation: m.DeleteKeys) -> int:
    gone = [key for key in mutation.keys if state.keys.delete(mutation.db, key)]
    _forget_keys(state, mutation.db, gone)
    return len(gone)


def _flush_db(state: State, mutation: m.FlushDb) -> int:
    gone = 0
    for db in range(DBS) if mutation.db is None else (mutation.db,):
        names = state.keys.clear(db)
        gone += len(names)
        _forget_keys(state, db, names)
    return gone


def _forget_keys(state: State, db: int, gone: Iterable[bytes]) -> None:
    """Take out the units of keys that are gone, but for one that has another key left."""
    for unit in {key_unit(db, key) for key in gone}:
        if not any(map(partial(state.keys.size, db), unit.keys)):
            state.recency.remove(unit)


RULES: dict[type[m.Mutation], Rule] = {
    m.CreateSession: Rule(_create_session, _plan_create_session),
    m.StoreRows: Rule(_store_rows, _plan_store_rows),
    m.RegisterPrefix: Rule(_register, _plan_register),
    m.DropPrefix: Rule(_drop_prefix),
    m.DropSession: Rule(_drop_session, _plan_drop_session),
    m.StoreState: Rule(_store_state, _plan_store_state),
    m.DropState: Rule(_drop_state),
    m.SetKey: Rule(_set_key, _plan_set_key),
    m.SetExpiry: Rule(_set_expiry, _plan_set_expiry),
    m.DeleteKeys: Rule(_delete_keys),
    m.FlushDb: Rule(_flush_db),
}
