"""KV.PREFIX.* and the receipt. Wire forms: docs/decisions/0001-prefix-wire-forms.md.

A fingerprint is a hex string; where the namespace was stored under another one the call raises
Mismatch. Ranges of layers and of rows are half-open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pion_server.client.buffers import Buffer
from pion_server.client.calls.base import (
    Call,
    Name,
    array,
    bulk,
    done,
    integer,
    lines,
    mapping,
    option,
    span,
    status,
    text,
    unexpected,
    words,
)
from pion_server.client.calls.layout import Fmt, Layout, layouts, schema
from pion_server.wire.encode import Argument
from pion_server.wire.replies import Sink
from pion_server.wire.values import Reply, Status

Hashes: TypeAlias = npt.NDArray[np.uint64]


class BlockTable(NamedTuple):
    """Block hashes of a prefix, u64 (n,), in token order."""

    block_size: int
    hashes: Hashes


class Worker(NamedTuple):
    """A process of the server; `port`, `fast_port` (of the binary lane; 0: there is none) and
    `unixsocket` (empty: there is none) lead to that one alone."""

    worker: int
    host: str
    port: int
    pid: int
    up: bool
    fast_port: int
    unixsocket: str


@dataclass(frozen=True, slots=True)
class PrefixRows:
    """What KV.PREFIX.FETCH answers: rows `start` to `end` of a prefix of `tokens`.

    `rows[i]` are K and V of layer `first_layer + i`: (end - start, dim) values in the format that
    was asked for, as bytes. `keys[i]` and `values[i]` say how they are stored.
    """

    tokens: int
    start: int
    end: int
    first_layer: int
    keys: tuple[Layout, ...]
    values: tuple[Layout, ...]
    rows: list[tuple[memoryview, memoryview]]


def prefix_register(
    ns: Name,
    dim: int,
    codec: str,
    *,
    layers: int | None = None,
    tokens: int | None = None,
    prefill_ms: float | None = None,
    fingerprint: str | None = None,
    blocks: tuple[int, Hashes] | None = None,
    parent: Name | None = None,
) -> Call[None]:
    """Open a namespace with `dim` values a row on both sides of every layer. With `layers` and
    `tokens` it is a hit only once all these rows are in. `blocks` is (block_size, u64 hashes).
    `parent`, the namespace of the block before this one, is not evicted before this one."""
    args = words("KV.PREFIX.REGISTER", ns, dim, codec)
    return Call(args + _declared(layers, tokens, prefill_ms, fingerprint, blocks, parent), done)


def prefix_register_schema(
    ns: Name,
    keys: Sequence[tuple[str, int]],
    values: Sequence[tuple[str, int]],
    *,
    layers: int | None = None,
    tokens: int | None = None,
    prefill_ms: float | None = None,
    fingerprint: str | None = None,
    blocks: tuple[int, Hashes] | None = None,
    parent: Name | None = None,
) -> Call[None]:
    """`prefix_register` with a (codec, dim) for each layer, apart for K and V; `layers` defaults to
    their number."""
    args = words("KV.PREFIX.REGISTER.SCHEMA", ns) + schema("K", keys) + schema("V", values)
    return Call(args + _declared(layers, tokens, prefill_ms, fingerprint, blocks, parent), done)


def _declared(
    layers: int | None,
    tokens: int | None,
    prefill_ms: float | None,
    fingerprint: str | None,
    blocks: tuple[int, Hashes] | None,
    parent: Name | None,
) -> tuple[Argument, ...]:
    return (
        option("LAYERS", layers)
        + option("TOKENS", tokens)
        + option("PREFILL_MS", prefill_ms)
        + option("FINGERPRINT", fingerprint)
        + (words("BLOCKS", blocks[0], *_hashes(blocks[1])) if blocks else ())
        + option("PARENT", parent)
    )


def _hashes(hashes: Hashes) -> tuple[int, Buffer]:
    table = np.ascontiguousarray(hashes, dtype="<u8")
    return table.size, table


def prefix_lookup(
    ns: Name,
    *,
    tokens: int | None = None,
    prefill_ms: float | None = None,
    fingerprint: str | None = None,
) -> Call[bool]:
    """Whether the prefix is there. Writes the receipt: a hit is credited `tokens` and `prefill_ms`
    where they are given, else those of the namespace."""
    args = words("KV.PREFIX.LOOKUP", ns) + option("TOKENS", tokens)
    credit = option("PREFILL_MS", prefill_ms) + option("FINGERPRINT", fingerprint)
    return Call(args + credit, _is_hit)


def _is_hit(reply: Reply) -> bool:
    word = status(reply)
    return word == "HIT" if word in ("HIT", "MISS") else unexpected(reply)


def prefix_match(namespaces: Sequence[Name], *, fingerprint: str | None = None) -> Call[int]:
    """How many leading namespaces are hits."""
    args = words("KV.PREFIX.MATCH", len(namespaces), *namespaces)
    return Call(args + option("FINGERPRINT", fingerprint), integer)


def prefix_blocks(ns: Name) -> Call[BlockTable | None]:
    """The block table of a namespace, or None."""
    return Call(words("KV.PREFIX.BLOCKS", ns), _block_table)


def _block_table(reply: Reply) -> BlockTable | None:
    if reply == Status("UNKNOWN"):
        return None
    data = bulk(reply)
    size, count = (int(number) for number in np.frombuffer(data, "<u4", count=2))
    return BlockTable(size, np.frombuffer(data, "<u8", count=count, offset=8))


def prefix_membership(ns: Name, hashes: Hashes) -> Call[npt.NDArray[np.bool_] | None]:
    """For each hash, u64 (n,), whether it is in the namespace's block table: bool (n,). None where
    the namespace or its table is not there."""
    count, table = _hashes(hashes)

    def bitmap(reply: Reply) -> npt.NDArray[np.bool_] | None:
        if reply == Status("UNKNOWN"):
            return None
        bits = np.frombuffer(bulk(reply), np.uint8)
        if len(bits) != (count + 7) // 8:
            unexpected(reply)
        return np.unpackbits(bits, count=count, bitorder="little").view(np.bool_)

    return Call(words("KV.PREFIX.MEMBERSHIP", ns, count, table), bitmap)


def prefix_store(
    ns: Name,
    start: int,
    count: int,
    rows: Sequence[tuple[Buffer, Buffer]],
    *,
    first_layer: int = 0,
    fmt: Fmt | None = None,
    fingerprint: str | None = None,
) -> Call[None]:
    """Store rows `start` to `start + count` of consecutive layers, all of them or none: `rows[i]`
    are K and V of layer `first_layer + i`, (count, dim) values in `fmt`. Sent without a copy, so
    leave them alone until the call is over. Raises Mismatch where the namespace was registered
    under another `fingerprint` than the one given."""
    head = words("KV.PREFIX.STORE", ns, start, count)
    layers = span("LAYERS", (first_layer, first_layer + len(rows)))
    data = words("DATA", *(blob for pair in rows for blob in pair))
    options = option("FMT", fmt) + option("FINGERPRINT", fingerprint)
    return Call(head + layers + options + data, done)


def prefix_fetch(
    ns: Name,
    *,
    layers: tuple[int, int] | None = None,
    rows: tuple[int, int] | None = None,
    fmt: Fmt | None = None,
    fingerprint: str | None = None,
    into: Sink | None = None,
) -> Call[PrefixRows | None]:
    """All rows of a prefix, or of ranges of its layers and rows; None where it is no hit.
    `into(i, nbytes)` says where the i-th buffer of k_a, v_a, k_a+1, v_a+1, ... is received."""
    args = words("KV.PREFIX.FETCH", ns) + span("LAYERS", layers) + span("RANGE", rows)
    return Call(args + option("FMT", fmt) + option("FINGERPRINT", fingerprint), _prefix_rows, into)


def _prefix_rows(reply: Reply) -> PrefixRows | None:
    if reply is None:
        return None
    head, *blobs = array(reply)
    head = mapping(head)
    buffers = [memoryview(bulk(blob)) for blob in blobs]
    keys, values = layouts(head["keys"]), layouts(head["values"])
    if not len(keys) == len(values) == len(buffers) / 2:
        unexpected(reply)
    return PrefixRows(
        tokens=integer(head["tokens"]),
        start=integer(head["start"]),
        end=integer(head["end"]),
        first_layer=integer(head["first_layer"]),
        keys=keys,
        values=values,
        rows=list(zip(buffers[0::2], buffers[1::2], strict=True)),
    )


def prefix_drop(*namespaces: Name) -> Call[int]:
    """Free prefixes. How many were held."""
    return Call(words("KV.PREFIX.DROP", *namespaces), integer, retry=False)


def prefix_info() -> Call[dict[str, int]]:
    """Totals over all prefixes."""
    return Call(words("KV.PREFIX.INFO"), lambda reply: {k: int(v) for k, v in lines(reply).items()})


def pion_stats() -> Call[dict[str, int | float]]:
    """The value receipt: sixteen fields."""
    return Call(words("PION.STATS"), lambda reply: dict(mapping(reply)))


def pion_stats_reset() -> Call[None]:
    """Counters of the receipt to zero."""
    return Call(words("PION.STATS", "RESET"), done)


def pion_workers() -> Call[list[Worker]]:
    """The server's processes, in the order of their numbers."""
    return Call(
        words("PION.WORKERS"), lambda reply: [_worker(mapping(each)) for each in array(reply)]
    )


def _worker(fields: Mapping[str, Any]) -> Worker:
    return Worker(
        worker=integer(fields["worker"]),
        host=text(fields["host"]),
        port=integer(fields["port"]),
        pid=integer(fields["pid"]),
        up=bool(fields["up"]),
        fast_port=integer(fields["fast_port"]),
        unixsocket=text(fields["unixsocket"]),
    )
