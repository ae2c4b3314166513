"""Parsing shared by the ATTEND.* commands: shapes, blobs, the state a command is about, and where
the computing is done.

Every blob is compared with its shape before anything else happens.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from math import prod
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from pion_server.attention.base import AttentionBackend, Floats, Heads, Partial, Resident
from pion_server.attention.batch import Then
from pion_server.attention.engine import Cost
from pion_server.commands.arguments import Arguments
from pion_server.commands.context import Context
from pion_server.commands.registry import Job
from pion_server.errors import PionError
from pion_server.store.schema import MAX_DIM
from pion_server.store.session import MAX_TOKENS
from pion_server.wire.values import Reply, Stream

T = TypeVar("T")
Indices: TypeAlias = npt.NDArray[np.uint32]

GROUP = "ATTEND"
# A head map has a byte for each query head.
MAX_HEADS = 256
MAX_QUERY_HEADS = 4096

QUERY_REPLY = "a bulk: fp32 (H, M, D), and for M > 1 the LSE, fp32 (H, M), behind it"
# Error replies, as the entries of the command table name them.
BLOB_ERROR = "-ERR expected <n> bytes of <blob>"
STATE_ERRORS = ("-COLDMISS", "-ERR session not found", "-ERR the state has")
MAP_ERRORS = ("-ERR head_map names K/V head",)
SUFFIX_ERROR = "-ERR the <M> queries are the last rows of the suffix"


def heads(args: Arguments, what: str = "H") -> int:
    """A number of K/V heads."""
    return args.integer(what, 1, MAX_HEADS)


def query_heads(args: Arguments, what: str = "H_q") -> int:
    return args.integer(what, 1, MAX_QUERY_HEADS)


def head_dim(args: Arguments) -> int:
    return args.integer("D", 1, MAX_DIM)


def tokens(args: Arguments, what: str, low: int = 1) -> int:
    """A number of tokens."""
    return args.integer(what, low, MAX_TOKENS)


def window(args: Arguments) -> int | None:
    """The optional last argument."""
    wanted = tokens(args, "fa_window") if args else None
    args.end()
    return wanted


def floats(args: Arguments, what: str, *shape: int) -> Floats:
    """A blob of fp32 values of that shape, by reference."""
    return np.frombuffer(sized(args, what, 4 * prod(shape)), "<f4").reshape(shape)


def indices(args: Arguments, what: str, *shape: int) -> Indices:
    """A blob of unsigned 32-bit integers of that shape, by reference."""
    return np.frombuffer(sized(args, what, 4 * prod(shape)), "<u4").reshape(shape)


def queries(args: Arguments, head_count: int, dim: int) -> Floats:
    """Q, fp32 (head_count, M, dim): M >= 1 follows from the length of the blob."""
    blob, each = args.blob("Q"), 4 * head_count * dim
    if not blob.nbytes or blob.nbytes % each:
        raise PionError(
            f"Q must be a multiple of {each} bytes ({head_count} x {dim} fp32 values for each of M "
            f"queries), got {blob.nbytes}"
        )
    return np.frombuffer(blob, "<f4").reshape(head_count, -1, dim)


def one_query(args: Arguments, head_count: int, dim: int) -> Floats:
    """Q of a form for one query a head, fp32 (head_count, 1, dim)."""
    return floats(args, "Q", head_count, 1, dim)


def suffix(
    args: Arguments, kv_heads: int, length: int, dim: int, count: int
) -> tuple[Floats, Floats]:
    """K_suf and V_suf, fp32 (kv_heads, length, dim) each, whose last `count` rows are those of the
    queries."""
    shape = kv_heads, length, dim
    keys, values = floats(args, "K_suf", *shape), floats(args, "V_suf", *shape)
    if count > length:
        raise PionError(f"the {count} queries are the last rows of the suffix, which has {length}")
    return keys, values


def head_map(args: Arguments, head_count: int, kv_heads: int) -> Heads:
    """The K/V head of each query head, uint8 (head_count,)."""
    found = np.frombuffer(sized(args, "head_map", head_count), np.uint8)
    if found.max() >= kv_heads:
        raise PionError(f"head_map names K/V head {found.max()}, and there are {kv_heads}")
    return found


def even_groups(head_count: int, kv_heads: int) -> Heads:
    """The head map of a command that has none: as many query heads for each K/V head."""
    if head_count % kv_heads:
        raise PionError(
            f"the state has {kv_heads} K/V heads, of which {head_count} query heads are no multiple"
        )
    return _in_order(head_count // kv_heads, kv_heads)


@lru_cache(maxsize=16)
def _in_order(each: int, kv_heads: int) -> Heads:
    head_map = np.repeat(np.arange(kv_heads, dtype=np.uint8), each)
    head_map.flags.writeable = False  # it is everybody's
    return head_map


def state(ctx: Context, sid: bytes, layer: int, dim: int, kv_heads: int | None = None) -> Resident:
    """The K/V that a query is about. Raises ColdMiss, and PionError where there is none or where
    its shape is another than the one that the command names."""
    kept = ctx.tenant.attention.find(sid, layer)
    held_heads, _, held_dim = kept.shape
    if (kv_heads or held_heads, dim) != (held_heads, held_dim):
        raise PionError(
            f"the state has {held_heads} K/V heads of {held_dim} values, the command "
            f"{kv_heads or held_heads} of {dim}"
        )
    return kept


def attend(ctx: Context, work: Callable[[AttentionBackend], Reply], cost: Cost) -> Reply | Job:
    """The reply that `work` makes."""
    return compute(ctx, work, lambda reply: reply, cost)


def attend_all(
    ctx: Context, kept: Resident, asked: Floats, groups: Heads, then: Then[Reply], cost: Cost
) -> Reply | Job:
    """The reply that `then` makes of attention over all rows, which others may be asked for too."""
    made = ctx.tenant.engine.attend(kept, asked, groups, then, cost)
    return Job(made, lambda reply: reply) if isinstance(made, Future) else made


def compute(
    ctx: Context,
    work: Callable[[AttentionBackend], T],
    finish: Callable[[T], Reply],
    cost: Cost,
) -> Reply | Job:
    """The reply that `finish` makes of what `work` returns, at once where that is little work."""
    made = ctx.tenant.engine.do(work, cost)
    return Job(made, finish) if isinstance(made, Future) else finish(made)


def answer(found: Partial) -> Reply:
    """Out (H_q, M, D) and, for M > 1, the LSE (H_q, M) behind it."""
    out = output(found)
    if found.out.shape[1] == 1:
        return out
    lse = _bytes(found.lse)
    return Stream(out.nbytes + lse.nbytes, (out, lse))


def output(found: Partial) -> memoryview:
    """Out (H_q, M, D) alone."""
    return _bytes(found.out)


def _bytes(values: Floats) -> memoryview:
    return np.ascontiguousarray(values, "<f4").reshape(-1).view(np.uint8).data


def sized(args: Arguments, what: str, nbytes: int) -> memoryview:
    """A blob of so many bytes."""
    blob = args.blob(what)
    if blob.nbytes != nbytes:
        raise PionError(f"expected {nbytes} bytes of {what}, got {blob.nbytes}")
    return blob
