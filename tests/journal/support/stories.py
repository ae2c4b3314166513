"""Mutations of every kind, for tests: one fixed story, and what hypothesis makes up."""

from __future__ import annotations

import numpy as np

from pion_server.codecs import table
from pion_server.store import mutations as m
from pion_server.store.schema import LayerFormat, Schema

NARROW = Schema.same(LayerFormat(table.by_name("fp16"), 4))
WIDE = Schema.each((LayerFormat(table.by_name("fp32"), 3), LayerFormat(table.by_name("bf16"), 8)))


def block(sid: bytes, layer: int, start: int, count: int, row_bytes: int, seed: int) -> m.RowBlock:
    """Rows that no other seed has."""
    data = np.random.default_rng(seed).integers(0, 256, count * row_bytes, np.uint8).tobytes()
    return m.RowBlock(sid, layer, start, count, memoryview(data))


def prefix_rows(namespace: bytes, seed: int, start: int = 0, count: int = 3) -> m.StoreRows:
    """Rows of layer 0, on both sides of a namespace of NARROW sessions."""
    return m.StoreRows(
        tuple(
            block(namespace + side, 0, start, count, 8, seed + i)
            for i, side in enumerate((b"_pk", b"_pv"))
        )
    )


def register(
    namespace: bytes, tokens: int | None = 3, parent: bytes | None = None
) -> m.RegisterPrefix:
    declared = None if tokens is None else m.Declaration(1, tokens)
    hashes = m.BlockTable(2, np.arange(3, dtype=np.uint64) + len(namespace))
    return m.RegisterPrefix(namespace, NARROW, NARROW, declared, b"model", hashes, parent=parent)


def story() -> list[m.Mutation]:
    """Every kind of mutation, with overwriting and dropping, in an order that may be carried out
    from nothing. What is dropped comes back as something else."""
    return [
        m.SetKey(0, b"first", b"1"),
        register(b"a"),
        prefix_rows(b"a", 10),
        m.CreateSession(b"s", WIDE),
        m.StoreRows((block(b"s", 0, 0, 4, 12, 20), block(b"s", 1, 2, 2, 16, 21))),
        m.StoreRows((block(b"s", 0, 2, 1, 12, 22),)),
        m.SetKey(3, b"timed", memoryview(b"value of timed"), 1 << 60),
        m.SetExpiry(3, b"timed", None),
        register(b"b", tokens=None),
        prefix_rows(b"b", 30),
        m.DropPrefix(b"a"),
        register(b"a", tokens=6),
        prefix_rows(b"a", 40),
        m.SetKey(0, b"first", b"one"),
        m.SetKey(1, b"gone", b"x" * 100),
        m.FlushDb(1),
        m.SetKey(0, b"second", b""),
        m.DeleteKeys(0, (b"first", b"never")),
        m.CreateSession(b"t", NARROW),
        m.StoreRows((block(b"t", 5, 100, 2, 8, 50),)),
        m.DropSession(b"t"),
        prefix_rows(b"a", 60, start=3),
        m.SetKey(2, b"chunk-kv_bytes", b"tensor" * 9),
        m.SetKey(2, b"chunk-metadata", b"shape"),
        m.StoreState(b"a", 1, b"state of a"),
        m.StoreState(b"alone", 0, b"old"),
        m.StoreState(b"alone", 0, memoryview(b"new" * 10)),
        m.StoreState(b"alone", 7, b"seven"),
        m.DropState(b"alone", 7),
        register(b"child", tokens=2, parent=b"a"),
        m.SetKey(0, b"last", b"word"),
    ]
