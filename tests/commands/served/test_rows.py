"""Invariant: rows come back as numpy says they must, whatever was written over what, in every FMT
from every codec; bit for bit where nothing had to be converted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = {"FP32": np.float32, "FP16": np.float16, "BF16": ml_dtypes.bfloat16}
CODECS = [name.lower() for name in DTYPES]
FMTS = [*DTYPES, "NATIVE"]
Array: TypeAlias = Any
NewName = Callable[[], bytes]


def dtype_of(fmt: str, codec: str) -> np.dtype[Any]:
    return np.dtype(DTYPES[codec.upper() if fmt == "NATIVE" else fmt])


def convert(rows: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(all="ignore"):
        return rows if rows.dtype == dtype else rows.astype(np.float32).astype(dtype)


def random_rows(seed: int, count: int, dim: int, dtype: np.dtype[Any]) -> Array:
    """Any bit patterns: NaN, infinities, denormals and all."""
    bits = np.random.default_rng(seed).bytes(count * dim * dtype.itemsize)
    return np.frombuffer(bits, dtype).reshape(count, dim)


def same(reply: bytes, expected: Array, exact: bool) -> bool:
    """Equal bits; where rows were converted, one NaN is as good as another."""
    unsigned = np.dtype(f"u{expected.dtype.itemsize}")
    if len(reply) != expected.nbytes:
        return False
    got = np.frombuffer(reply, expected.dtype)
    equal = got.view(unsigned) == expected.reshape(-1).view(unsigned)
    if not exact:
        equal |= np.isnan(got) & np.isnan(expected.reshape(-1))
    return bool(equal.all())


@dataclass
class Model:
    """A session in numpy: rows by layer and token id, in the codec's dtype."""

    codec: str
    dim: int
    rows: dict[tuple[int, int], Array] = field(default_factory=dict)

    def put(self, layer: int, start: int, rows: Array) -> None:
        stored = convert(rows, dtype_of("NATIVE", self.codec))
        self.rows.update({(layer, start + i): row for i, row in enumerate(stored)})

    def holds(self, layer: int, ids: list[int]) -> bool:
        return all((layer, i) in self.rows for i in ids)

    def agrees(self, reply: Any, layer: int, ids: list[int], fmt: str) -> bool:
        """Whether `reply` is what asking for these rows must give."""
        if not self.holds(layer, ids):
            return isinstance(reply, str) and reply.startswith(f"-ERR layer {layer}: row")
        stored = np.stack([self.rows[layer, i] for i in ids])
        exact = dtype_of(fmt, self.codec) == stored.dtype
        return same(reply, convert(stored, dtype_of(fmt, self.codec)), exact)


LAYER = st.integers(0, 2)
FMT = st.sampled_from(FMTS)
SPAN = st.tuples(st.integers(0, 9), st.integers(1, 6)).map(lambda s: (s[0], s[0] + s[1]))
WRITE = st.tuples(LAYER, SPAN, FMT, st.integers(0, 1 << 30))
READ = st.one_of(
    st.tuples(st.just("RANGE"), LAYER, SPAN, FMT),
    st.tuples(st.just("BATCH"), st.integers(1, 3), SPAN, FMT),
    st.tuples(st.just("IDS"), LAYER, st.lists(st.integers(0, 14), min_size=1, max_size=8)),
)


@settings(max_examples=150, deadline=None)
@given(
    codec=st.sampled_from(CODECS),
    dim=st.sampled_from([1, 3, 8, 5000]),
    writes=st.lists(WRITE, min_size=1, max_size=8),
    reads=st.lists(READ, min_size=1, max_size=8),
)
def test_sessions(
    raw: Any, new_name: NewName, codec: str, dim: int, writes: list[Any], reads: list[Any]
) -> None:
    ns, model = new_name(), Model(codec, dim)
    sid = ns + b"_pk"  # so that a namespace can take it over, and be dropped
    assert raw.ask("V.CREATE", sid, dim, "VQUANT", codec) == "+OK"
    for layer, (start, end), fmt, seed in writes:
        rows = random_rows(seed, end - start, dim, dtype_of(fmt, codec))
        words = ("V.STOREBATCH", sid, layer, start, end - start, rows.tobytes(), "FMT", fmt)
        assert raw.ask(*words) == "+OK"
        model.put(layer, start, rows)
    for read in reads:
        match read:
            case "RANGE", layer, (start, end), fmt:
                reply = raw.ask("V.FETCH", sid, layer, "RANGE", start, end, "FMT", fmt)
                assert model.agrees(reply, layer, list(range(start, end)), fmt)
            case "IDS", layer, ids:
                assert model.agrees(raw.ask("V.FETCH", sid, layer, *ids), layer, ids, "FP32")
            case "BATCH", layers, (start, end), fmt:
                reply = raw.ask("V.FETCH", sid, "BATCH", start, end, layers, "FMT", fmt)
                ids = list(range(start, end))
                lacking = [layer for layer in range(layers) if not model.holds(layer, ids)]
                if lacking:
                    assert model.agrees(reply, lacking[0], ids, fmt)
                else:
                    assert len(reply) == layers
                    for layer, bulk in enumerate(reply):
                        assert model.agrees(bulk, layer, ids, fmt)
    assert raw.ask("KV.PREFIX.REGISTER", ns, dim, codec) == "+OK"
    assert raw.ask("KV.PREFIX.DROP", ns) == 1


FORMATS = st.tuples(st.sampled_from(CODECS), st.sampled_from([1, 2, 7, 5000]))
LAYERS = 3


@settings(max_examples=100, deadline=None)
@given(
    formats=st.lists(FORMATS, min_size=2 * LAYERS, max_size=2 * LAYERS),
    writes=st.lists(st.tuples(st.sampled_from([(0, 3), (0, 1), (1, 3)]), SPAN, FMT), max_size=6),
    reads=st.lists(
        st.tuples(st.sampled_from([None, (0, 2), (2, 3)]), st.none() | SPAN, FMT), max_size=6
    ),
)
def test_prefixes(
    raw: Any, new_name: NewName, formats: list[Any], writes: list[Any], reads: list[Any]
) -> None:
    """K and V of each layer in a layout of their own."""
    ns, models = new_name(), [Model(*layout) for layout in formats]  # k_0 v_0 k_1 v_1 ...
    words = [b"fmt=%b,dim=%d" % (model.codec.encode(), model.dim) for model in models]
    sides = ("K", LAYERS, *words[0::2], "V", LAYERS, *words[1::2])
    assert raw.ask("KV.PREFIX.REGISTER.SCHEMA", ns, *sides, "TOKENS", 4) == "+OK"
    first = ((0, LAYERS), (0, 4), "NATIVE")  # so that it is sealed
    for seed, ((low, high), (start, end), fmt) in enumerate([first, *writes]):
        blobs = []
        for model in models[2 * low : 2 * high]:
            rows = random_rows(seed, end - start, model.dim, dtype_of(fmt, model.codec))
            model.put(0, start, rows)
            blobs.append(rows.tobytes())
        options = ("LAYERS", low, high, "FMT", fmt)
        words_sent = ("KV.PREFIX.STORE", ns, start, end - start, *options, "DATA", *blobs)
        assert raw.ask(*words_sent) == "+OK"
    for layers, span, fmt in reads:
        options = ("LAYERS", *layers) if layers else ()
        options += ("RANGE", *span) if span else ()
        reply = raw.ask("KV.PREFIX.FETCH", ns, *options, "FMT", fmt)
        (low, high), (start, end) = layers or (0, LAYERS), span or (0, 4)
        ids, asked = list(range(start, end)), models[2 * low : 2 * high]
        if not all(model.holds(0, ids) for model in asked):
            assert reply.startswith("-ERR layer ")
            continue
        assert raw.map(reply[0]) == {
            b"tokens": 4,
            b"start": start,
            b"end": end,
            b"first_layer": low,
            b"layers": high - low,
            b"keys": words[2 * low : 2 * high : 2],
            b"values": words[2 * low + 1 : 2 * high : 2],
        }
        for model, bulk in zip(asked, reply[1:], strict=True):
            assert model.agrees(bulk, 0, ids, fmt)
    assert raw.ask("KV.PREFIX.DROP", ns) == 1


@pytest.mark.parametrize("fmt", FMTS)
@pytest.mark.parametrize("codec", CODECS)
def test_more_rows_than_are_converted_in_one_go(
    raw: Any, new_name: NewName, codec: str, fmt: str
) -> None:
    sid, model, count, dim = new_name(), Model(codec, 600), 900, 600
    rows = random_rows(7, count, dim, dtype_of(fmt, codec))
    model.put(0, 0, rows)
    raw.ask("V.CREATE", sid, dim, "VQUANT", codec)
    assert raw.ask("V.STOREBATCH", sid, 0, 0, count, rows.tobytes(), "FMT", fmt) == "+OK"
    for out in FMTS:
        reply = raw.ask("V.FETCH", sid, 0, "RANGE", 1, count, "FMT", out)
        assert model.agrees(reply, 0, list(range(1, count)), out)
    scattered = [*range(0, count, 7), *range(count - 1, 0, -5), 3, 3]
    assert model.agrees(raw.ask("V.FETCH", sid, 0, *scattered), 0, scattered, "FP32")


@pytest.mark.parametrize("codec", CODECS)
def test_nan_and_infinity_are_kept(raw: Any, new_name: NewName, codec: str) -> None:
    sid, odd = new_name(), np.array([np.nan, np.inf, -np.inf, -0.0, 1.5], np.float32)
    raw.ask("V.CREATE", sid, 5, "VQUANT", codec)
    raw.ask("V.STOREBATCH", sid, 0, 0, 1, odd.tobytes())
    got = np.frombuffer(raw.ask("V.FETCH", sid, 0, 0), np.float32)
    np.testing.assert_array_equal(got, odd)
    assert np.signbit(got[3])


def test_values_too_large_for_fp16_become_infinity(raw: Any, new_name: NewName) -> None:
    sid = new_name()
    raw.ask("V.CREATE", sid, 2)
    raw.ask("V.STOREBATCH", sid, 0, 0, 1, np.array([1e5, -1e5], np.float32).tobytes())
    got = np.frombuffer(raw.ask("V.FETCH", sid, 0, 0), np.float32)
    np.testing.assert_array_equal(got, [np.inf, -np.inf])


def test_v_commands_and_prefix_commands_see_the_same_rows(raw: Any, new_name: NewName) -> None:
    ns = new_name()
    raw.ask("KV.PREFIX.REGISTER", ns, 2, "fp32")
    k, v = bytes(range(16)), bytes(range(16, 32))
    raw.ask("KV.PREFIX.STORE", ns, 0, 2, "DATA", k, v)
    assert raw.ask("V.FETCH", ns + b"_pk", 0, 0, 1) == k
    assert raw.ask("V.FETCH", ns + b"_pv", "BATCH", 0, 2, 1) == [v]
    raw.ask("V.STOREBATCH", ns + b"_pk", 0, 1, 1, v[:8])
    assert raw.ask("KV.PREFIX.FETCH", ns)[1:] == [k[:8] + v[:8], v]


@settings(max_examples=100, deadline=None)
@given(name=st.binary(min_size=1, max_size=60) | st.just(b"\xff\0\r\n" * 1024))
def test_names_are_any_bytes(raw: Any, name: bytes) -> None:
    blob = b"\1\2\3\4"
    assert raw.ask("KV.PREFIX.REGISTER", name, 1, "fp32") == "+OK"
    assert raw.ask("KV.PREFIX.STORE", name, 0, 1, "DATA", blob, blob) == "+OK"
    assert raw.ask("KV.PREFIX.FETCH", name)[1:] == [blob, blob]
    assert raw.ask("KV.PREFIX.MATCH", 2, name, name) == 2
    assert raw.ask("KV.PREFIX.DROP", name, name) == 1
    assert raw.ask("KV.PREFIX.LOOKUP", name) == "+MISS"


def test_layers_and_tokens_far_out(raw: Any, new_name: NewName) -> None:
    sid = new_name()
    raw.ask("V.CREATE", sid, 1, "VQUANT", "fp32")
    assert raw.ask("V.STOREBATCH", sid, 4095, 2**31 - 1, 1, b"abcd") == "+OK"
    assert raw.ask("V.FETCH", sid, 4095, 2**31 - 1) == b"abcd"
    assert raw.ask("V.FETCH", sid, 4095, "RANGE", 2**31 - 1, 2**31) == b"abcd"
