"""Invariant: a large bulk is never copied, and memory follows what arrived, not what was declared.

The sender declares 4 GiB and sends 1 KB; someone keeps a view across a growth; a line of 60,000
bytes arrives byte by byte.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import psutil
import pytest

from pion_server.errors import ProtocolError
from pion_server.wire import receive
from pion_server.wire.blocks import Blocks
from pion_server.wire.limits import BY_REFERENCE, MAX_LINE, RESERVE, Limits
from pion_server.wire.replies import INCOMPLETE, ReplyDecoder
from pion_server.wire.requests import RequestDecoder

MIB = 1 << 20


def put(decoder: receive.Receiver, data: bytes) -> memoryview:
    """Receive `data` in one read; the buffer it went to."""
    buffer = decoder.get_buffer()
    buffer[: len(data)] = data
    decoder.buffer_updated(len(data))
    return buffer


def test_a_large_bulk_is_the_buffer_that_was_handed_out() -> None:
    decoder = RequestDecoder(Limits())
    put(decoder, b"*1\r\n$%d\r\nab" % MIB)
    assert decoder.next_request() is None
    buffer = decoder.get_buffer()
    assert len(buffer) == MIB - 2  # the whole rest, for one system call
    buffer[:] = bytes(range(256)) * (MIB // 256 - 1) + b"x" * 254
    decoder.buffer_updated(len(buffer))
    assert decoder.next_request() is None
    put(decoder, b"\r\n")
    request = decoder.next_request()
    assert request is not None
    payload = request[0]
    assert isinstance(payload, memoryview)
    assert (payload.format, payload.nbytes, payload.c_contiguous) == ("B", MIB, True)
    assert np.shares_memory(np.frombuffer(payload, np.uint8), np.frombuffer(buffer, np.uint8))
    assert bytes(payload[:2]) == b"ab"
    assert bytes(payload[2:]) == bytes(buffer)


@pytest.mark.parametrize("nbytes", [0, 1, BY_REFERENCE - 1, BY_REFERENCE, BY_REFERENCE + 1])
def test_small_bulks_are_bytes_and_large_ones_views(nbytes: int) -> None:
    decoder = RequestDecoder(Limits())
    put(decoder, b"*1\r\n$%d\r\n%b\r\n" % (nbytes, b"x" * nbytes))
    request = decoder.next_request()
    assert request is not None
    assert type(request[0]) is (bytes if nbytes < BY_REFERENCE else memoryview)
    assert bytes(request[0]) == b"x" * nbytes


def test_a_declared_length_takes_no_memory_before_its_bytes() -> None:
    decoder = RequestDecoder(Limits())
    process = psutil.Process()
    before = process.memory_info()
    put(decoder, b"*1\r\n$%d\r\n%b" % (4 << 30, b"x" * 1024))
    assert decoder.next_request() is None
    buffer = decoder.get_buffer()
    after = process.memory_info()
    assert after.rss - before.rss < 16 * MIB
    if sys.platform == "linux":  # elsewhere address space is taken, see LargeBulk
        assert len(buffer) == RESERVE - 1024
        assert after.vms - before.vms < RESERVE + 16 * MIB


def test_a_growing_bulk_keeps_its_bytes_and_is_not_copied(
    address_of: Callable[[memoryview], int],
) -> None:
    nbytes = 5 * MIB + 321
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, nbytes, np.uint8).tobytes()
    decoder = RequestDecoder(Limits())
    with patch.multiple(receive, RESERVE=MIB, MAPPED_FROM=MIB, BLOCKS=Blocks()):
        put(decoder, b"*1\r\n$%d\r\n" % nbytes)
        assert decoder.next_request() is None
        at = 0
        while at < nbytes:
            buffer = decoder.get_buffer()
            last = address_of(buffer)
            if sys.platform == "linux":
                assert len(buffer) <= max(MIB, at)
            chunk = data[at : at + min(len(buffer), 700_000)]
            buffer[: len(chunk)] = chunk
            decoder.buffer_updated(len(chunk))
            at += len(chunk)
        put(decoder, b"\r\n")
        request = decoder.next_request()
    assert request is not None
    payload = request[0]
    assert isinstance(payload, memoryview)
    assert payload == data
    assert address_of(payload) <= last < address_of(payload) + nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="blocks move only on Linux")
def test_memory_someone_holds_is_never_moved_from_under_them() -> None:
    decoder = RequestDecoder(Limits())
    with patch.multiple(receive, RESERVE=MIB, MAPPED_FROM=MIB, BLOCKS=Blocks()):
        put(decoder, b"*1\r\n$%d\r\n" % (4 * MIB))
        assert decoder.next_request() is None
        held = decoder.get_buffer()[5:]  # a slice: it survives the release of what it is part of
        decoder.buffer_updated(MIB)
        with pytest.raises(BufferError):
            decoder.get_buffer()
        held[0] = 1


class SearchCount(mmap.mmap):
    """Scratch that adds up how many bytes its searches had to look at."""

    searched = 0

    def find(self, sub: bytes, start: int, end: int) -> int:  # type: ignore[override]
        found = super().find(sub, start, end)
        type(self).searched += max(0, (end if found < 0 else found) - start)
        return found


@pytest.mark.parametrize("start", [b"", b"*", b"*1\r\n$", b"*1\r\n"])
def test_a_long_request_line_is_searched_once(start: bytes) -> None:
    with patch.object(receive.mmap, "mmap", SearchCount):
        decoder = RequestDecoder(Limits())
    check_searched_once(decoder, decoder.next_request, start)


@pytest.mark.parametrize("start", [b"+", b":", b"*2\r\n$", b"%1\r\n+"])
def test_a_long_reply_line_is_searched_once(start: bytes) -> None:
    with patch.object(receive.mmap, "mmap", SearchCount):
        decoder = ReplyDecoder(Limits())
    check_searched_once(decoder, decoder.next_reply, start)


def check_searched_once(
    decoder: receive.Receiver, take: Callable[[], object], start: bytes
) -> None:
    SearchCount.searched = 0
    put(decoder, start)
    for _ in range(60_000):
        put(decoder, b"1")
        assert take() in (None, INCOMPLETE)
    assert SearchCount.searched < 12 * 60_000  # about 2 a byte, 8 where a header may be short


@pytest.mark.parametrize("make", [RequestDecoder, ReplyDecoder])
def test_after_an_error_input_is_dropped_and_the_error_stays(
    make: Callable[[Limits], RequestDecoder | ReplyDecoder],
) -> None:
    decoder = make(Limits())
    take = decoder.next_request if isinstance(decoder, RequestDecoder) else decoder.next_reply
    put(decoder, b"*x\r\n")
    with pytest.raises(ProtocolError) as first:
        take()
    for _ in range(5):
        put(decoder, b"*1\r\n$4\r\nPING\r\n" * 8000)  # more than scratch holds
        with pytest.raises(ProtocolError) as again:
            take()
        assert again.value is first.value


def test_receiving_without_decoding_is_refused_rather_than_lost() -> None:
    decoder = RequestDecoder(Limits())
    put(decoder, b"PING\r\n" * (receive.SCRATCH // 6))
    put(decoder, b"PI")
    with pytest.raises(RuntimeError, match="before what was received has been decoded"):
        decoder.get_buffer()
    requests = 0
    while decoder.next_request() is not None:
        requests += 1
    assert requests == receive.SCRATCH // 6
    put(decoder, b"NG\r\n")
    assert decoder.next_request() == [b"PING"]


def test_a_longest_line_fits_wherever_it_starts() -> None:
    decoder = RequestDecoder(Limits())
    for lead in range(0, receive.SCRATCH, 8111):
        put(decoder, b"A" * min(lead, MAX_LINE) + b"\n")
        while decoder.next_request() is not None:
            pass
        line = b"B" * MAX_LINE + b"\n"
        for part in (line[:40_000], line[40_000:MAX_LINE], line[MAX_LINE:]):
            put(decoder, part)
            request = decoder.next_request()
        assert request == [b"B" * MAX_LINE]
