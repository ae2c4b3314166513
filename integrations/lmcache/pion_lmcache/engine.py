"""Chunks to and from a server, for every kind of LMCache adapter.

A chunk is one namespace, declared with its number of rows, so it is a hit only when all of it is
in; a checksum of each half travels with it in the namespace's block table. Nothing here raises for
what a server does: a chunk that did not come whole and unharmed is a miss, one that did not go out
is not stored. Batches go in pieces, each one round trip under a deadline of its own, so a batch of
any size moves, and what has come before a failure counts. All methods may be called by any thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import xxhash

from pion_lmcache.layout import Layout
from pion_lmcache.options import Options
from pion_lmcache.remote import Remote, Unavailable
from pion_lmcache.tally import Tally
from pion_server.client import Call, PionError, calls

# Large enough that a round trip between two pieces is nothing, small enough that one arrives
# within any sensible deadline.
PIECE_BYTES = 32 << 20


class Outcome(Enum):
    """What became of a chunk that was to be stored."""

    STORED = "stored"
    THERE = "there"  # before; nothing was sent
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A buffer and the name it is stored under.

    `fingerprint` differs where the bytes would mean something else. What is fetched may be shorter
    than `data` by a multiple of `step` bytes: len(data) where it may not.
    """

    name: bytes
    data: memoryview
    layout: Layout
    fingerprint: str
    step: int


class Engine:
    """Stores and fetches chunks."""

    def __init__(self, options: Options) -> None:
        self.remote = Remote(options)
        self.counts = Tally()

    def match(self, names: Sequence[bytes]) -> int:
        """How many leading names are there."""
        if not names:
            return 0
        try:
            (run,) = self.remote.ask([calls.prefix_match(names)])
        except Unavailable:
            return 0
        return 0 if self._refused(run) else min(run, len(names))

    def present(self, names: Sequence[bytes]) -> list[bool]:
        """For each name, whether it is there: one round trip, two where a name is missing."""
        run = self.match(names)
        found = [index < run for index in range(len(names))]
        rest = range(run + 1, len(names))
        if rest:
            with suppress(Unavailable):
                answers = self.remote.ask([calls.prefix_match([names[i]]) for i in rest])
                for index, answer in zip(rest, answers, strict=True):
                    found[index] = not self._refused(answer) and answer == 1
        return found

    def put(self, chunks: Sequence[Chunk]) -> list[Outcome]:
        """Store the chunks that are not there yet."""
        there = self.present([chunk.name for chunk in chunks])
        outcomes = [Outcome.THERE if known else Outcome.FAILED for known in there]
        absent = [index for index, known in enumerate(there) if not known]
        with suppress(Unavailable):
            for piece in _pieces(absent, chunks):
                sent = self._sent([chunks[index] for index in piece])
                for index, outcome in zip(piece, sent, strict=True):
                    outcomes[index] = outcome
        self.counts.add_each(outcome.value for outcome in outcomes)
        return outcomes

    def get(self, chunks: Sequence[Chunk], until: float = float("inf")) -> list[int]:
        """Receive the chunks into their buffers, for as long as time.monotonic() is before `until`.

        For each, how many bytes of its buffer are filled: 0 is a miss, and what the buffer then
        holds is undefined.
        """
        filled = [0] * len(chunks)
        with suppress(Unavailable):
            for piece in _pieces(range(len(chunks)), chunks):
                if time.monotonic() >= until:
                    break
                wanted = [chunks[index] for index in piece]
                for index, nbytes in zip(piece, self._received(wanted), strict=True):
                    filled[index] = nbytes
        hits = sum(nbytes > 0 for nbytes in filled)
        self.counts.add("hits", hits)
        self.counts.add("misses", len(chunks) - hits)
        self.counts.add("bytes_fetched", sum(filled))
        return filled

    def drop(self, names: Sequence[bytes]) -> int:
        """Delete chunks. How many were there."""
        try:  # a call for each, since each may live on another worker of the server
            answers = self.remote.ask([calls.prefix_drop(name) for name in names])
        except Unavailable:
            return 0
        return sum(0 if self._refused(dropped) else dropped for dropped in answers)

    def close(self) -> None:
        """Take no more work; what runs ends by its deadline, and is waited for."""
        self.remote.close()

    def _sent(self, chunks: Sequence[Chunk]) -> list[Outcome]:
        answers = self.remote.move([call for chunk in chunks for call in _store(chunk)])
        outcomes = []
        for chunk, *pair in zip(chunks, answers[0::2], answers[1::2], strict=True):
            if any(map(self._refused, pair)):
                outcomes.append(Outcome.FAILED)
                continue
            outcomes.append(Outcome.STORED)
            self.counts.add("bytes_stored", len(chunk.data))
        return outcomes

    def _received(self, chunks: Sequence[Chunk]) -> list[int]:
        receivers = [Receiver(chunk) for chunk in chunks]
        answers = self.remote.move([call for receiver in receivers for call in receiver.calls])
        filled = []
        for receiver in receivers:
            mine, answers = answers[: len(receiver.calls)], answers[len(receiver.calls) :]
            if any(self._refused(answer) for answer in mine) or mine[0] is None:
                filled.append(0)
                continue
            filled.append(receiver.filled(*mine))
            if not filled[-1]:
                self.counts.add("corrupt")
                self.drop([receiver.chunk.name])  # or it would never be stored again
        return filled

    def _refused(self, answer: Any) -> bool:
        if isinstance(answer, PionError):
            self.remote.note(answer)
        return isinstance(answer, PionError)


class Receiver:
    """Receives one chunk into its buffer."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self._side = 0  # bytes of either half, as the first one says
        self._landed = 0
        self._first = 0  # the checksum of the first half
        fetch = calls.prefix_fetch(
            chunk.name,
            fmt=chunk.layout.fmt,
            fingerprint=chunk.fingerprint,
            into=self._into,
        )
        sums = [calls.prefix_blocks(chunk.name)] if chunk.layout.exact else []
        self.calls: list[Call[Any]] = [fetch, *sums]

    def filled(self, rows: calls.PrefixRows, table: calls.BlockTable | None = None) -> int:
        """How many bytes of the buffer are those that were stored; 0 where they are not."""
        if self._landed != 2 or len(rows.rows) != 1:
            return 0
        nbytes = 2 * self._side
        if self.chunk.layout.exact:
            sums = [self._first, checksum(self.chunk.data[self._side : nbytes])]
            if table is None or table.hashes.tolist() != sums:
                return 0
        return nbytes

    def _into(self, index: int, nbytes: int) -> memoryview | None:
        """Where a half goes; it is received apart, and is a miss, where it does not fit."""
        if index == 0:  # of the reply, or of the reply to a call that was sent once more
            fits = 2 * nbytes <= len(self.chunk.data) and 2 * nbytes % self.chunk.step == 0
            self._side, self._landed = nbytes if fits else 0, 0
        if index > 1 or not nbytes or nbytes != self._side:
            return None
        self._landed += 1
        if index == 1 and self.chunk.layout.exact:  # read the first while the second is on its way
            self._first = checksum(self.chunk.data[:nbytes])
        return self.chunk.data[index * nbytes : (index + 1) * nbytes]


def checksum(data: memoryview) -> int:
    """XXH3, 64 bits."""
    return xxhash.xxh3_64_intdigest(data)


def _store(chunk: Chunk) -> tuple[Call[None], Call[None]]:
    layout, half = chunk.layout, len(chunk.data) // 2
    sides = (chunk.data[:half], chunk.data[half:])
    blocks = None
    if layout.exact:
        blocks = layout.rows, np.array([checksum(side) for side in sides], np.uint64)
    register = calls.prefix_register(
        chunk.name,
        layout.dim,
        layout.codec,
        layers=1,
        tokens=layout.rows,
        fingerprint=chunk.fingerprint,
        blocks=blocks,
    )
    return register, calls.prefix_store(chunk.name, 0, layout.rows, [sides], fmt=layout.fmt)


def _pieces(indices: Sequence[int], chunks: Sequence[Chunk]) -> Iterator[list[int]]:
    """`indices` in runs of about PIECE_BYTES."""
    piece: list[int] = []
    nbytes = 0
    for index in indices:
        size = len(chunks[index].data)
        if piece and nbytes + size > PIECE_BYTES:
            yield piece
            piece, nbytes = [], 0
        piece.append(index)
        nbytes += size
    if piece:
        yield piece
