"""What each kind of mutation may do, and how it is done.

A rule is two functions over the state: `plan` refuses what cannot be done, by raising, and says
what the rest will cost; `act` follows a plan at once and cannot fail. So a mutation is carried out
wholly or leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pion_server.errors import Mismatch, PionError
from pion_server.store import mutations as m
from pion_server.store.keys import DBS
from pion_server.store.prefixes import Prefix, sides, table_bytes
from pion_server.store.schema import Schema
from pion_server.store.session import MAX_TOKENS, Session
from pion_server.store.state import State, Unit


@dataclass(frozen=True, slots=True)
class Plan:
    """What a mutation would do: `growth` is the bytes it adds (never less than it really does;
    rows that one StoreRows names twice count twice), `units` are those it uses."""

    growth: int = 0
    units: frozenset[Unit] = frozenset()


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of mutation is judged and carried out. `act` returns how many things it made,
    stored or took away: sessions, rows, namespaces or keys."""

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
        return Plan(len(mutation.sid))
    _require_layout(session, mutation.schema)
    return Plan(units=frozenset([session.unit]))


def _create_session(state: State, mutation: m.CreateSession) -> int:
    if mutation.sid in state.sessions:
        return 0
    unit = m.DropSession(mutation.sid)
    state.open(mutation.sid, mutation.schema, unit)
    state.recency[unit] = None
    return 1


def _plan_store_rows(state: State, mutation: m.StoreRows) -> Plan:
    sessions = [find_session(state, block.sid) for block in mutation.blocks]
    growth = sum(map(Session.check, sessions, mutation.blocks))
    return Plan(growth, frozenset(session.unit for session in sessions))


def _store_rows(state: State, mutation: m.StoreRows) -> int:
    for block in mutation.blocks:
        state.row_bytes += state.sessions[block.sid].put(block)
    return sum(block.count for block in mutation.blocks)


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
    del state.recency[mutation]
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


def _plan_register(state: State, mutation: m.RegisterPrefix) -> Plan:
    if mutation.declared is not None:
        _check_declaration(mutation, mutation.declared)
    prefix = state.prefixes.get(mutation.namespace)
    if prefix and mutation.fingerprint not in (None, prefix.fingerprint):
        raise Mismatch(
            "this namespace belongs to another model, layout or token sequence; use another "
            "namespace, or KV.PREFIX.DROP it first"
        )
    growth = 0
    units: set[Unit] = {m.DropPrefix(mutation.namespace)}
    for sid, schema in _schemas(mutation):
        session = state.sessions.get(sid)
        if session is None:
            growth += len(sid)
        else:
            _require_layout(session, schema)
            units.add(session.unit)
    if mutation.blocks is not None:
        growth += table_bytes(mutation.blocks) - table_bytes(prefix.blocks if prefix else None)
    return Plan(growth, frozenset(units))


def _register(state: State, mutation: m.RegisterPrefix) -> int:
    prefix = state.prefixes.get(mutation.namespace)
    made = prefix is None
    if prefix is None:
        unit = m.DropPrefix(mutation.namespace)
        keys, values = (_adopt(state, *side, unit) for side in _schemas(mutation))
        prefix = Prefix(mutation.namespace, keys, values, mutation.fingerprint)
        state.prefixes[mutation.namespace] = prefix
        state.recency[unit] = None
    state.label_bytes -= table_bytes(prefix.blocks)
    prefix.update(mutation)
    state.label_bytes += table_bytes(prefix.blocks)
    return int(made)


def _adopt(state: State, sid: bytes, schema: Schema, unit: m.DropPrefix) -> Session:
    """One side of a new namespace: the session that is there, with its rows, or a new one."""
    session = state.sessions.get(sid)
    if session is None:
        return state.open(sid, schema, unit)
    del state.recency[session.unit]
    session.unit = unit
    return session


def _drop_prefix(state: State, mutation: m.DropPrefix) -> int:
    prefix = state.prefixes.pop(mutation.namespace, None)
    if prefix is None:
        return 0
    state.label_bytes -= table_bytes(prefix.blocks)
    state.close(prefix.keys)
    state.close(prefix.values)
    del state.recency[mutation]
    return 1


# Plain keys


def _plan_set_key(state: State, mutation: m.SetKey) -> Plan:
    size = len(mutation.key) + len(mutation.value)
    growth = size - state.keys.size(mutation.db, mutation.key)
    return Plan(growth, frozenset([m.DeleteKeys(mutation.db, (mutation.key,))]))


def _set_key(state: State, mutation: m.SetKey) -> int:
    state.keys.put(mutation.db, mutation.key, mutation.value, mutation.expires_ms)
    state.recency[m.DeleteKeys(mutation.db, (mutation.key,))] = None
    return 1


def _plan_set_expiry(state: State, mutation: m.SetExpiry) -> Plan:
    return Plan(units=frozenset([m.DeleteKeys(mutation.db, (mutation.key,))]))


def _set_expiry(state: State, mutation: m.SetExpiry) -> int:
    return int(state.keys.expire(mutation.db, mutation.key, mutation.expires_ms))


def _delete_keys(state: State, mutation: m.DeleteKeys) -> int:
    gone = [key for key in mutation.keys if state.keys.delete(mutation.db, key)]
    for key in gone:
        del state.recency[m.DeleteKeys(mutation.db, (key,))]
    return len(gone)


def _flush_db(state: State, mutation: m.FlushDb) -> int:
    gone = 0
    for db in range(DBS) if mutation.db is None else (mutation.db,):
        names = state.keys.clear(db)
        gone += len(names)
        for key in names:
            del state.recency[m.DeleteKeys(db, (key,))]
    return gone


RULES: dict[type[m.Mutation], Rule] = {
    m.CreateSession: Rule(_create_session, _plan_create_session),
    m.StoreRows: Rule(_store_rows, _plan_store_rows),
    m.RegisterPrefix: Rule(_register, _plan_register),
    m.DropPrefix: Rule(_drop_prefix),
    m.DropSession: Rule(_drop_session, _plan_drop_session),
    m.SetKey: Rule(_set_key, _plan_set_key),
    m.SetExpiry: Rule(_set_expiry, _plan_set_expiry),
    m.DeleteKeys: Rule(_delete_keys),
    m.FlushDb: Rule(_flush_db),
}
