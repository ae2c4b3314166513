"""How a chunk's bytes lie in a namespace: two halves, K and V, of equal rows.

LMCache's chunk is one buffer: (2, layers, tokens, heads * head_size) of the model's dtype, or for
MLA (1, layers, tokens, latent). Its first half becomes the K side and its second half the V side
of a namespace with one layer, so it goes out and comes in by reference, and the server sees real
rows that any of its codecs can keep. Buffers that are no such rows (fp8, several groups of layers,
serialized bytes) are kept bit for bit as rows of 2-byte words.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pion_server.client import Fmt

# dtype -> (the codec that keeps it bit for bit, how its values look on the wire, bytes of one)
_FLOATS: dict[str, tuple[str, Fmt, int]] = {
    "torch.float32": ("fp32", "FP32", 4),
    "torch.float16": ("fp16", "FP16", 2),
    "torch.bfloat16": ("bf16", "BF16", 2),
}
_OPAQUE: tuple[str, Fmt, int] = ("fp16", "NATIVE", 2)
# Rows of an opaque buffer are as wide as its size allows, up to here.
_OPAQUE_DIM = 4096


@dataclass(frozen=True, slots=True)
class Layout:
    """`rows` rows of `dim` values on each side, stored by `codec` and sent as `fmt`."""

    codec: str
    fmt: Fmt
    dim: int
    rows: int

    @property
    def exact(self) -> bool:
        """Whether what is fetched has the bytes of what was stored."""
        return self.fmt == "NATIVE"


def layout_of(
    nbytes: int, shapes: Sequence[Any], dtypes: Sequence[Any], codec: str | None
) -> Layout:
    """The layout of a buffer of `nbytes` with these tensors in it, one after the other.

    Raises ValueError where a `codec` is named and the buffer holds no rows of floats, or where it
    cannot be cut into halves of whole values.
    """
    floats = _FLOATS.get(str(dtypes[0])) if len(shapes) == 1 else None
    if floats is not None:
        lossless, fmt, size = floats
        dim = int(shapes[0][-1])
        if dim and nbytes and nbytes % (2 * dim * size) == 0:
            rows = nbytes // (2 * dim * size)
            return Layout(codec or lossless, fmt if codec else "NATIVE", dim, rows)
    if codec is not None:
        raise ValueError(
            f"vquant '{codec}' needs chunks of float rows, an even number of them; got "
            f"{word(shapes, dtypes)}: leave vquant out for this model"
        )
    lossless, fmt, size = _OPAQUE
    if not nbytes or nbytes % (2 * size):
        raise ValueError(f"a chunk of {nbytes} bytes cannot be cut into two halves of 2-byte words")
    values = nbytes // (2 * size)
    dim = math.gcd(values, _OPAQUE_DIM)
    return Layout(lossless, fmt, dim, values // dim)


def word(shapes: Sequence[Any], dtypes: Sequence[Any]) -> str:
    """A chunk's shapes and dtypes as a word fit for keys: `2x28x256x1024-bfloat16`."""
    return "+".join(
        "x".join(str(int(size)) for size in shape) + "-" + str(dtype).removeprefix("torch.")
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )


def fingerprint(*parts: str) -> str:
    """Hex digits that differ where any of the parts does."""
    joined = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(joined.encode()).hexdigest()[:32]
