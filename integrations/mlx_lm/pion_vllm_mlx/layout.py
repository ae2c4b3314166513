"""How the caches of a model lie, and as which rows and states they are stored.

The layout is read off real caches after one token, not from a configuration: it is right for
every model class, also where K and V, or single layers, differ in dim or dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from pion_vllm_mlx.caches import Part, State, evaluate, kind_of, leaves, part_of
from pion_vllm_mlx.model import Cache, Model, UnsupportedCacheError

CODECS: dict[str, mx.Dtype] = {"fp16": mx.float16, "bf16": mx.bfloat16, "fp32": mx.float32}
NATIVE = "native"  # the codec of the model's own dtype, which makes a restored cache bit-identical
# Words that are no numbers travel as the bits of fp32, which NATIVE passes through untouched.
_CODEC_OF = {dtype: codec for codec, dtype in CODECS.items()} | {mx.uint32: "fp32"}


@dataclass(frozen=True, slots=True)
class RowFormat:
    """K or V of one leaf: a row is `heads * width` values, `dtype` in the cache, `stored` in
    Pion. A side without values (width 0) is stored as one zero a head: Pion has no empty rows."""

    heads: int
    width: int
    dtype: mx.Dtype
    stored: mx.Dtype

    @property
    def codec(self) -> str:
        """What the server calls the stored values."""
        return _CODEC_OF[self.stored]

    @property
    def schema(self) -> tuple[str, int]:
        """What the server knows of it: the codec, and the values of a row."""
        return self.codec, self.heads * max(self.width, 1)

    @property
    def row_bytes(self) -> int:
        return self.heads * max(self.width, 1) * self.stored.size

    def __str__(self) -> str:
        return f"{self.codec} {self.heads}x{self.width} {self.dtype}"


@dataclass(frozen=True)
class RowLayout:
    """The rows of one namespace: K and V of its layer 0, K and V of its layer 1, ..."""

    formats: tuple[RowFormat, ...]

    @cached_property
    def keys(self) -> list[tuple[str, int]]:
        """The schema of the K side, one entry a layer."""
        return [fmt.schema for fmt in self.formats[::2]]

    @cached_property
    def values(self) -> list[tuple[str, int]]:
        """The schema of the V side, one entry a layer."""
        return [fmt.schema for fmt in self.formats[1::2]]

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers, both sides."""
        return sum(fmt.row_bytes for fmt in self.formats)


# A namespace is a hit once its rows are in. One that has states only gets a row a token as a seal,
# stored after the states.
SEAL = RowLayout((RowFormat(1, 1, mx.float16, mx.float16),) * 2)


@dataclass(frozen=True)
class Leaf:
    """One leaf of the caches: what is stored of it, and in which formats.

    `window` is how many of the last rows it needs; `arrays` are dtype and number of axes of each
    array of a state, None where there was none after one token, when they had `state_bytes`. A
    leaf that the model never uses is one of rows without formats.
    """

    kind: str
    part: Part
    formats: tuple[RowFormat, ...] = ()
    window: int = 0
    state_bytes: int = 0
    arrays: tuple[tuple[mx.Dtype, int] | None, ...] = ()

    @property
    def used(self) -> bool:
        """Whether the model puts anything into it."""
        return bool(self.formats or self.arrays)

    def fits(self, state: State) -> bool:
        """Whether `state` can be one of this leaf."""
        return len(state) == len(self.arrays) and all(
            array is None or form is None or (array.dtype, array.ndim) == form
            for array, form in zip(state, self.arrays, strict=True)
        )

    def __str__(self) -> str:
        words = [self.kind, self.part.value, *(str(fmt) for fmt in self.formats)]
        return " ".join(words + ([str(self.window)] if self.window else []))


@dataclass(frozen=True)
class Layout:
    """All leaves of a model's caches, in order."""

    leaves: tuple[Leaf, ...]

    @cached_property
    def rows(self) -> RowLayout:
        """The rows of all tokens."""
        return self._of(Part.ROWS)

    @cached_property
    def windows(self) -> RowLayout:
        """The rows of the last tokens."""
        return self._of(Part.WINDOW)

    @cached_property
    def window(self) -> int:
        """The longest window, 0 where there is none."""
        return max(leaf.window for leaf in self.leaves)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of all states, about: some grow."""
        return sum(leaf.state_bytes for leaf in self.leaves)

    @cached_property
    def states(self) -> tuple[int, ...]:
        """Indices of the leaves that are kept as states."""
        found = (i for i, leaf in enumerate(self.leaves) if leaf.part is Part.STATE)
        return tuple(found)

    def fits(self, caches: Sequence[Cache], tokens: int) -> bool:
        """Whether `caches` are of this layout and hold `tokens` tokens, as far as they count."""
        found = list(leaves(caches))
        return len(found) == len(self.leaves) and all(
            type(cache).__name__ == leaf.kind
            and kind_of(cache).tokens(cache) in ((tokens, None) if leaf.used else (0,))
            for cache, leaf in zip(found, self.leaves, strict=True)
        )

    def words(self) -> Iterator[str]:
        """For a fingerprint."""
        return map(str, self.leaves)

    def _of(self, part: Part) -> RowLayout:
        formats = (fmt for leaf in self.leaves if leaf.part is part for fmt in leaf.formats)
        return RowLayout(tuple(formats))


def read_layout(model: Model, caches: Sequence[Cache], vquant: str, *, blocks: bool) -> Layout:
    """The layout of `model`, whose `caches` are empty, with rows stored by the codec `vquant` or
    `native`. Runs one token through it. `blocks` as in part_of.

    Raises ValueError for an unknown codec, UnsupportedCacheError for a cache that is not known, or
    that has arrays which no codec keeps.
    """
    if vquant != NATIVE and vquant not in CODECS:
        raise ValueError(f"vquant must be one of {NATIVE}, {', '.join(CODECS)}, got {vquant!r}")
    parts = [part_of(cache, blocks=blocks) for cache in leaves(caches)]
    model(mx.array([[0]]), cache=caches)
    evaluate(caches)
    found = zip(leaves(caches), parts, strict=True)
    return Layout(tuple(_leaf(cache, part, vquant) for cache, part in found))


def _leaf(cache: Cache, part: Part, vquant: str) -> Leaf:
    name, kind = type(cache).__name__, kind_of(cache)
    if part is Part.STATE:
        assert kind.state is not None
        state = kind.state(cache)
        arrays = (None if array is None else (array.dtype, array.ndim) for array in state)
        nbytes = sum(array.nbytes for array in state if array is not None)
        return Leaf(name, part, state_bytes=nbytes, arrays=tuple(arrays))
    if cache.empty():
        return Leaf(name, Part.ROWS)
    assert kind.rows is not None
    formats = tuple(_row_format(side, vquant) for side in kind.rows(cache))
    return Leaf(name, part, formats, kind.window(cache))


def _row_format(array: mx.array, vquant: str) -> RowFormat:
    _, heads, _, width = array.shape
    if array.dtype not in _CODEC_OF:
        raise UnsupportedCacheError(f"no codec keeps {array.dtype} arrays bit for bit")
    as_it_is = vquant == NATIVE or array.dtype == mx.uint32
    return RowFormat(heads, width, array.dtype, array.dtype if as_it_is else CODECS[vquant])
