"""Invariant: replies leave in the order of their slots, made no sooner than the transport wants
them, and no flush goes on for longer than its turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion_server.net import outbox
from pion_server.net.outbox import Outbox
from pion_server.wire.encode import encode_reply

SMALL, TURN, PIECE = 16, 1024, 4096


@pytest.fixture(scope="module", autouse=True)
def _scaled_down() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outbox, "BY_REFERENCE", SMALL)
        patch.setattr(outbox, "TURN", TURN)
        patch.setattr(outbox, "PIECE", PIECE)
        yield


class Transport:
    """Takes what is written, and pauses the outbox once it holds `room` bytes."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.outbox = Outbox(cast(Any, self), encode_reply)
        self.written: list[bytes | memoryview] = []

    def write(self, data: bytes | memoryview) -> None:
        self.written.append(data)
        self.outbox.writable = len(self) < self.room

    def __len__(self) -> int:
        return sum(map(len, self.written))

    @property
    def data(self) -> bytes:
        return b"".join(self.written)

    def drain(self) -> None:
        """The peer took everything; flush until there is no more to do."""
        for _ in range(1000):
            self.room, self.outbox.writable = len(self) + self.room, True
            if not self.outbox.flush() and self.outbox.writable:
                return
        pytest.fail("flushing never ends")


SIZES = st.sampled_from([1, 5, SMALL - 1, SMALL, 700, TURN, PIECE, PIECE + 1, 2 * PIECE + 7])
REPLIES = st.lists(st.lists(SIZES, min_size=1, max_size=3), min_size=1, max_size=6)


@given(replies=REPLIES, room=st.sampled_from([1, 900, PIECE, 1 << 40]), order=st.randoms())
def test_any_replies_in_any_order_of_getting_ready(
    replies: list[list[int]], room: int, order: Any
) -> None:
    transport = Transport(room)
    slots = [transport.outbox.reserve() for _ in replies]
    pieces = [[bytes([i + 1]) * size for size in sizes] for i, sizes in enumerate(replies)]
    ready = list(range(len(replies)))
    order.shuffle(ready)
    for number, i in enumerate(ready):
        slots[i].pieces = iter(pieces[i])
        transport.drain()
        done = set(ready[: number + 1])
        prefix = next((j for j in range(len(replies)) if j not in done), len(replies))
        assert transport.data == b"".join(b"".join(reply) for reply in pieces[:prefix])
    assert len(transport.outbox) == 0
    assert all(len(part) <= max(PIECE, TURN) for part in transport.written)


def counted(pieces: list[bytes], made: list[int]) -> Iterator[bytes]:
    for i, piece in enumerate(pieces):
        made.append(i)
        yield piece


def test_nothing_is_made_for_a_transport_that_is_full() -> None:
    transport, made = Transport(room=1), list[int]()
    transport.outbox.reserve().pieces = counted([b"x" * TURN] * 8, made)
    for taken in range(1, 4):
        transport.outbox.flush()
        assert not transport.outbox.writable
        assert len(made) == taken
        assert not transport.outbox.flush()
        assert len(made) == taken
        transport.outbox.writable = True


def test_a_flush_ends_with_its_turn_though_the_transport_takes_everything() -> None:
    transport, made = Transport(), list[int]()
    transport.outbox.reserve().pieces = counted([b"x" * (TURN // 2)] * 20, made)
    for turn in range(1, 11):
        assert transport.outbox.flush()
        assert len(made) == 2 * turn
    assert not transport.outbox.flush()
    assert len(transport) == 10 * TURN


def test_large_pieces_go_by_reference_and_small_ones_are_joined() -> None:
    transport = Transport()
    large = memoryview(bytearray(PIECE + 3))
    transport.outbox.reserve().pieces = iter([b"a", b"b", large, b"c", b"d"])
    transport.drain()
    assert [len(part) for part in transport.written[:2]] == [2, PIECE]
    assert transport.data == b"ab" + bytes(large) + b"cd"
    large[0] = 7
    assert transport.written[1][0] == 7
