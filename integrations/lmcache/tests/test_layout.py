"""Invariant: a layout covers every byte of its buffer exactly once, whatever is in it, and differs
where the bytes would mean something else.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pion_lmcache.layout import fingerprint, layout_of, word

from pion_server.store.schema import MAX_DIM

SIZES = {
    "torch.float32": 4,
    "torch.float16": 2,
    "torch.bfloat16": 2,
    "torch.float8_e4m3fn": 1,
    "torch.uint8": 1,
}
VALUE = {"fp32": 4, "fp16": 2, "bf16": 2}
shapes = st.lists(st.integers(1, 40), min_size=1, max_size=5).map(tuple)
groups = st.lists(st.tuples(shapes, st.sampled_from(sorted(SIZES))), min_size=1, max_size=3)


def nbytes_of(shape: tuple[int, ...], dtype: str) -> int:
    nbytes = SIZES[dtype]
    for size in shape:
        nbytes *= size
    return nbytes


@given(groups)
def test_both_halves_cover_the_buffer(chunk: list[tuple[tuple[int, ...], str]]) -> None:
    nbytes = sum(nbytes_of(shape, dtype) for shape, dtype in chunk)
    arguments = nbytes, [shape for shape, _ in chunk], [dtype for _, dtype in chunk], None
    if nbytes % 4:
        with pytest.raises(ValueError, match="cannot be cut into two halves"):
            layout_of(*arguments)
        return
    layout = layout_of(*arguments)
    assert 2 * layout.rows * layout.dim * VALUE[layout.codec] == nbytes
    assert layout.rows >= 1
    assert 1 <= layout.dim <= MAX_DIM
    assert layout.exact


@given(st.integers(1, 8), st.integers(1, 64), st.integers(1, 512), st.sampled_from(["fp8", "x"]))
def test_a_codec_sees_rows_of_one_token(layers: int, tokens: int, width: int, codec: str) -> None:
    shape = (2, layers, tokens, width)
    layout = layout_of(2 * 2 * layers * tokens * width, [shape], ["torch.bfloat16"], codec)
    assert (layout.codec, layout.fmt, layout.dim) == (codec, "BF16", width)
    assert layout.rows == layers * tokens
    assert not layout.exact


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 1, 8), "torch.uint8"), ((1, 3, 1, 16), "torch.float16")]
)
def test_a_codec_without_rows_of_floats_is_refused(shape: tuple[int, ...], dtype: str) -> None:
    with pytest.raises(ValueError, match="leave vquant out for this model"):
        layout_of(nbytes_of(shape, dtype), [shape], [dtype], "fp16")


@given(groups, groups)
def test_words_are_equal_only_for_equal_chunks(
    one: list[tuple[tuple[int, ...], str]], other: list[tuple[tuple[int, ...], str]]
) -> None:
    words = [word([s for s, _ in chunk], [d for _, d in chunk]) for chunk in (one, other)]
    assert (words[0] == words[1]) == (one == other)


@given(st.lists(st.text(max_size=4), max_size=3), st.lists(st.text(max_size=4), max_size=3))
def test_fingerprints_do_not_run_together(one: list[str], other: list[str]) -> None:
    assert (fingerprint(*one) == fingerprint(*other)) == (one == other)
