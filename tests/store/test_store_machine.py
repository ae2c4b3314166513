"""Invariant: the store equals a dumb model of dicts after any sequence of mutations, refused ones
included (they change nothing), and its byte counts, hits and eviction units equal the model's."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pion_server.codecs.table import by_name
from pion_server.errors import Mismatch, PionError
from pion_server.store.keys import KEY_BYTES
from pion_server.store.mutations import (
    BlockTable,
    CreateSession,
    Declaration,
    DeleteKeys,
    DropPrefix,
    DropSession,
    DropState,
    FlushDb,
    Mutation,
    RegisterPrefix,
    RowBlock,
    SetExpiry,
    SetKey,
    StoreRows,
    StoreState,
)
from pion_server.store.recurrent import BLOB_BYTES, SID_BYTES
from pion_server.store.schema import MAX_LAYERS, LayerFormat, Schema
from pion_server.store.session import SESSION_BYTES, STRETCH_BYTES
from pion_server.store.state import sessions_of
from pion_server.store.store import Store
from pion_server.store.units import Unit, key_unit

DIM = 32
FP16, FP32 = (LayerFormat(by_name(name), DIM) for name in ("fp16", "fp32"))
SCHEMAS = (Schema.same(FP16), Schema.same(FP32), Schema.each((FP16, FP32)))
NAMESPACES = (b"a", b"b", b"\r\n\x00")
SIDS = (b"bare", *(ns + side for ns in NAMESPACES for side in (b"_pk", b"_pv")))
TOKENS = 12

schemas = st.sampled_from(SCHEMAS)
namespaces = st.sampled_from(NAMESPACES)
fingerprints = st.sampled_from((None, None, b"f", b"g"))
parents = st.sampled_from((None, *NAMESPACES, b"absent"))
names = st.sampled_from([b"x", b"y", b"long name" * 9, b"c@kv_bytes", b"c@metadata"])


@dataclass
class ModelSession:
    schema: Schema
    rows: dict[tuple[int, int], bytes] = field(default_factory=dict)

    def nbytes(self, sid: bytes) -> int:
        stretches = sum((layer, row - 1) not in self.rows for layer, row in self.rows)
        rows = sum(map(len, self.rows.values()))
        return SESSION_BYTES + len(sid) + rows + stretches * STRETCH_BYTES


@dataclass
class ModelPrefix:
    fingerprint: bytes | None
    declared: Declaration | None = None
    prefill_ms: float | None = None
    hashes: np.ndarray | None = None
    parent: bytes | None = None


def sides(ns: bytes) -> tuple[bytes, bytes]:
    return ns + b"_pk", ns + b"_pv"


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = Store()
        self.sessions: dict[bytes, ModelSession] = {}
        self.prefixes: dict[bytes, ModelPrefix] = {}
        self.states: dict[bytes, dict[int, bytes]] = {}
        self.keys: dict[tuple[int, bytes], tuple[bytes, int | None]] = {}
        self.views: list[tuple[tuple[memoryview, ...], bytes]] = []
        self.writes = 0

    def apply(self, mutation: Mutation, refused: type[PionError] | None = None) -> int | None:
        """Carry out, or see refused; the invariants then compare everything with the model."""
        if refused is None:
            return self.store.apply(mutation)
        with pytest.raises(PionError) as caught:
            self.store.apply(mutation)
        assert type(caught.value) is refused
        return None

    def forget(self, unit: Unit) -> None:
        """What dropping a unit does to the model."""
        if isinstance(unit, DropPrefix):
            del self.prefixes[unit.namespace]
            self.states.pop(unit.namespace, None)
            for sid in sides(unit.namespace):
                del self.sessions[sid]
        elif isinstance(unit, DropSession):
            del self.sessions[unit.sid]
        elif isinstance(unit, DropState):
            del self.states[unit.sid]
        else:
            for key in unit.keys:
                self.keys.pop((unit.db, key), None)

    # Rules

    @initialize(keys=schemas, values=schemas, bare=schemas)
    def begin(self, keys: Schema, values: Schema, bare: Schema) -> None:
        """A random walk from nothing would seldom get to rows."""
        self.create(b"bare", bare)
        self.register(b"a", keys, values, Declaration(2, 3), b"f", [5, 4], 1.5, None)
        self.register(b"b", values, keys, None, None, None, None, b"a")
        self.store_state(b"a", 0, b"state")
        self.set_key(0, b"x", b"value", False, 5)

    @rule(sid=st.sampled_from(SIDS), schema=schemas)
    def create(self, sid: bytes, schema: Schema) -> None:
        there = self.sessions.get(sid)
        if there is None:
            assert self.apply(CreateSession(sid, schema)) == 1
            self.sessions[sid] = ModelSession(schema)
        elif there.schema == schema:
            assert self.apply(CreateSession(sid, schema)) == 0
        else:
            self.apply(CreateSession(sid, schema), PionError)

    @rule(
        ns=namespaces,
        keys=schemas,
        values=schemas,
        declared=st.none()
        | st.builds(Declaration, st.integers(1, 3), st.integers(1, TOKENS))
        | st.sampled_from([Declaration(0, 1), Declaration(1, 0), Declaration(9999, 1)]),
        fingerprint=fingerprints,
        hashes=st.none() | st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5),
        prefill_ms=st.none() | st.floats(0, 1e6),
        parent=parents,
    )
    def register_anything(self, ns, keys, values, **options) -> None:
        self.register(ns, keys, values, **options)

    @rule(
        ns=namespaces,
        declared=st.none() | st.builds(Declaration, st.just(2), st.integers(1, 5)),
        fingerprint=fingerprints,
        prefill_ms=st.none() | st.just(0.0),
        parent=parents,
    )
    def register_again(self, ns, declared, fingerprint, prefill_ms, parent) -> None:
        """With the layout that is there, if one is."""
        keys, values = (
            self.sessions[sid].schema if sid in self.sessions else SCHEMAS[0] for sid in sides(ns)
        )
        self.register(ns, keys, values, declared, fingerprint, None, prefill_ms, parent)

    def register(self, ns, keys, values, declared, fingerprint, hashes, prefill_ms, parent) -> None:
        array = None if hashes is None else np.array(hashes, np.uint64)
        blocks = None if array is None else BlockTable(256, array)
        mutation = RegisterPrefix(
            ns, keys, values, declared, fingerprint, blocks, prefill_ms, parent
        )
        there = self.prefixes.get(ns)
        impossible = ns in self.lineage(parent) or (
            declared
            and not (
                declared.tokens and all(fits(declared.layers, schema) for schema in (keys, values))
            )
        )
        other_layout = any(
            sid in self.sessions and self.sessions[sid].schema != schema
            for sid, schema in zip(sides(ns), (keys, values), strict=True)
        )
        refused: type[PionError] | None = None
        if impossible or other_layout:
            refused = PionError
        if not impossible and there and fingerprint not in (None, there.fingerprint):
            refused = Mismatch
        count = self.apply(mutation, refused)
        if refused:
            return
        assert count == (there is None)
        for sid, schema in zip(sides(ns), (keys, values), strict=True):
            self.sessions.setdefault(sid, ModelSession(schema))
        prefix = self.prefixes.setdefault(ns, ModelPrefix(fingerprint))
        prefix.declared = declared or prefix.declared
        prefix.parent = prefix.parent if parent is None else parent
        prefix.prefill_ms = prefix.prefill_ms if prefill_ms is None else prefill_ms
        prefix.hashes = prefix.hashes if array is None else array

    def lineage(self, namespace: bytes | None) -> list[bytes]:
        """The namespace and what it goes on from."""
        found = []
        while namespace is not None:
            found.append(namespace)
            prefix = self.prefixes.get(namespace)
            namespace = prefix.parent if prefix else None
        return found

    @rule(
        data=st.data(),
        layers=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        defect=st.sampled_from([None] * 8 + ["short", "long", "negative", "empty", "far"]),
    )
    def store_rows(self, data, layers, defect) -> None:
        """The defect sits in the last block, so all before it must not be stored either."""
        sids = st.sampled_from([*sorted(self.sessions), b"nowhere"])
        starts, counts = st.integers(0, TOKENS), st.integers(1, TOKENS)
        blocks = [
            self.block(data.draw(sids), i, data.draw(starts), data.draw(counts)) for i in layers
        ]
        if defect:
            blocks[-1] = broken(blocks[-1], defect)
        refused = defect or any(not self.storable(block.sid, block.layer) for block in blocks)
        self.store_blocks(blocks, PionError if refused else None)

    @precondition(lambda self: self.prefixes)
    @rule(data=st.data(), hole=st.none() | st.integers(0, 9))
    def store_a_whole_prefix(self, data, hole) -> None:
        """Every declared row, but for one where there is a hole."""
        ns = data.draw(st.sampled_from(sorted(self.prefixes)))
        declared = self.prefixes[ns].declared or Declaration(2, 2)
        blocks = [
            self.block(sid, layer, row, 1)
            for sid in sides(ns)
            for layer in range(declared.layers)
            for row in range(declared.tokens)
            if self.storable(sid, layer)
        ]
        if hole is not None and len(blocks) > 1:
            del blocks[hole % len(blocks)]
        self.store_blocks(blocks, None)

    def store_blocks(self, blocks: list[RowBlock], refused: type[PionError] | None) -> None:
        count = self.apply(StoreRows(tuple(blocks)), refused)
        if refused:
            return
        assert count == sum(block.count for block in blocks)
        for block in blocks:
            size = self.sessions[block.sid].schema.layer(block.layer).row_bytes
            for i in range(block.count):
                row = bytes(block.data[i * size : (i + 1) * size])
                self.sessions[block.sid].rows[block.layer, block.start + i] = row

    def storable(self, sid: bytes, layer: int) -> bool:
        if sid not in self.sessions:
            return False
        schema = self.sessions[sid].schema
        return schema.uniform or layer < len(schema.formats)

    def block(self, sid: bytes, layer: int, start: int, count: int) -> RowBlock:
        self.writes += 1
        known = self.storable(sid, layer)
        size = self.sessions[sid].schema.layer(layer).row_bytes if known else 64
        words = np.arange(count * size // 4, dtype="<u4") + (self.writes << 12)
        return RowBlock(sid, layer, start, count, memoryview(bytearray(words.tobytes())))

    @rule(
        sid=st.sampled_from([*NAMESPACES, b"bare"]),
        layer=st.sampled_from([0, 1, 1, MAX_LAYERS - 1, MAX_LAYERS, -1]),
        blob=st.binary(max_size=50),
    )
    def store_state(self, sid, layer, blob) -> None:
        data = memoryview(bytearray(blob)) if len(blob) % 2 else blob
        if not 0 <= layer < MAX_LAYERS:
            self.apply(StoreState(sid, layer, data), PionError)
            return
        assert self.apply(StoreState(sid, layer, data)) == 1
        self.states.setdefault(sid, {})[layer] = blob

    @rule(sid=st.sampled_from([*NAMESPACES, b"bare"]), layer=st.sampled_from([None, 0, 1]))
    def drop_state(self, sid, layer) -> None:
        held = self.states.get(sid, {})
        gone = [each for each in held if layer in (None, each)]
        assert self.apply(DropState(sid, layer)) == len(gone)
        for each in gone:
            del held[each]
        if not held:
            self.states.pop(sid, None)

    @rule(data=st.data(), really=st.integers(0, 3))
    def drop(self, data, really) -> None:
        """One of the units, or a prefix, session or key that is not there."""
        absent = [DropPrefix(b"no"), DropSession(b"no"), DeleteKeys(0, (b"no", b"no"))]
        unit = data.draw(st.sampled_from(absent if really else list(self.store.recency) or absent))
        if unit in absent:
            assert self.apply(unit) == 0
        else:
            self.evict(unit)

    def evict(self, unit: Unit) -> None:
        """Drop a unit that is there; it gives back what it counts for, and all of it goes."""
        used, sessions = self.store.bytes_used, self.store.session_count
        size = self.store.size(unit)
        assert self.apply(unit)
        self.forget(unit)
        assert self.store.bytes_used == used - size
        assert self.store.session_count == sessions - sessions_of(unit)

    @precondition(lambda self: self.prefixes)
    @rule(data=st.data(), side=st.integers(0, 1))
    def drop_half_a_prefix(self, data, side) -> None:
        ns = data.draw(st.sampled_from(sorted(self.prefixes)))
        self.apply(DropSession(sides(ns)[side]), PionError)

    @rule(
        db=st.sampled_from([0, 15, 16]),
        key=names,
        value=st.binary(max_size=40),
        view=st.booleans(),
        expires=st.none() | st.integers(1, 9),
    )
    def set_key(self, db, key, value, view, expires) -> None:
        stored = memoryview(bytearray(value)) if view else value
        mutation = SetKey(db, key, stored, expires)
        if db == 16:
            self.apply(mutation, PionError)
        else:
            assert self.apply(mutation) == 1
            self.keys[db, key] = value, expires

    @rule(db=st.sampled_from([0, 15]), key=names, expires=st.none() | st.integers(1, 9))
    def set_expiry(self, db, key, expires) -> None:
        assert self.apply(SetExpiry(db, key, expires)) == ((db, key) in self.keys)
        if (db, key) in self.keys:
            self.keys[db, key] = self.keys[db, key][0], expires

    @rule(db=st.sampled_from([0, 15]), keys=st.lists(names, max_size=4))
    def delete_keys(self, db, keys) -> None:
        gone = {key for key in keys if (db, key) in self.keys}
        assert self.apply(DeleteKeys(db, tuple(keys))) == len(gone)
        for key in gone:
            del self.keys[db, key]

    @rule(db=st.sampled_from([None, 0, 15]))
    def flush(self, db) -> None:
        gone = [at for at in self.keys if db in (None, at[0])]
        assert self.apply(FlushDb(db)) == len(gone)
        for at in gone:
            del self.keys[at]

    @rule(now=st.integers(0, 10), limit=st.integers(1, 4))
    def expire(self, now, limit) -> None:
        due = {at for at, (_, expires) in self.keys.items() if expires and expires <= now}
        swept = self.store.keys.expired(now, limit)
        gone = {(mutation.db, key) for mutation in swept for key in mutation.keys}
        assert gone <= due
        assert len(gone) == min(limit, len(due))
        for mutation in swept:
            self.apply(mutation)
        for at in gone:
            del self.keys[at]

    @rule(data=st.data(), count=st.integers(0, 4))
    def read_anywhere(self, data, count) -> None:
        sid = data.draw(st.sampled_from([*sorted(self.sessions), b"nowhere"]))
        layer, start = data.draw(st.integers(-1, 3)), data.draw(st.integers(-1, TOKENS))
        self.read(sid, layer, start, start + count, data)

    @precondition(lambda self: any(session.rows for session in self.sessions.values()))
    @rule(data=st.data(), count=st.integers(1, 6))
    def read_what_is_there(self, data, count) -> None:
        """From a row that is there; some that follow it may be missing."""
        sid = data.draw(st.sampled_from(sorted(s for s, m in self.sessions.items() if m.rows)))
        layer, start = data.draw(st.sampled_from(sorted(self.sessions[sid].rows)))
        self.read(sid, layer, start, start + count, data)

    def read(self, sid: bytes, layer: int, start: int, end: int, data: st.DataObject) -> None:
        rows = self.sessions[sid].rows if sid in self.sessions else {}
        wanted = [(layer, row) for row in range(start, end)]
        if not wanted or any(at not in rows for at in wanted):
            with pytest.raises(PionError):
                self.store.view(sid, layer, start, end)
            return
        view = self.store.view(sid, layer, start, end)
        expected = b"".join(rows[at] for at in wanted)
        assert view.nbytes == len(expected)
        assert view.format == self.sessions[sid].schema.layer(layer)
        self.views.append((view.pieces, expected))
        ids = data.draw(st.lists(st.sampled_from([row for _, row in wanted]), min_size=1))
        gathered = b"".join(self.store.gather(sid, layer, ids).pieces)
        assert gathered == b"".join(rows[layer, row] for row in ids)

    @rule(order=st.permutations(NAMESPACES), fingerprint=fingerprints)
    def match(self, order, fingerprint) -> None:
        hits = 0
        for ns in order:
            there = self.prefixes.get(ns)
            if not there or not self.sealed(ns) or fingerprint not in (None, there.fingerprint):
                break
            hits += 1
        assert self.store.match(order, fingerprint, 0) == hits
        ours = {DropPrefix(ns) for ns in order[:hits]}
        used = [unit for unit in self.store.recency if unit in ours]
        assert used == [DropPrefix(ns) for ns in reversed(order[:hits])]

    # Invariants

    def sealed(self, ns: bytes) -> bool:
        declared = self.prefixes[ns].declared
        return declared is None or all(
            (layer, row) in self.sessions[sid].rows
            for sid in sides(ns)
            for layer in range(declared.layers)
            for row in range(declared.tokens)
        )

    @invariant()
    def rows_are_those_of_the_model(self) -> None:
        assert set(self.store.sessions) == set(self.sessions)
        for sid, model in self.sessions.items():
            session = self.store.sessions[sid]
            assert session.schema == model.schema
            assert sum(session.layer(i).rows for i in range(session.layers)) == len(model.rows)
            for (layer, row), data in model.rows.items():
                assert session.layer(layer).pieces(row, row + 1) == (data,)

    @invariant()
    def prefixes_are_those_of_the_model(self) -> None:
        assert set(self.store.prefixes) == set(self.prefixes)
        for ns, model in self.prefixes.items():
            prefix = self.store.prefixes[ns]
            assert (prefix.keys_sid, prefix.values_sid) == sides(ns)
            assert prefix.fingerprint == model.fingerprint
            assert prefix.prefill_ms == model.prefill_ms
            assert prefix.sealed == self.sealed(ns)
            assert self.store.parent(ns) == model.parent
            layer_0 = [row for layer, row in self.sessions[prefix.keys_sid].rows if layer == 0]
            assert prefix.tokens == (model.declared.tokens if model.declared else len(layer_0))
            if model.hashes is not None:
                assert prefix.blocks is not None
                assert prefix.blocks.hashes.tolist() == model.hashes.tolist()
                assert prefix.sorted_hashes.tolist() == sorted(model.hashes.tolist())

    @invariant()
    def states_are_those_of_the_model(self) -> None:
        assert {
            sid: {layer: bytes(blob) for layer, blob in held.blobs.items()}
            for sid, held in self.store.recurrent.items()
        } == self.states

    @invariant()
    def keys_are_those_of_the_model(self) -> None:
        for db in (0, 15):
            assert self.store.keys.count(db) == sum(at[0] == db for at in self.keys)
        for (db, key), (value, expires) in self.keys.items():
            entry = self.store.keys.get(db, key, 0)
            assert entry is not None
            assert (bytes(entry.value), entry.expires_ms) == (value, expires)
            if expires is not None:
                assert self.store.keys.get(db, key, expires - 1) is not None
                assert self.store.keys.get(db, key, expires) is None

    @invariant()
    def totals_are_those_of_the_model(self) -> None:
        sessions = sum(session.nbytes(sid) for sid, session in self.sessions.items())
        tables = sum(2 * p.hashes.nbytes for p in self.prefixes.values() if p.hashes is not None)
        blobs = [blob for held in self.states.values() for blob in held.values()]
        states = sum(SID_BYTES + len(sid) for sid in self.states)
        states += sum(BLOB_BYTES + len(blob) for blob in blobs)
        keys = sum(KEY_BYTES + len(key) + len(value) for (_, key), (value, _) in self.keys.items())
        assert self.store.row_bytes == sum(
            len(row) for session in self.sessions.values() for row in session.rows.values()
        )
        assert self.store.bytes_used == sessions + tables + states + keys
        assert self.store.recurrent_count == len(blobs)
        assert self.store.recurrent_bytes == sum(map(len, blobs))
        assert self.store.session_count == len(self.sessions)
        assert self.store.prefix_count == len(self.prefixes)
        assert self.store.prefix_tokens == sum(p.tokens for p in self.store.prefixes.values())
        assert self.store.bytes_used == sum(map(self.store.size, self.store.recency))

    @invariant()
    def every_unit_can_be_evicted_once(self) -> None:
        owned = {sid for ns in self.prefixes for sid in sides(ns)}
        assert set(self.store.recency) == {
            *(DropPrefix(ns) for ns in self.prefixes),
            *(DropSession(sid) for sid in self.sessions if sid not in owned),
            *(DropState(sid) for sid in self.states if sid not in self.prefixes),
            *(key_unit(db, key) for db, key in self.keys),
        }

    @invariant()
    def views_outlive_what_came_after(self) -> None:
        for pieces, expected in self.views[-8:]:
            assert b"".join(pieces) == expected

    def teardown(self) -> None:
        for pieces, expected in self.views:
            assert b"".join(pieces) == expected


def fits(layers: int, schema: Schema) -> bool:
    return 1 <= layers <= (MAX_LAYERS if schema.uniform else len(schema.formats))


def broken(block: RowBlock, defect: str) -> RowBlock:
    """The block with one thing wrong."""
    data, start, count = block.data, block.start, block.count
    if defect == "short":
        data = data[:-1]
    elif defect == "long":
        data = memoryview(bytes(data) + b"x")
    elif defect == "negative":
        start = -1
    elif defect == "empty":
        data, count = data[:0], 0
    else:
        start = 2**31 - count + 1
    return RowBlock(block.sid, block.layer, start, count, data)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
