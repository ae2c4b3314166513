"""Mutations as records, and back.

A mutation is fields (msgpack, small) and payloads (its large bytes, by reference). `meta` is
[fields, [[length, xxh3_64] of each payload]], so what a record is about can be read without, and in
spite of, its payloads. KINDS is the table of formats: a number means one layout for ever, a changed
layout is a new number. Not kept: prefill_ms, which is a measurement of a run that is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgpack
import numpy as np
from xxhash import xxh3_64_intdigest

from pion_server.codecs import table
from pion_server.errors import PionError
from pion_server.journal.disk import SMALL, Buffer
from pion_server.journal.frames import wrap
from pion_server.store import mutations as m
from pion_server.store.schema import LayerFormat, Schema

Fields: TypeAlias = list[Any]
Payloads: TypeAlias = list[memoryview]

# The last record of a snapshot: whoever reads it has them all.
END = 0


@dataclass(frozen=True, slots=True)
class Kind:
    """How one kind of mutation is taken apart and put together. `build` is given no payloads where
    they are damaged, and then makes a mutation that only names what it was about."""

    mutation: type[m.Mutation]
    take: Callable[[Any], tuple[Fields, list[Buffer]]]
    build: Callable[[Fields, Payloads], m.Mutation]


def encode(sequence: int, synced: int, mutation: m.Mutation | None, salt: int) -> list[Buffer]:
    """The buffers that make the record of a mutation (None: the end of a snapshot); payloads
    are in it by reference."""
    number, fields, payloads = _take(mutation) if mutation is not None else (END, [], [])
    meta = msgpack.packb([fields, [[len(each), xxh3_64_intdigest(each)] for each in payloads]])
    head, tail = wrap(number, sequence, synced, meta, sum(map(len, payloads)), salt)
    return [head, *payloads, tail]


def _take(mutation: m.Mutation) -> tuple[int, Fields, list[Buffer]]:
    number = _NUMBERS[type(mutation)]
    return number, *KINDS[number].take(mutation)


def payload_bytes(mutation: m.Mutation) -> int:
    """About how much memory a mutation holds on to."""
    match mutation:
        case m.StoreRows(blocks):
            return sum(block.data.nbytes for block in blocks)
        case m.SetKey(value=large) | m.StoreState(data=large):
            return len(large)
    return 0


def payload_lengths(meta: bytes) -> list[int]:
    """The length of each payload of a record, in the order they lie in it."""
    return [length for length, _ in msgpack.unpackb(meta)[1]]


def decode(number: int, meta: bytes, payloads: Payloads) -> tuple[m.Mutation, bool]:
    """The mutation of a record, and whether its payloads are what was written. Where they are not,
    the mutation has none and only names what it was about.

    Raises PionError where the record is whole, but of a newer version of Pion.
    """
    kind = KINDS.get(number)
    if kind is None:
        raise PionError(f"record kind {number} is not known to this version of Pion")
    fields, sums = msgpack.unpackb(meta)
    whole = all(
        xxh3_64_intdigest(payload) == expected
        for payload, (_, expected) in zip(payloads, sums, strict=True)
    )
    empty = [memoryview(b"")] * len(payloads)
    return kind.build(fields, payloads if whole else empty), whole


# Schemas


def _pack_schema(schema: Schema) -> Fields:
    return [schema.uniform, [[each.codec.number, each.dim] for each in schema.formats]]


def _schema(fields: Fields) -> Schema:
    uniform, formats = fields
    made = tuple(LayerFormat(table.by_number(number), dim) for number, dim in formats)
    return Schema(made, uniform)


# Rows


def _take_rows(mutation: m.StoreRows) -> tuple[Fields, list[Buffer]]:
    fields = [[block.sid, block.layer, block.start, block.count] for block in mutation.blocks]
    return fields, [block.data for block in mutation.blocks]


def _build_rows(fields: Fields, payloads: Payloads) -> m.StoreRows:
    return m.StoreRows(
        tuple(
            m.RowBlock(sid, layer, start, count, data)
            for (sid, layer, start, count), data in zip(fields, payloads, strict=True)
        )
    )


# Namespaces


def _take_register(mutation: m.RegisterPrefix) -> tuple[Fields, list[Buffer]]:
    declared, blocks = mutation.declared, mutation.blocks
    fields: Fields = [
        mutation.namespace,
        _pack_schema(mutation.keys),
        _pack_schema(mutation.values),
        declared and [declared.layers, declared.tokens],
        mutation.fingerprint,
        blocks and blocks.block_size,
        mutation.parent,
    ]
    return fields, [_hash_bytes(blocks.hashes)] if blocks else []


def _hash_bytes(hashes: m.Hashes) -> memoryview:
    return np.ascontiguousarray(hashes, "<u8").view(np.uint8).data


def _build_register(fields: Fields, payloads: Payloads) -> m.RegisterPrefix:
    namespace, keys, values, declared, fingerprint, block_size, parent = fields
    return m.RegisterPrefix(
        namespace,
        _schema(keys),
        _schema(values),
        declared and m.Declaration(*declared),
        fingerprint,
        m.BlockTable(block_size, np.frombuffer(payloads[0], "<u8")) if payloads else None,
        parent=parent,
    )


# Single values


def _take_key(mutation: m.SetKey) -> tuple[Fields, list[Buffer]]:
    return [mutation.db, mutation.key, mutation.expires_ms], [mutation.value]


def _build_key(fields: Fields, payloads: Payloads) -> m.SetKey:
    db, key, expires_ms = fields
    return m.SetKey(db, key, _kept(payloads[0]), expires_ms)


def _kept(value: memoryview) -> bytes | memoryview:
    return bytes(value) if value.nbytes <= SMALL else value


KINDS: dict[int, Kind] = {
    1: Kind(
        m.CreateSession,
        lambda mutation: ([mutation.sid, _pack_schema(mutation.schema)], []),
        lambda fields, _: m.CreateSession(fields[0], _schema(fields[1])),
    ),
    2: Kind(m.StoreRows, _take_rows, _build_rows),
    3: Kind(m.RegisterPrefix, _take_register, _build_register),
    4: Kind(
        m.DropPrefix,
        lambda mutation: ([mutation.namespace], []),
        lambda fields, _: m.DropPrefix(*fields),
    ),
    5: Kind(
        m.DropSession,
        lambda mutation: ([mutation.sid], []),
        lambda fields, _: m.DropSession(*fields),
    ),
    6: Kind(m.SetKey, _take_key, _build_key),
    7: Kind(
        m.SetExpiry,
        lambda mutation: ([mutation.db, mutation.key, mutation.expires_ms], []),
        lambda fields, _: m.SetExpiry(*fields),
    ),
    8: Kind(
        m.DeleteKeys,
        lambda mutation: ([mutation.db, list(mutation.keys)], []),
        lambda fields, _: m.DeleteKeys(fields[0], tuple(fields[1])),
    ),
    9: Kind(
        m.FlushDb,
        lambda mutation: ([mutation.db], []),
        lambda fields, _: m.FlushDb(*fields),
    ),
    10: Kind(
        m.StoreState,
        lambda mutation: ([mutation.sid, mutation.layer], [mutation.data]),
        lambda fields, payloads: m.StoreState(fields[0], fields[1], _kept(payloads[0])),
    ),
    11: Kind(
        m.DropState,
        lambda mutation: ([mutation.sid, mutation.layer], []),
        lambda fields, _: m.DropState(*fields),
    ),
}
_NUMBERS = {kind.mutation: number for number, kind in KINDS.items()}
