"""One table of names in shared memory: one process writes it, any number read it without a lock.

    header   the number of rebuilds and, in the lowest byte, the binary logarithm of the size
    areas    two of them, in turn the table itself and where the next one is built

A slot is written in one copy and ends in a checksum, so a reader that comes in between knows. Names
are digests, and a slot is found by probing on from where the digest points; one that is not free
stays so (removed names leave a grave), hence a reader passes by everything that was there when it
began. Graves go, and the table grows, by building it anew in the other area: a reader that found
nothing looks again if that has happened meanwhile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from mmap import mmap
from struct import Struct

from xxhash import xxh3_64_intdigest

from pion_server.team import Listing

DIGEST = 16
_BODY = Struct("<16s 64s Q d B B 22x")  # digest, fingerprint and its length, tokens, ms, state
_SUM = Struct("<Q")
SLOT = _BODY.size + _SUM.size
HEADER = 64
MIN_BITS = 8
MAX_BITS = 17
AREA = SLOT << MAX_BITS
# Names that a table takes: half of the slots, so that a name is a few slots from where it points.
CAPACITY = 1 << (MAX_BITS - 1)
# A slot that a living process is writing is whole again in well under a microsecond, unless the
# process has lost its processor meanwhile; what a dead one left behind stays as it is.
ATTEMPTS = 100

_FREE = bytes(SLOT)
_HELD, _NAMESPACE, _SEALED, _GRAVE = 1, 2, 4, 8


def encode(digest: bytes, listing: Listing) -> bytes:
    """A slot. `listing.worker` is not in it: the table is its worker's."""
    fingerprint = listing.fingerprint or b""
    state = _HELD | _NAMESPACE * listing.namespace | _SEALED * listing.sealed
    ms = math.nan if listing.prefill_ms is None else listing.prefill_ms
    return _signed(_BODY.pack(digest, fingerprint, listing.tokens, ms, len(fingerprint), state))


def decode(slot: bytes, worker: int) -> Listing | None:
    """What encode() was given; None for a slot that is not whole."""
    body = slot[: _BODY.size]
    if _SUM.unpack(slot[_BODY.size :])[0] != xxh3_64_intdigest(body):
        return None
    _, fingerprint, tokens, ms, length, state = _BODY.unpack(body)
    return Listing(
        worker,
        namespace=bool(state & _NAMESPACE),
        sealed=bool(state & _SEALED),
        tokens=tokens,
        prefill_ms=None if math.isnan(ms) else ms,
        fingerprint=fingerprint[:length] if length else None,
    )


def _signed(body: bytes) -> bytes:
    return body + _SUM.pack(xxh3_64_intdigest(body))


_BURIED = _signed(_BODY.pack(bytes(DIGEST), b"", 0, math.nan, 0, _GRAVE))


class Table:
    """A table at two places of `memory`: HEADER bytes at `header`, 2 * AREA bytes at `areas`. Fresh
    memory, all zeros, is a table without names."""

    def __init__(self, memory: mmap, header: int, areas: int, worker: int) -> None:
        self._memory = memory
        self._header = header
        self._areas = areas
        self._worker = worker

    def find(self, digest: bytes) -> Listing | None:
        """What is listed under a name."""
        while generation := self._generation():
            found = self._probe(digest, generation)
            if found is not None or self._generation() == generation:
                return found
        return None

    def _read(self, at: int) -> bytes:
        return self._memory[at : at + SLOT]

    def _generation(self) -> int:
        return int.from_bytes(self._memory[self._header : self._header + 8], "little")

    def _area(self, generation: int) -> tuple[int, int]:
        """Where the slots of a generation are, and how many less one."""
        return self._areas + AREA * (generation >> 8 & 1), (1 << (generation & 0xFF)) - 1

    def _probe(self, digest: bytes, generation: int) -> Listing | None:
        first, mask = self._area(generation)
        index = pointed_at(digest)
        for _ in range(mask + 1):
            at = first + SLOT * (index & mask)
            slot = self._read(at)
            if slot == _FREE:
                return None
            if slot.startswith(digest):
                return self._whole(at, digest)
            index += 1
        return None

    def _whole(self, at: int, digest: bytes) -> Listing | None:
        """A slot that may be in the middle of being written."""
        for attempt in range(ATTEMPTS):
            slot = self._read(at)
            if not slot.startswith(digest):
                return None
            if (listing := decode(slot, self._worker)) is not None:
                return listing
            time.sleep(0 if attempt < ATTEMPTS // 2 else 0.0001)
        return None


def pointed_at(digest: bytes) -> int:
    """Where the search for a name begins, before the size of the table is taken into account."""
    return int.from_bytes(digest[:4], "little")


class OwnTable(Table):
    """The table of the one process that writes it, which begins with refill()."""

    def __init__(self, memory: mmap, header: int, areas: int, worker: int) -> None:
        super().__init__(memory, header, areas, worker)
        self._first, self._mask = areas, 0  # the area that is written to
        self._places: dict[bytes, int] = {}  # digest -> address of its slot
        self._used = 0  # slots that are not free, graves included

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._places

    @property
    def full(self) -> bool:
        """Whether there is no room for another name."""
        return len(self._places) >= CAPACITY

    def put(self, digest: bytes, listing: Listing) -> None:
        """List a name, or what is new about it. The caller minds `full`."""
        slot = encode(digest, listing)
        if (at := self._places.get(digest)) is not None:
            self._write(at, slot)
        elif 4 * self._used < 3 * self._mask:
            self._insert(digest, slot)
        else:
            self._rebuild(
                [*((each, self._read(at)) for each, at in self._places.items()), (digest, slot)]
            )

    def remove(self, digest: bytes) -> None:
        """Take a name out; it need not be there."""
        if (at := self._places.pop(digest, None)) is not None:
            self._write(at, _BURIED)

    def refill(self, listings: Iterable[tuple[bytes, Listing]]) -> None:
        """List these names and no others."""
        slots = [(digest, encode(digest, listing)) for digest, listing in listings]
        if slots or self._generation():
            self._rebuild(slots)

    def _rebuild(self, slots: list[tuple[bytes, bytes]]) -> None:
        """Build in the other area, at most a third full, then turn the readers there."""
        bits = min(max(MIN_BITS, (3 * len(slots)).bit_length()), MAX_BITS)
        generation = ((self._generation() >> 8) + 1) << 8 | bits
        self._first, self._mask = self._area(generation)
        self._memory[self._first : self._first + (SLOT << bits)] = bytes(SLOT << bits)
        self._places, self._used = {}, 0
        for digest, slot in slots:
            self._insert(digest, slot)
        self._memory[self._header : self._header + 8] = generation.to_bytes(8, "little")

    def _insert(self, digest: bytes, slot: bytes) -> None:
        """Into the first slot that is free, or a grave."""
        index = pointed_at(digest)
        while (there := self._read(at := self._first + SLOT * (index & self._mask))) not in (
            _FREE,
            _BURIED,
        ):
            index += 1
        self._used += there == _FREE
        self._places[digest] = at
        self._write(at, slot)

    def _write(self, at: int, slot: bytes) -> None:
        self._memory[at : at + SLOT] = slot
