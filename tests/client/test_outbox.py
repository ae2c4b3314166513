"""Invariant: whatever a socket takes at a time, the payloads leave in order, whole and once."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from pion_server.client.outbox import IOV_MAX, SEND_MAX, Outbox


class Drain:
    """A socket that takes what it is told to: None is `not now`."""

    def __init__(self, takes: Iterable[int | None]) -> None:
        self._takes = iter(takes)
        self.got = bytearray()

    def sendmsg(self, buffers: Iterable[Any]) -> int:
        take = next(self._takes, 1 << 30)
        if take is None:
            raise BlockingIOError
        offered = list(buffers)
        assert 0 < len(offered) <= IOV_MAX
        assert sum(map(len, offered)) <= SEND_MAX
        taken = b"".join(offered)[:take]
        self.got += taken
        return len(taken)


def drained(payloads: list[bytes], drain: Drain) -> bytes:
    outbox = Outbox(payloads)
    while outbox:
        outbox.send(cast(socket.socket, drain))
    assert outbox.sent
    return bytes(drain.got)


@given(
    st.lists(st.binary(max_size=9), max_size=40),
    st.lists(st.one_of(st.none(), st.integers(0, 30)), max_size=60),
)
def test_any_partial_sends(payloads: list[bytes], takes: list[int | None]) -> None:
    assert drained(payloads, Drain(takes)) == b"".join(payloads)


def test_more_payloads_than_one_call_takes() -> None:
    payloads = [b"%d," % number for number in range(3 * IOV_MAX + 1)]
    assert drained(payloads, Drain([5, None, 100_000])) == b"".join(payloads)


def test_more_bytes_than_one_call_takes() -> None:
    large = bytes(SEND_MAX - 1)
    payloads = [b"head", large, b"", b"middle", large + large, b"tail"]
    assert drained(payloads, Drain([3, SEND_MAX])) == b"".join(payloads)


def test_a_peer_that_is_gone_ends_the_sending() -> None:
    here, there = socket.socketpair()
    there.close()
    with here:
        outbox = Outbox([b"lost"])
        outbox.send(here)
        assert not outbox
        assert not outbox.sent
