"""KVCache <-> stored rows.

In the cache K (or V) of a layer is (1, heads, T, head_dim), in the store it is T rows of
`heads * head_dim` values. Conversions run in mlx (numpy's fp16 is slow and it has no bf16), on
the calling thread, and everything is evaluated on return: lazy arrays cannot cross threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache

from pion_server.client import PrefixRows
from pion_server.errors import Mismatch
from pion_vllm_mlx.layout import CODECS, Layout, RowFormat
from pion_vllm_mlx.model import arrays, new_cache

Bytes = npt.NDArray[np.uint8]


def to_rows(caches: Sequence[KVCache], layout: Layout) -> list[tuple[Bytes, Bytes]]:
    """K and V of every layer as bytes: (T * row_bytes,) each.

    The arrays own their memory, so the caches may change afterwards. Batch must be 1.
    """
    used = [array[:, :, : caches[0].offset] for array in arrays(caches)]
    flat = [_to_bytes(array, fmt) for array, fmt in zip(used, layout.formats, strict=True)]
    mx.eval(flat)
    blobs = [np.asarray(array) for array in flat]  # no copy
    return list(zip(blobs[::2], blobs[1::2], strict=True))


class Receiver:
    """Makes caches of the buffers of a FETCH while they arrive, through one scratch buffer.

    Bytes of a layer are copied into mlx as soon as the next buffer begins, so the scratch stays
    small and warm, and mlx holds the only full copy.
    """

    def __init__(self, layout: Layout, tokens: int) -> None:
        self._layout = layout
        self._tokens = tokens
        widest = max(fmt.row_bytes for fmt in layout.formats)
        self._scratch = np.empty(tokens * widest, np.uint8)
        self._arriving: Bytes | None = None
        self._arrays: list[mx.array] = []

    def buffer(self, index: int, nbytes: int) -> memoryview | None:
        """Where buffer `index` goes; None where it is not what the layout says."""
        if index == 0:  # also when the client sends the whole request again
            self._arrays.clear()
            self._arriving = None
        self._take()
        formats = self._layout.formats
        if index >= len(formats) or nbytes != self._tokens * formats[index].row_bytes:
            return None
        self._arriving = self._scratch[:nbytes]
        return self._arriving.data

    def caches(self, rows: PrefixRows) -> list[KVCache]:
        """The caches, evaluated, once everything has arrived.

        Raises Mismatch where what came is not this layout and number of tokens.
        """
        self._take()
        came = (rows.tokens, rows.start, rows.end, list(rows.keys), list(rows.values))
        wanted = (self._tokens, 0, self._tokens, self._layout.keys, self._layout.values)
        if came != wanted or len(self._arrays) != len(self._layout.formats):
            raise Mismatch(
                "the stored rows have another layout or number of tokens than this model"
            )
        mx.eval(self._arrays)
        pairs = zip(self._arrays[::2], self._arrays[1::2], strict=True)
        return [new_cache(keys, values) for keys, values in pairs]

    def _take(self) -> None:
        """Copy what has arrived out of the scratch buffer."""
        if self._arriving is not None:
            fmt = self._layout.formats[len(self._arrays)]
            self._arrays.append(_to_array(self._arriving, fmt))
            self._arriving = None


def _to_bytes(array: mx.array, fmt: RowFormat) -> mx.array:
    """(1, heads, T, head_dim) -> uint8 (T * row_bytes,)."""
    rows = array[0].swapaxes(0, 1).reshape(-1).astype(CODECS[fmt.codec])
    return mx.contiguous(rows.view(mx.uint8))


def _to_array(data: Bytes, fmt: RowFormat) -> mx.array:
    """A copy of `data` as (1, heads, T, head_dim) in the model's dtype; not yet evaluated."""
    rows = mx.array(data).view(CODECS[fmt.codec]).reshape(-1, fmt.heads, fmt.head_dim)
    return rows.astype(fmt.dtype).transpose(1, 0, 2)[None]
