"""KV.PREFIX.*: a prefix is two sessions, <ns>_pk and <ns>_pv, that come and go together.

Wire forms beyond the specification's: docs/decisions/0001-prefix-wire-forms.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pion_server.commands.arguments import Arguments, Option
from pion_server.commands.blocks import block_table
from pion_server.commands.context import Context
from pion_server.commands.layouts import (
    LAYOUT_ERRORS,
    NO_SCHEMA_WORD,
    schema_words,
    token,
    uniform,
)
from pion_server.commands.registry import Access, Home, command
from pion_server.errors import Mismatch, PionError
from pion_server.store.mutations import Declaration, DropPrefix, RegisterPrefix
from pion_server.store.prefixes import Prefix
from pion_server.store.schema import MAX_DIM, MAX_LAYERS, Schema
from pion_server.store.session import MAX_TOKENS
from pion_server.team import Listing
from pion_server.wire.values import OK, Payload, Reply, Status

Known = TypeVar("Known", bound=Prefix | Listing)

GROUP = "KV.PREFIX"
MISMATCH = "-MISMATCH"
MAX_PREFILL_MS = 1e9  # eleven days
OPTIONS = (
    "[LAYERS <n> TOKENS <n>] [PREFILL_MS <ms>] [FINGERPRINT <hex>]"
    " [BLOCKS <block_size> <count> <blob>] [PARENT <ns>]"
)
REGISTER_ERRORS = (
    MISMATCH,
    *LAYOUT_ERRORS,
    "-ERR LAYERS and TOKENS declare a complete prefix only together",
    "-ERR the PARENT is this namespace itself, or goes on from it",
    "-OOM",
)


def namespace(args: Arguments) -> bytes:
    return args.name("namespace")


def fingerprint(args: Arguments) -> bytes:
    """An even number of hex digits, at most 128, as bytes."""
    digits = args.text("FINGERPRINT")
    try:
        value = bytes.fromhex(digits) if digits.isalnum() else b""
    except ValueError:
        value = b""
    if not 1 <= len(value) <= 64:
        raise PionError("FINGERPRINT must be 2 to 128 hex digits, an even number of them")
    return value


def prefill_ms(args: Arguments) -> float:
    """Milliseconds; the bound keeps one caller from spoiling the receipt of all."""
    return args.number("PREFILL_MS", MAX_PREFILL_MS)


FINGERPRINT: Mapping[str, Option] = {"FINGERPRINT": fingerprint}
REGISTER_OPTIONS: Mapping[str, Option] = {
    "LAYERS": lambda a: a.integer("LAYERS", 1, MAX_LAYERS),
    "TOKENS": lambda a: a.integer("TOKENS", 1, MAX_TOKENS),
    "PREFILL_MS": prefill_ms,
    "BLOCKS": block_table,
    "PARENT": lambda a: a.name("PARENT"),
    **FINGERPRINT,
}
LOOKUP_OPTIONS: Mapping[str, Option] = {
    "TOKENS": lambda a: token(a, "TOKENS"),
    "PREFILL_MS": prefill_ms,
    **FINGERPRINT,
}


@command(
    "KV.PREFIX.REGISTER",
    arity=-4,
    group=GROUP,
    access=Access.WRITE,
    syntax=f"KV.PREFIX.REGISTER <ns> <kv_dim> <codec> {OPTIONS}",
    reply="+OK",
    errors=REGISTER_ERRORS,
)
def register(ctx: Context, raw: list[Payload]) -> Reply:
    """Open a namespace whose layers all have `kv_dim` values a row, for K and for V. LAYERS and
    TOKENS, always together, declare what is complete: the namespace is a hit only when every row
    is in. Without them it is a hit at once. PARENT is the namespace of the block before this one,
    there or not: it is not evicted before this one. Repeating a REGISTER keeps the rows."""
    args = ctx.arguments(raw)
    ns, dim = namespace(args), args.integer("kv_dim", 1, MAX_DIM)
    schema = uniform(dim, args.text("codec"))
    return _register(ctx, ns, schema, schema, args.options(REGISTER_OPTIONS))


@command(
    "KV.PREFIX.REGISTER.SCHEMA",
    arity=-8,
    group=GROUP,
    access=Access.WRITE,
    syntax=(
        "KV.PREFIX.REGISTER.SCHEMA <ns> K <n> fmt=<codec>,dim=<d> ... V <n> fmt=<codec>,dim=<d> ..."
        f" {OPTIONS}"
    ),
    reply="+OK",
    errors=(
        *REGISTER_ERRORS,
        NO_SCHEMA_WORD,
        "-ERR K and V must have the same number of layers",
        "-ERR LAYERS is more than the <n> words of the schema",
    ),
)
def register_schema(ctx: Context, raw: list[Payload]) -> Reply:
    """REGISTER with a layout for each layer, apart for K and V. LAYERS may be left out: it is the
    number of words."""
    args = ctx.arguments(raw)
    ns = namespace(args)
    schemas: dict[str, Schema] = {}
    for side in ("K", "V"):
        if args.keyword(side) != side:
            raise PionError(f"{side} <n> fmt=<codec>,dim=<d> ... is missing")
        schemas[side] = schema_words(args)
    keys, values = schemas["K"], schemas["V"]
    if len(keys.formats) != len(values.formats):
        raise PionError("K and V must have the same number of layers")
    options = args.options(REGISTER_OPTIONS)
    if "TOKENS" in options and options.setdefault("LAYERS", len(keys.formats)) > len(keys.formats):
        raise PionError(f"LAYERS is more than the {len(keys.formats)} words of the schema")
    return _register(ctx, ns, keys, values, options)


def _register(
    ctx: Context, ns: bytes, keys: Schema, values: Schema, options: dict[str, Any]
) -> Reply:
    if ("LAYERS" in options) != ("TOKENS" in options):
        raise PionError("LAYERS and TOKENS declare a complete prefix only together")
    declared = Declaration(options["LAYERS"], options["TOKENS"]) if "TOKENS" in options else None
    ctx.offer(
        RegisterPrefix(
            ns,
            keys,
            values,
            declared=declared,
            fingerprint=options.get("FINGERPRINT"),
            blocks=options.get("BLOCKS"),
            prefill_ms=options.get("PREFILL_MS"),
            parent=options.get("PARENT"),
        )
    )
    return OK


@command(
    "KV.PREFIX.LOOKUP",
    arity=-2,
    group=GROUP,
    home=Home.ANYWHERE,
    syntax="KV.PREFIX.LOOKUP <ns> [TOKENS <n>] [PREFILL_MS <ms>] [FINGERPRINT <hex>]",
    reply="+HIT | +MISS",
    errors=(MISMATCH,),
)
def lookup(ctx: Context, raw: list[Payload]) -> Reply:
    """Whether the namespace can be fetched whole, and the entry in the receipt: TOKENS and
    PREFILL_MS say what this restore really spared, where the caller knows better. A hit is not
    evicted for some seconds, unless nothing else is left; one of another worker may be."""
    args = ctx.arguments(raw)
    ns = namespace(args)
    options = args.options(LOOKUP_OPTIONS)
    stats = ctx.stats
    here = ctx.store.prefix(ns)
    try:
        prefix = usable(here or ctx.elsewhere(ns), options.get("FINGERPRINT"))
    except Mismatch:
        stats.miss()
        raise
    if prefix is None:
        stats.miss()
        return Status("MISS")
    if here is not None:
        ctx.store.lease(here.unit, ctx.now_ms())
    tokens = options.get("TOKENS", prefix.tokens)
    # The registered time is that of the whole prefix; it says nothing of a part or of a chain.
    known = prefix.prefill_ms if tokens == prefix.tokens else None
    stats.hit(tokens, options.get("PREFILL_MS", known))
    return Status("HIT")


def hit(ctx: Context, ns: bytes, wanted: bytes | None) -> Prefix | None:
    """The namespace if it is complete, and on this worker. Raises Mismatch like usable()."""
    return usable(ctx.store.prefix(ns), wanted)


def usable(prefix: Known | None, wanted: bytes | None) -> Known | None:
    """The namespace if it is complete; raises Mismatch where it was stored under another
    fingerprint than the one that the caller names."""
    if prefix is None:
        return None
    match_fingerprint(prefix, wanted)
    return prefix if prefix.sealed else None


def match_fingerprint(prefix: Prefix | Listing, wanted: bytes | None) -> None:
    """Raise Mismatch where the caller names a fingerprint and the prefix has another, or none."""
    if wanted is not None and prefix.fingerprint != wanted:
        raise Mismatch(
            "this namespace holds a prefix with another fingerprint (another model, layout or "
            "tokens); use another namespace, or KV.PREFIX.DROP it"
        )


@command(
    "KV.PREFIX.MATCH",
    arity=-3,
    group=GROUP,
    home=Home.ANYWHERE,
    syntax="KV.PREFIX.MATCH <n> <ns> [<ns> ...] [FINGERPRINT <hex>]",
    reply=":<number of leading namespaces that are hits>",
)
def match(ctx: Context, raw: list[Payload]) -> Reply:
    """How much of a chain of blocks is there, in one round trip. Counts nothing in the receipt.
    Hits are held as by LOOKUP."""
    args = ctx.arguments(raw)
    count = args.integer("number of namespaces", 1, MAX_TOKENS)
    names = [namespace(args) for _ in range(min(count, len(raw)))]
    wanted = args.options(FINGERPRINT).get("FINGERPRINT")

    def elsewhere(name: bytes) -> bool:
        there = ctx.elsewhere(name)
        return there is not None and there.sealed and wanted in (None, there.fingerprint)

    return ctx.store.match(names, wanted, ctx.now_ms(), elsewhere)


@command(
    "KV.PREFIX.DROP",
    arity=-2,
    group=GROUP,
    access=Access.WRITE,
    home=Home.NAMESPACES,
    syntax="KV.PREFIX.DROP <ns> [<ns> ...]",
    reply=":<number dropped>",
)
def drop(ctx: Context, raw: list[Payload]) -> Reply:
    """Free both sessions of each namespace. One that is not held counts 0. Replies that are on
    their way keep their rows. Of several workers, the one that holds them all has to be asked."""
    args = ctx.arguments(raw)
    names = [namespace(args) for _ in raw]
    return sum(ctx.apply(DropPrefix(name)) for name in names)


@command(
    "KV.PREFIX.INFO",
    arity=1,
    group=GROUP,
    home=Home.ANYWHERE,
    syntax="KV.PREFIX.INFO",
    reply="a bulk of lines <field>:<value>",
)
def info(ctx: Context, raw: list[Payload]) -> Reply:
    """Totals: registered_prefixes, total_prefix_tokens, vstore_sessions, vstore_total_fetches,
    vstore_bytes (rows held, in their stored format), wal_bytes (0 without a log), ssm_states,
    ssm_bytes; memory_used and memory_limit (what --max-memory is about; 0: no limit),
    sessions_limit, evictions (of a prefix, session or key), admission_rejections. All of them,
    limits too, are those of one `worker`. Attention state: sdpa_warm and sdpa_cold (layers),
    sdpa_demotions (warm to cold, ever), sdpa_rehydrates (cold to warm, ever), sdpa_bytes."""
    held, budget, attention = ctx.store, ctx.tenant.budget, ctx.tenant.attention
    fields = {
        "registered_prefixes": held.prefix_count,
        "total_prefix_tokens": held.prefix_tokens,
        "vstore_sessions": held.session_count,
        "vstore_total_fetches": ctx.stats.prefix_fetches,
        "vstore_bytes": held.row_bytes,
        "wal_bytes": ctx.tenant.journal.wal_bytes if ctx.tenant.journal else 0,
        "ssm_states": held.recurrent_count,
        "ssm_bytes": held.recurrent_bytes,
        "memory_used": held.bytes_used,
        "memory_limit": budget.memory,
        "sessions_limit": budget.sessions,
        "evictions": ctx.stats.evicted,
        "admission_rejections": ctx.stats.turned_away,
        "sdpa_warm": attention.warm,
        "sdpa_cold": attention.cold,
        "sdpa_demotions": attention.demotions,
        "sdpa_rehydrates": attention.rehydrates,
        "sdpa_bytes": attention.nbytes,
        "worker": ctx.stats.worker,
    }
    return "".join(f"{name}:{value}\r\n" for name, value in fields.items())
