"""All codecs, by their word on the wire and by their number on disk.

A number names one byte layout for ever: a codec that goes away leaves its number unused, and a
changed layout is a new codec with a new number. A new family is one file and a row here.
"""

from __future__ import annotations

from pion_server.codecs.base import Codec
from pion_server.codecs.floats import BF16, FP16, FP32
from pion_server.errors import PionError

_CODECS: tuple[Codec, ...] = (FP32, FP16, BF16)
_BY_NAME = {codec.name: codec for codec in _CODECS}
_BY_NUMBER = {codec.number: codec for codec in _CODECS}


def by_name(name: str) -> Codec:
    """The codec called `name`, in any case; raises PionError naming the known ones."""
    codec = _BY_NAME.get(name.lower())
    if codec is None:
        raise PionError(f"unknown codec '{name[:32]}', known are {', '.join(_BY_NAME)}")
    return codec


def by_number(number: int) -> Codec:
    """The codec with this number on disk; raises PionError where this version has none."""
    codec = _BY_NUMBER.get(number)
    if codec is None:
        raise PionError(f"codec number {number} is not known to this version of Pion")
    return codec


def names() -> tuple[str, ...]:
    """Every codec's name."""
    return tuple(_BY_NAME)
