"""Invariant: a record gives back the mutation it was made of, and payloads are never copied.

Attacked with every kind of mutation, and with awkward names and sizes.
"""

from __future__ import annotations

import typing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stories import NARROW, WIDE, block, register, story

from pion_server.errors import PionError
from pion_server.journal.frames import (
    FRAME_BYTES,
    HEAD_MAGIC,
    TAIL_MAGIC,
    FileHeader,
    FileKind,
    read_file_header,
    read_frame,
)
from pion_server.journal.records import KINDS, decode, encode, payload_lengths
from pion_server.store import mutations as m

SALT = 77


def taken_apart(record: bytes) -> tuple[int, bytes, list[memoryview]]:
    """Kind, meta and payloads of a record, from its first frame."""
    frame = read_frame(record[:FRAME_BYTES], HEAD_MAGIC, SALT)
    assert frame is not None
    assert len(record) == frame.record_bytes
    meta = record[FRAME_BYTES : FRAME_BYTES + frame.meta]
    payloads, at = [], FRAME_BYTES + frame.meta
    for length in payload_lengths(meta):
        payloads.append(memoryview(record)[at : at + length])
        at += length
    return frame.kind, meta, payloads


def through_bytes(mutation: m.Mutation) -> m.Mutation:
    back, whole = decode(*taken_apart(b"".join(encode(1, 0, mutation, SALT))))
    assert whole
    return back


def plain(mutation: m.Mutation) -> object:
    """The mutation as something that compares by value."""
    if isinstance(mutation, m.RegisterPrefix) and mutation.blocks:
        table = (mutation.blocks.block_size, tuple(mutation.blocks.hashes.tolist()))
        return replace(mutation, blocks=table)  # type: ignore[arg-type]
    return mutation


def test_every_kind_of_mutation_has_one_number() -> None:
    assert {kind.mutation for kind in KINDS.values()} == set(typing.get_args(m.Mutation))
    assert len({kind.mutation for kind in KINDS.values()}) == len(KINDS)


@pytest.mark.parametrize("mutation", story(), ids=lambda mutation: type(mutation).__name__)
def test_a_mutation_comes_back(mutation: m.Mutation) -> None:
    assert plain(through_bytes(mutation)) == plain(mutation)


names = st.binary(max_size=40)
mutations = st.one_of(
    st.builds(m.SetKey, st.integers(0, 15), names, st.binary(max_size=20_000)),
    st.builds(m.SetKey, st.integers(0, 15), names, names, st.integers(0, 2**63)),
    st.builds(m.SetExpiry, st.integers(0, 15), names, st.none() | st.integers(0, 2**63)),
    st.builds(m.DeleteKeys, st.integers(0, 15), st.lists(names).map(tuple)),
    st.builds(m.FlushDb, st.none() | st.integers(0, 15)),
    st.builds(m.CreateSession, names, st.sampled_from([NARROW, WIDE])),
    st.builds(m.DropSession, names),
    st.builds(m.DropPrefix, names),
    st.builds(
        m.RegisterPrefix,
        names,
        st.sampled_from([NARROW, WIDE]),
        st.sampled_from([NARROW, WIDE]),
        st.none() | st.builds(m.Declaration, st.integers(1, 99), st.integers(1, 2**31 - 1)),
        st.none() | names,
        st.none()
        | st.builds(
            m.BlockTable,
            st.integers(1, 2**32),
            st.lists(st.integers(0, 2**64 - 1)).map(lambda each: np.array(each, np.uint64)),
        ),
    ),
    st.builds(
        m.StoreRows,
        st.lists(
            st.builds(
                m.RowBlock,
                names,
                st.integers(0, 4095),
                st.integers(0, 2**31),
                st.integers(1, 2**31),
                st.binary(max_size=300).map(memoryview),
            )
        ).map(tuple),
    ),
)


@given(mutations)
def test_any_mutation_comes_back(mutation: m.Mutation) -> None:
    assert plain(through_bytes(mutation)) == plain(mutation)


def test_a_measured_prefill_time_is_not_kept() -> None:
    mutation = replace(register(b"a"), prefill_ms=12.5)
    assert through_bytes(mutation).prefill_ms is None  # type: ignore[union-attr]


def test_payloads_are_in_a_record_by_reference() -> None:
    rows = m.StoreRows((block(b"s", 0, 0, 2000, 16, 1), block(b"s", 1, 0, 5, 16, 2)))
    value = memoryview(bytearray(100_000))
    assert [id(each) for each in encode(1, 0, rows, SALT)[1:-1]] == [
        id(each.data) for each in rows.blocks
    ]
    assert encode(1, 0, m.SetKey(0, b"k", value), SALT)[1] is value


def test_a_hash_table_that_is_a_slice_of_another_comes_back() -> None:
    every_other = np.arange(10, dtype=np.uint64)[::2]
    back = through_bytes(replace(register(b"a"), blocks=m.BlockTable(4, every_other)))
    assert back.blocks.hashes.tolist() == [0, 2, 4, 6, 8]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "mutation",
    [
        register(b"name"),
        m.SetKey(2, b"name", b"value"),
        m.StoreRows((block(b"name", 0, 0, 2, 8, 1),)),
    ],
    ids=lambda mutation: type(mutation).__name__,
)
def test_with_a_damaged_payload_it_still_says_what_it_was_about(mutation: m.Mutation) -> None:
    kind, meta, payloads = taken_apart(b"".join(encode(1, 0, mutation, SALT)))
    damaged = bytearray(payloads[0])
    damaged[-1] ^= 1
    named, whole = decode(kind, meta, [memoryview(damaged), *payloads[1:]])
    assert not whole
    assert b"name" in repr(named).encode()
    assert bytes(payloads[0]).hex() not in repr(named)


def test_a_kind_of_a_newer_version_is_refused_in_words() -> None:
    _, meta, _ = taken_apart(b"".join(encode(1, 0, m.FlushDb(0), SALT)))
    with pytest.raises(PionError, match="record kind 999 is not known to this version"):
        decode(999, meta, [])


def test_a_file_header_survives_the_loss_of_either_copy() -> None:
    header = FileHeader(FileKind.LOG, 5, SALT)
    packed = header.pack()
    for i in range(len(packed)):
        damaged = bytearray(packed)
        damaged[i] ^= 0xFF
        assert read_file_header(bytes(damaged)) == header
    for cut in range(len(packed) // 2):
        assert read_file_header(packed[:cut]) is None


def test_a_frame_with_any_bit_flipped_is_none() -> None:
    record = b"".join(encode(9, 8, m.FlushDb(None), SALT))
    for data, magic in ((record[:FRAME_BYTES], HEAD_MAGIC), (record[-FRAME_BYTES:], TAIL_MAGIC)):
        assert read_frame(data, magic, SALT) is not None
        assert read_frame(data, magic, SALT + 1) is None
        for bit in range(8 * FRAME_BYTES):
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            assert read_frame(bytes(damaged), magic, SALT) is None
