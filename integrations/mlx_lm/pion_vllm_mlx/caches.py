"""How each of mlx-lm's cache classes becomes rows and states, and back: the one table, KINDS.

A *leaf* is a cache that holds arrays; a CacheList only nests leaves. What a leaf gives is a *part*:
rows (one a token, any leading run of which is a valid cache), a window (the rows of the last
tokens), or a state (arrays that hold at exactly one length).

A leaf is rebuilt by its own constructor, from `make_prompt_cache`, and then by setting attributes:
that works alike in mlx-lm 0.31 and 0.32, whose `state` and `from_state` differ. Batch size is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, cast

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import CacheList, make_prompt_cache

from pion_vllm_mlx.model import Cache, Model, UnsupportedCacheError

State: TypeAlias = list[mx.array | None]


class Part(Enum):
    """What is stored of a leaf."""

    ROWS = "rows"
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class Kind:
    """One cache class.

    `rows`: K and V, or several such pairs, each (1, heads, T, width), in token order, ending with
    the last token seen. `set_rows` makes a fresh leaf of them one that has seen `tokens` tokens.
    `window`: how many of the last rows a leaf needs, 0 for all of them; `slides`: whether these
    rows are enough to rebuild it. `state` and `set_state` do the same for everything a leaf holds,
    down to where its rows lie; `tokens` says how many it has seen, None where the class does not
    count.
    """

    rows: Callable[[Cache], list[mx.array]] | None = None
    set_rows: Callable[[Cache, list[mx.array], int], None] | None = None
    window: Callable[[Cache], int] = lambda _: 0
    slides: Callable[[Cache], bool] = lambda _: False
    state: Callable[[Cache], State] | None = None
    set_state: Callable[[Cache, State], None] | None = None
    tokens: Callable[[Cache], int | None] = lambda cache: int(cache.offset)


def _kv_rows(cache: Cache) -> list[mx.array]:
    """The buffer is longer than `offset`, and what is behind is junk."""
    return [side[..., : cache.offset, :] for side in (cache.keys, cache.values)]


def _set_kv_rows(cache: Cache, rows: list[mx.array], tokens: int) -> None:
    cache.keys, cache.values = rows
    cache.offset = tokens


def _quantized_rows(cache: Cache) -> list[mx.array]:
    """A side is (packed codes, scales, biases): three pairs."""
    pairs = zip(cache.keys, cache.values, strict=True)
    return [side[..., : cache.offset, :] for pair in pairs for side in pair]


def _set_quantized_rows(cache: Cache, rows: list[mx.array], tokens: int) -> None:
    cache.keys, cache.values = tuple(rows[::2]), tuple(rows[1::2])
    cache.offset = tokens


def _ring_rows(cache: Cache) -> list[mx.array]:
    """The ring, unrolled. After a prompt it may hold more rows than `max_size`."""
    return [_unrolled(side, cache._idx, cache.offset) for side in (cache.keys, cache.values)]


def _unrolled(ring: mx.array, begin: int, tokens: int) -> mx.array:
    rows = ring.shape[2]
    if tokens >= rows and begin < rows:
        return mx.concatenate([ring[..., begin:, :], ring[..., :begin, :]], axis=2)
    return ring[..., : min(tokens, rows), :]  # what is behind is room to grow


def _set_ring_rows(cache: Cache, rows: list[mx.array], tokens: int) -> None:
    cache.keys, cache.values = (side[..., -cache.max_size :, :] for side in rows)
    cache.offset = tokens
    cache._idx = cache.keys.shape[2]


def _ring_state(cache: Cache) -> State:
    numbers = (cache.offset, cache.keep, cache.max_size, cache._idx)
    return [cache.keys, cache.values, mx.array(numbers, mx.int64)]


def _integers(array: mx.array | None) -> list[int]:
    return [] if array is None else cast("list[int]", array.tolist())


def _set_ring_state(cache: Cache, state: State) -> None:
    cache.keys, cache.values, numbers = state
    cache.offset, cache.keep, cache.max_size, cache._idx = _integers(numbers)


def _chunked_rows(cache: Cache) -> list[mx.array]:
    rows = cache.offset - cache.start_position
    return [side[..., :rows, :] for side in (cache.keys, cache.values)]


def _set_chunked_rows(cache: Cache, rows: list[mx.array], tokens: int) -> None:
    cache.keys, cache.values = (side[..., -cache.chunk_size :, :] for side in rows)
    cache.offset = tokens
    cache.start_position = tokens - cache.keys.shape[2]


def _chunked_state(cache: Cache) -> State:
    numbers = (cache.offset, cache.start_position)
    return [cache.keys, cache.values, mx.array(numbers, mx.int64)]


def _set_chunked_state(cache: Cache, state: State) -> None:
    cache.keys, cache.values, numbers = state
    cache.offset, cache.start_position = _integers(numbers)


def _arrays_state(cache: Cache) -> State:
    if cache.left_padding is not None or cache.lengths is not None:
        raise UnsupportedCacheError("an ArraysCache that is still part of a batch")
    return list(cache.cache)


def _set_arrays_state(cache: Cache, state: State) -> None:
    cache.cache = list(state)


_LAYER_ARRAYS = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")


def _layer_state(cache: Cache) -> State:
    """deepseek_v41: a window, compressed groups, and the group that is still open."""
    arrays = [getattr(cache, name) for name in _LAYER_ARRAYS]
    return [*arrays, mx.array([cache.offset], mx.int64)]


def _set_layer_state(cache: Cache, state: State) -> None:
    *arrays, numbers = state
    for name, array in zip(_LAYER_ARRAYS, arrays, strict=True):
        setattr(cache, name, array)
    (cache.offset,) = _integers(numbers)


KINDS = {
    "KVCache": Kind(rows=_kv_rows, set_rows=_set_kv_rows),
    "ConcatenateKVCache": Kind(rows=_kv_rows, set_rows=_set_kv_rows),
    "QuantizedKVCache": Kind(rows=_quantized_rows, set_rows=_set_quantized_rows),
    "RotatingKVCache": Kind(
        rows=_ring_rows,
        set_rows=_set_ring_rows,
        window=lambda cache: int(cache.max_size),
        slides=lambda cache: not cache.keep,  # else it holds its first tokens for ever
        state=_ring_state,
        set_state=_set_ring_state,
    ),
    "ChunkedKVCache": Kind(
        rows=_chunked_rows,
        set_rows=_set_chunked_rows,
        window=lambda cache: int(cache.chunk_size),
        # mlx-lm 0.31 counts the room behind the rows as rows: only that very buffer goes on alike.
        slides=lambda cache: hasattr(cache, "keys_and_values"),
        state=_chunked_state,
        set_state=_set_chunked_state,
    ),
    "ArraysCache": Kind(
        state=_arrays_state, set_state=_set_arrays_state, tokens=lambda cache: None
    ),
    "LayerCache": Kind(state=_layer_state, set_state=_set_layer_state),
}


def leaves(caches: Iterable[Cache]) -> Iterator[Cache]:
    """The caches that hold arrays, in order, out of CacheLists of any depth."""
    for cache in caches:
        if type(cache) is CacheList:
            yield from leaves(cache.caches)
        else:
            yield cache


def kind_of(cache: Cache) -> Kind:
    """The row of the table for a leaf; raises UnsupportedCacheError, naming the class."""
    cls = type(cache)
    if not cls.__module__.startswith("mlx_lm.models.") or cls.__name__ not in KINDS:
        raise UnsupportedCacheError(
            f"Pion does not know caches of class {cls.__module__}.{cls.__qualname__}; it knows "
            f"{', '.join(KINDS)} of mlx_lm.models"
        )
    return KINDS[cls.__name__]


def part_of(cache: Cache, *, blocks: bool) -> Part:
    """What is stored of a leaf. With `blocks`, windows are kept as rows, so that every block
    boundary can be restored; else as the state that they are, bit for bit.
    """
    kind = kind_of(cache)
    if kind.rows is None:
        return Part.STATE
    if not kind.window(cache):
        return Part.ROWS
    return Part.WINDOW if blocks and kind.slides(cache) else Part.STATE


def make_caches(model: Model, kv_bits: int | None = None, kv_group_size: int = 64) -> list[Cache]:
    """Empty caches for `model` as mlx-lm makes them, its KVCaches quantized where `kv_bits` says
    so. Raises NotImplementedError for a model with a cache that mlx-lm cannot quantize."""
    caches: list[Cache] = make_prompt_cache(model)
    maybe_quantize_kv_cache(caches, 0, kv_group_size, kv_bits)  # type: ignore[no-untyped-call]
    return caches


def evaluate(caches: Sequence[Cache]) -> None:
    """Evaluate everything that `caches` hold."""
    mx.eval([vars(cache) for cache in leaves(caches)])
