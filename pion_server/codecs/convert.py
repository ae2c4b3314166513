"""Between the bytes a client sends or asks for (FMT) and the bytes that are stored.

The hot path moves stored bytes: where the two formats are one, the same memory comes back. Anything
else goes through fp32 rows, about 1 MB at a time, so that the pieces stay in cache and a huge
range never has a huge temporary.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import numpy as np

from pion_server.codecs.base import Bytes, Codec
from pion_server.codecs.table import by_name
from pion_server.errors import PionError

# Bytes of the wider format converted in one go: small beside a CPU's cache and an event loop's
# patience (under 1 ms), large beside the cost of a numpy call.
PIECE = 1 << 20


class WireFormat(Enum):
    """The FMT word of a command: a codec, or NATIVE for whatever the rows are stored in."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    NATIVE = "native"

    def codec(self, stored: Codec) -> Codec:
        """The codec of the bytes on the wire, for rows stored by `stored`."""
        return stored if self is WireFormat.NATIVE else by_name(self.value)


def is_free(fmt: WireFormat, codec: Codec) -> bool:
    """Whether bytes in `fmt` are the stored bytes: nothing to compute."""
    return fmt.codec(codec) == codec


def to_stored(fmt: WireFormat, data: memoryview, codec: Codec, dim: int, count: int) -> memoryview:
    """A client's blob of `count` rows of `dim` values in `fmt` -> the bytes `codec` stores.

    Returns `data` itself where is_free. Raises PionError if its length is not `count` rows.
    """
    wire = fmt.codec(codec)
    expected = count * wire.row_bytes(dim)
    if data.nbytes != expected:
        raise PionError(
            f"expected {expected} bytes ({count} rows x {dim} values in {wire.name}), "
            f"got {data.nbytes}"
        )
    if wire == codec:
        return data
    stored = np.empty(count * codec.row_bytes(dim), np.uint8)
    at = 0
    for piece in row_pieces(data, wire, codec, dim):
        converted = _convert(piece, wire, codec, dim)
        stored[at : at + converted.nbytes] = converted
        at += converted.nbytes
    return stored.data


def from_stored(fmt: WireFormat, piece: memoryview, codec: Codec, dim: int) -> memoryview:
    """Whole stored rows of `dim` values -> the same rows in `fmt`; `piece` itself where is_free."""
    wire = fmt.codec(codec)
    return piece if wire == codec else _convert(piece, codec, wire, dim).data


def row_pieces(data: memoryview, source: Codec, target: Codec, dim: int) -> Iterator[memoryview]:
    """`data`, rows of `source`, cut into whole rows that are about PIECE bytes in the wider of
    both formats."""
    row = source.row_bytes(dim)
    step = max(1, PIECE // max(row, target.row_bytes(dim))) * row
    return (data[at : at + step] for at in range(0, data.nbytes, step))


def _convert(data: memoryview, source: Codec, target: Codec, dim: int) -> Bytes:
    """Bytes of `source` rows -> uint8 bytes of `target` rows, through fp32."""
    return target.encode(source.decode(np.frombuffer(data, np.uint8), dim))
