"""How the tests of this folder drive a decoder: as a socket would, in reads of any size."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import chain, cycle
from typing import Any, TypeAlias
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import strategies as st

from pion_server.errors import ProtocolError
from pion_server.wire import receive
from pion_server.wire.replies import INCOMPLETE, ReplyDecoder
from pion_server.wire.requests import RequestDecoder

WHOLE = (1 << 30,)
Decode: TypeAlias = Callable[..., list[Any]]
# The last one bounds the time of an example; that all bytes come one by one is tried elsewhere.
sizes_of_reads = st.lists(st.sampled_from([1, 2, 3, 7, 50, 4_000, 30_000, 200_000])).map(
    lambda sizes: [*sizes, 5_003]
)


def noise(tokens: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Pieces of frames in any order, or any bytes."""
    return st.lists(tokens, max_size=30).map(b"".join) | st.binary(max_size=300)


def little_reserved() -> AbstractContextManager[Any]:
    """No more of a large bulk is reserved than scratch has, which receive_all checks at every
    buffer that is handed out."""
    return patch.multiple(receive, RESERVE=receive.SCRATCH, MAPPED_FROM=receive.SCRATCH)


def receive_all(
    decoder: receive.Receiver,
    take: Callable[[], Any],
    nothing: object,
    data: bytes,
    sizes: Iterable[int],
) -> Iterator[Any]:
    """What `take` gives (but for `nothing`) while `data` arrives in reads of `sizes`, over and
    over; a ProtocolError ends it, as its text. No buffer may be larger than the reserve, or than
    what has arrived so far."""
    source = memoryview(data)
    arrived = 0
    for size in chain.from_iterable(cycle((tuple(sizes),))):
        try:
            while (item := take()) is not nothing:
                yield item
        except ProtocolError as error:
            yield str(error)
            return
        if arrived == len(data):
            return
        buffer = decoder.get_buffer()
        assert len(buffer) > 0
        if sys.platform == "linux":  # elsewhere address space is taken, see LargeBulk
            assert len(buffer) <= max(receive.SCRATCH, receive.RESERVE, arrived)
        count = min(size, len(buffer), len(data) - arrived)
        buffer[:count] = source[arrived : arrived + count]
        arrived += count
        decoder.buffer_updated(count)


@pytest.fixture(scope="session")
def requests_of() -> Callable[..., list[Any]]:
    """(decoder, data, sizes) -> its requests, arguments as bytes, and the text of an error."""

    def run(decoder: RequestDecoder, data: bytes, sizes: Iterable[int] = WHOLE) -> list[Any]:
        return [
            item if isinstance(item, str) else [bytes(argument) for argument in item]
            for item in receive_all(decoder, decoder.next_request, None, data, sizes)
        ]

    return run


@pytest.fixture(scope="session")
def replies_of() -> Callable[..., list[Any]]:
    """(decoder, data, sizes) -> its replies, and the text of an error."""

    def run(decoder: ReplyDecoder, data: bytes, sizes: Iterable[int] = WHOLE) -> list[Any]:
        return list(receive_all(decoder, decoder.next_reply, INCOMPLETE, data, sizes))

    return run


@pytest.fixture(scope="session")
def address_of() -> Callable[[memoryview], int]:
    """Where a view's memory starts, without keeping a hold on it."""
    return lambda view: int(np.frombuffer(view, np.uint8).ctypes.data)
