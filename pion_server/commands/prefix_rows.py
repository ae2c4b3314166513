"""KV.PREFIX.STORE and FETCH: a whole prefix, all layers and both sides, in one round trip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pion_server.codecs.convert import WireFormat
from pion_server.commands.arguments import Arguments, Option
from pion_server.commands.context import Context
from pion_server.commands.layouts import (
    FETCH_ERRORS,
    STORE_ERRORS,
    Incoming,
    known,
    layer_index,
    outgoing,
    span,
    start_and_count,
    store,
    token,
    wire_format,
)
from pion_server.commands.prefix import (
    FINGERPRINT,
    GROUP,
    MISMATCH,
    hit,
    match_fingerprint,
    namespace,
)
from pion_server.commands.registry import Access, Job, command
from pion_server.errors import PionError
from pion_server.store.prefixes import sides
from pion_server.wire.values import OK, Payload, Reply


def layer_span(args: Arguments) -> tuple[int, int]:
    """The value of LAYERS: a half-open range of layers."""
    return span(args, "LAYERS", layer_index)


STORE_OPTIONS: Mapping[str, Option] = {"LAYERS": layer_span, "FMT": wire_format, **FINGERPRINT}
FETCH_OPTIONS: Mapping[str, Option] = {
    **STORE_OPTIONS,
    "RANGE": lambda a: span(a, "RANGE", token),
}


@command(
    "KV.PREFIX.STORE",
    arity=-7,
    group=GROUP,
    access=Access.WRITE,
    syntax=(
        "KV.PREFIX.STORE <ns> <start> <count> [LAYERS <a> <b>] [FMT FP32|FP16|BF16|NATIVE]"
        " [FINGERPRINT <hex>] DATA <k_a> <v_a> <k_a+1> <v_a+1> ..."
    ),
    reply="+OK",
    errors=(
        MISMATCH,
        "-ERR unknown namespace",
        "-ERR expected LAYERS, FMT, FINGERPRINT or DATA, each once",
        "-ERR DATA takes a K and a V blob for each layer",
        *STORE_ERRORS,
    ),
)
def store_rows(ctx: Context, raw: list[Payload]) -> Reply | Job:
    """Rows of several layers, both sides, in one request: all of them are stored, or none. Without
    LAYERS the blobs are those of layers 0, 1, 2 and so on. With FINGERPRINT, a namespace that was
    registered under another one is left as it is, so a REGISTER and a STORE can go in one write."""
    args = ctx.arguments(raw)
    ns = namespace(args)
    if ctx.ignores(sides(ns)[0]):
        return OK
    prefix = known(ctx, ns)
    start, count = start_and_count(args)
    options: dict[str, Any] = {}
    while (word := args.keyword("DATA")) != "DATA":
        if word not in STORE_OPTIONS or word in options:
            words = ", ".join(STORE_OPTIONS)
            raise PionError(f"expected {words} or DATA, each once, got '{word[:40]}'")
        options[word] = STORE_OPTIONS[word](args)
    match_fingerprint(prefix, options.get("FINGERPRINT"))
    blobs = []
    while args:
        blobs.append(args.blob("blob"))
    first, last = options.get("LAYERS", (0, len(blobs) // 2))
    if not blobs or len(blobs) != 2 * (last - first):
        raise PionError(f"DATA takes a K and a V blob for each layer, got {len(blobs)} blobs")
    rows = []
    for index, blob in enumerate(blobs):
        sid = prefix.values_sid if index % 2 else prefix.keys_sid
        rows.append(Incoming(sid, first + index // 2, blob))
    return store(ctx, rows, start, count, options.get("FMT", WireFormat.FP32))


@command(
    "KV.PREFIX.FETCH",
    arity=-2,
    group=GROUP,
    syntax=(
        "KV.PREFIX.FETCH <ns> [LAYERS <a> <b>] [RANGE <start> <end>]"
        " [FMT FP32|FP16|BF16|NATIVE] [FINGERPRINT <hex>]"
    ),
    reply=(
        "null where the namespace is no hit or has no rows; else an array: a map (tokens, start,"
        " end, first_layer, layers, keys, values), then bulks k_a, v_a, k_a+1, v_a+1, ..."
    ),
    errors=(MISMATCH, *FETCH_ERRORS),
)
def fetch(ctx: Context, raw: list[Payload]) -> Reply:
    """Everything a cache is rebuilt from, in one reply that streams from the store. Ranges are
    half-open; without them all layers and all tokens come. `keys` and `values` name the stored
    layout of each layer sent (fmt=<codec>,dim=<d>), which is what NATIVE bytes are in."""
    args = ctx.arguments(raw)
    ns = namespace(args)
    options = args.options(FETCH_OPTIONS)
    prefix = hit(ctx, ns, options.get("FINGERPRINT"))
    if prefix is None or not prefix.tokens:
        return None
    first, last = options.get("LAYERS", (0, prefix.layers))
    start, end = options.get("RANGE", (0, prefix.tokens))
    views = [
        ctx.store.view(sid, layer, start, end)
        for layer in range(first, last)
        for sid in (prefix.keys_sid, prefix.values_sid)
    ]
    head: Reply = {
        "tokens": prefix.tokens,
        "start": start,
        "end": end,
        "first_layer": first,
        "layers": last - first,
        "keys": [str(view.format) for view in views[0::2]],
        "values": [str(view.format) for view in views[1::2]],
    }
    fmt = options.get("FMT", WireFormat.FP32)
    return [head, *(outgoing(ctx, view, fmt) for view in views)]
