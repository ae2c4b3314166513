"""Rows on their way out: references to stored bytes, and the layout they are in.

A view holds no lock and copies nothing. Chunks are immutable and reference-counted, so it stays
what it was when it was taken through overwrites, drops and evictions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pion_server.codecs.convert import WireFormat, from_stored, is_free, row_pieces
from pion_server.store.layer import SMALL
from pion_server.store.schema import LayerFormat


@dataclass(frozen=True, slots=True)
class RowView:
    """Rows of one layer; each piece is whole rows as `format` stores them, in the asked order."""

    format: LayerFormat
    pieces: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Stored bytes of the rows."""
        return sum(piece.nbytes for piece in self.pieces)

    def pieces_as(self, fmt: WireFormat) -> tuple[int, Iterator[memoryview]]:
        """The rows' bytes in `fmt`: how many, and the pieces that make them, made lazily.

        Stored memory goes out by reference where `fmt` is what is stored. Otherwise about 1 MB is
        converted each time a piece is asked for, so a slow reader holds one piece at a time.
        """
        codec, dim = self.format.codec, self.format.dim
        if is_free(fmt, codec):
            return self.nbytes, _joined(self.pieces)
        wire = fmt.codec(codec)
        rows = self.nbytes // self.format.row_bytes
        converted = (
            from_stored(fmt, part, codec, dim)
            for piece in _joined(self.pieces)
            for part in row_pieces(piece, codec, wire, dim)
        )
        return rows * wire.row_bytes(dim), converted


def _joined(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes with runs of small pieces, as scattered ids make them, copied together: a
    socket write costs more than a small copy. What is larger than SMALL is never copied."""
    run: list[memoryview] = []
    size = 0
    for piece in pieces:
        if run and size + piece.nbytes > SMALL:
            yield _one(run)
            run, size = [], 0
        run.append(piece)
        size += piece.nbytes
    if run:
        yield _one(run)


def _one(run: list[memoryview]) -> memoryview:
    return run[0] if len(run) == 1 else memoryview(b"".join(run))
