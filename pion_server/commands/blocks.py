"""Block hash tables of a prefix: what cache-aware routers ask for before they pick a server."""

from __future__ import annotations

import struct

import numpy as np

from pion_server.commands.arguments import Arguments
from pion_server.commands.context import Context
from pion_server.commands.registry import command
from pion_server.errors import PionError
from pion_server.store.mutations import BlockTable, Hashes
from pion_server.wire.values import Payload, Reply, Status

GROUP = "KV.PREFIX"
# 2**20 hashes of 64-token blocks are a context of 67 million tokens, searched in under a second.
MAX_HASHES = 1 << 20
UNKNOWN = Status("UNKNOWN")


def _hashes(args: Arguments) -> Hashes:
    """`<count> <blob>`: count little-endian u64."""
    count = args.integer("hash_count", 1, MAX_HASHES)
    blob = args.blob("hash_blob")
    if len(blob) != 8 * count:
        raise PionError(f"hash_blob must be 8 * hash_count = {8 * count} bytes, got {len(blob)}")
    return np.frombuffer(blob, dtype="<u8")


def block_table(args: Arguments) -> BlockTable:
    """The value of BLOCKS: `<block_size> <count> <blob>`."""
    return BlockTable(args.integer("block_size", 1, 2**32 - 1), _hashes(args))


@command(
    "KV.PREFIX.BLOCKS",
    arity=2,
    group=GROUP,
    syntax="KV.PREFIX.BLOCKS <ns>",
    reply=(
        "a bulk: block_size u32, block_count u32, then the u64 hashes in token order,"
        " all little-endian | +UNKNOWN"
    ),
)
def blocks(ctx: Context, raw: list[Payload]) -> Reply:
    """The block hash table registered with BLOCKS."""
    args = ctx.arguments(raw)
    prefix = ctx.store.prefix(args.name("namespace"))
    if prefix is None or prefix.blocks is None:
        return UNKNOWN
    table = prefix.blocks
    return struct.pack("<II", table.block_size, len(table.hashes)) + table.hashes.tobytes()


@command(
    "KV.PREFIX.MEMBERSHIP",
    arity=4,
    group=GROUP,
    syntax="KV.PREFIX.MEMBERSHIP <ns> <hash_count> <hash_blob>",
    reply=(
        "a bulk of ceil(hash_count / 8) bytes, bit i (lowest first) set where hash i is"
        " registered | +UNKNOWN"
    ),
)
def membership(ctx: Context, raw: list[Payload]) -> Reply:
    """Which of the given hashes are in the namespace's block table: a binary search in a sorted
    copy that was made at REGISTER."""
    args = ctx.arguments(raw)
    prefix = ctx.store.prefix(args.name("namespace"))
    probes = _hashes(args)
    if prefix is None or prefix.blocks is None:
        return UNKNOWN
    held = prefix.sorted_hashes
    # A probe beyond the last hash gets the last one, and differs from it.
    found = held.take(held.searchsorted(probes), mode="clip")
    return np.packbits(found == probes, bitorder="little").tobytes()
