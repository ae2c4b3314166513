"""How a session lays out its rows: a codec and a dim for each layer."""

from __future__ import annotations

from dataclasses import dataclass

from pion_server.codecs.base import Codec
from pion_server.errors import PionError

# Far above any model, low enough that a stray number cannot grow tables.
MAX_LAYERS = 4096
MAX_DIM = 1 << 20


def check_layer(index: int) -> None:
    """Raises PionError where no session could have such a layer."""
    if not 0 <= index < MAX_LAYERS:
        raise PionError(f"layer must be between 0 and {MAX_LAYERS - 1}, got {index}")


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """The layout of one layer's rows: `dim` values a row, stored by `codec`."""

    codec: Codec
    dim: int

    def __post_init__(self) -> None:
        if not 1 <= self.dim <= MAX_DIM:
            raise PionError(f"dim must be between 1 and {MAX_DIM}, got {self.dim}")
        self.codec.check_dim(self.dim)

    @property
    def row_bytes(self) -> int:
        return self.codec.row_bytes(self.dim)

    def __str__(self) -> str:
        """The word of the wire: `fmt=fp16,dim=192`."""
        return f"fmt={self.codec.name},dim={self.dim}"


@dataclass(frozen=True, slots=True)
class Schema:
    """Layer formats of a session: one for any number of layers, or one for each."""

    formats: tuple[LayerFormat, ...]
    uniform: bool

    @classmethod
    def same(cls, layer_format: LayerFormat) -> Schema:
        """Every layer alike; the number of layers is open."""
        return cls((layer_format,), uniform=True)

    @classmethod
    def each(cls, formats: tuple[LayerFormat, ...]) -> Schema:
        """Layer i uses formats[i]; other layers do not exist."""
        if not 1 <= len(formats) <= MAX_LAYERS:
            raise PionError(f"a schema has between 1 and {MAX_LAYERS} layers, got {len(formats)}")
        return cls(formats, uniform=False)

    def layer(self, index: int) -> LayerFormat:
        """The format of layer `index`; raises PionError where there is no such layer."""
        if self.uniform:
            check_layer(index)
            return self.formats[0]
        if not 0 <= index < len(self.formats):
            raise PionError(
                f"layer {index} is outside this session's schema of {len(self.formats)} layers"
            )
        return self.formats[index]
