"""The words of row layouts and number formats, shared by the V.* and KV.PREFIX.* calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from pion_server.client.calls.base import array, bulk, unexpected, words
from pion_server.wire.encode import Argument
from pion_server.wire.values import Reply

# How rows look on the wire: converted, or NATIVE: the bytes that the codec stores. FP32 is the
# default of every command.
Fmt: TypeAlias = Literal["FP32", "FP16", "BF16", "NATIVE"]


class Layout(NamedTuple):
    """One layer of a side: the codec its rows are stored by, and values a row."""

    codec: str
    dim: int

    @property
    def word(self) -> str:
        """`fmt=fp16,dim=192`."""
        return f"fmt={self.codec},dim={self.dim}"


def schema(keyword: str, layouts: Sequence[tuple[str, int]]) -> tuple[Argument, ...]:
    """`KEYWORD <n> <word> ...`, a word a layer."""
    return words(keyword, len(layouts), *(Layout(*layout).word for layout in layouts))


def layouts(reply: Reply) -> tuple[Layout, ...]:
    """An array of words."""
    return tuple(_layout(bytes(bulk(word))) for word in array(reply))


def _layout(word: bytes) -> Layout:
    fields = dict(part.partition("=")[::2] for part in word.decode("latin-1").split(","))
    codec, dim = fields.get("fmt"), fields.get("dim", "")
    return Layout(codec, int(dim)) if codec and dim.isdecimal() else unexpected(word)
