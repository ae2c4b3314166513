"""V.*: sessions of rows, addressed by layer and token id. Ranges are half-open."""

from __future__ import annotations

from collections.abc import Sequence

from pion_server.client.buffers import Buffer
from pion_server.client.calls.base import (
    Call,
    Name,
    bulk,
    bulks,
    done,
    option,
    received_into,
    words,
)
from pion_server.client.calls.layout import Fmt, schema
from pion_server.wire.replies import Sink
from pion_server.wire.values import Reply


def v_create(sid: Name, dim: int, vquant: str | None = None) -> Call[None]:
    """Make a session whose layers all have `dim` values a row, stored by the codec `vquant` (fp16
    unless given). One that is there with the same layout keeps its rows."""
    return Call(words("V.CREATE", sid, dim) + option("VQUANT", vquant), done)


def v_create_schema(sid: Name, layouts: Sequence[tuple[str, int]]) -> Call[None]:
    """Make a session with a (codec, dim) for each layer."""
    return Call(words("V.CREATE", sid, 0) + schema("SCHEMA", layouts), done)


def v_storebatch(
    sid: Name, layer: int, start_id: int, count: int, blob: Buffer, *, fmt: Fmt | None = None
) -> Call[None]:
    """Store `count` rows of a layer from token `start_id` on: (count, dim) values in `fmt`."""
    args = words("V.STOREBATCH", sid, layer, start_id, count, blob)
    return Call(args + option("FMT", fmt), done)


def v_fetch_ids(
    sid: Name, layer: int, ids: Sequence[int], *, into: Buffer | None = None
) -> Call[memoryview]:
    """The rows of these tokens in the order named: fp32 (len(ids), dim) as bytes."""
    parse, sink = received_into(into, _rows)
    return Call(words("V.FETCH", sid, layer, *ids), parse, sink)


def v_fetch(
    sid: Name,
    layer: int,
    start: int,
    end: int,
    *,
    fmt: Fmt | None = None,
    into: Buffer | None = None,
) -> Call[memoryview]:
    """The rows of a range: (end - start, dim) in `fmt` as bytes, received into `into` where it is
    given. A range that is not fully there is a PionError."""
    parse, sink = received_into(into, _rows)
    args = words("V.FETCH", sid, layer, "RANGE", start, end)
    return Call(args + option("FMT", fmt), parse, sink)


def v_fetch_batch(
    sid: Name,
    start: int,
    end: int,
    n_layers: int,
    *,
    fmt: Fmt | None = None,
    into: Sink | None = None,
) -> Call[list[memoryview]]:
    """The rows of a range of layers 0 to n_layers - 1, one buffer a layer. `into(layer, nbytes)`
    says where a layer is received."""
    args = words("V.FETCH", sid, "BATCH", start, end, n_layers)
    return Call(args + option("FMT", fmt), bulks, into)


def _rows(reply: Reply) -> memoryview:
    return memoryview(bulk(reply))
