"""How the K/V of a model lie in its caches, and as which rows they are stored.

The layout is read off a real cache after one token, not from a configuration: it is right for
every model class, also where K and V or single layers differ in dim or dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from pion_vllm_mlx.model import Model, UnsupportedCacheError, arrays, make_caches

CODECS: dict[str, mx.Dtype] = {"fp16": mx.float16, "bf16": mx.bfloat16, "fp32": mx.float32}
NATIVE = "native"  # the codec of the model's own dtype, which makes a restored cache bit-identical


@dataclass(frozen=True, slots=True)
class RowFormat:
    """K or V of one layer: a row is `heads * head_dim` values, `dtype` in the cache."""

    heads: int
    head_dim: int
    dtype: mx.Dtype
    codec: str

    @property
    def schema(self) -> tuple[str, int]:
        """What the server knows of it: the codec, and the values of a row."""
        return self.codec, self.heads * self.head_dim

    @property
    def row_bytes(self) -> int:
        return self.heads * self.head_dim * CODECS[self.codec].size

    def __str__(self) -> str:
        return f"{self.codec} {self.heads}x{self.head_dim} {self.dtype}"


@dataclass(frozen=True, slots=True)
class Layout:
    """The row formats of every cache of a model: K and V of layer 0, K and V of layer 1, ..."""

    formats: tuple[RowFormat, ...]

    @property
    def keys(self) -> list[tuple[str, int]]:
        """The schema of the K side, one entry a layer."""
        return [fmt.schema for fmt in self.formats[::2]]

    @property
    def values(self) -> list[tuple[str, int]]:
        """The schema of the V side, one entry a layer."""
        return [fmt.schema for fmt in self.formats[1::2]]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers, both sides."""
        return sum(fmt.row_bytes for fmt in self.formats)


def read_layout(model: Model, vquant: str) -> Layout:
    """The layout of `model`, stored with the codec `vquant` or `native`. Runs one token through it.

    Raises ValueError for an unknown codec, UnsupportedCacheError as make_caches does.
    """
    if vquant != NATIVE and vquant not in CODECS:
        raise ValueError(f"vquant must be one of {NATIVE}, {', '.join(CODECS)}, got {vquant!r}")
    caches = make_caches(model)
    model(mx.array([[0]]), cache=caches)
    sides = arrays(caches)
    mx.eval(sides)
    return Layout(tuple(_row_format(side, vquant) for side in sides))


def _row_format(array: mx.array, vquant: str) -> RowFormat:
    _, heads, _, head_dim = array.shape
    codec = _native_codec(array.dtype) if vquant == NATIVE else vquant
    return RowFormat(heads, head_dim, array.dtype, codec)


def _native_codec(dtype: mx.Dtype) -> str:
    for codec, stored in CODECS.items():
        if stored == dtype:
            return codec
    raise UnsupportedCacheError(f"no codec keeps {dtype} arrays bit for bit")
