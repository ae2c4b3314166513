"""Where attention is computed: one backend for the process, on the event loop and one more thread.

Small work is done at once, on the loop, since a hop to another thread costs as much as a small
query (about 0.1 ms), but no more of it in a turn of the loop than its other clients would feel. The
rest, and all that MLX does, goes to the engine's thread. Queries that wait there for the same K/V
become a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import TypeAlias, TypeVar

from pion_server.attention.base import AttentionBackend, Floats, Heads, Resident
from pion_server.attention.batch import Batch, Then
from pion_server.attention.choose import choose
from pion_server.attention.groups import products
from pion_server.errors import PionError

T = TypeVar("T")
Shape: TypeAlias = tuple[int, ...]  # of an array of three axes, as every numpy knows it

# Of one turn of the loop.
INLINE_SECONDS = 2e-3
# About what a core does; an estimate only decides where work is done.
FLOPS = 100e9
BYTES = 25e9
CALL_SECONDS = 30e-6  # of a product, however small
# What softmax takes of a score, and copies take of a value of the queries: as flops, as bytes.
SCORE_FLOPS = 256
QUERY_BYTES = 96


@dataclass(frozen=True, slots=True)
class Cost:
    """About what some work takes: operations, bytes that go through memory, and steps in Python."""

    flops: float = 0
    nbytes: float = 0
    calls: int = 0

    @classmethod
    def of_attention(cls, kept: Shape, queries: Shape, head_map: Heads) -> Cost:
        """Queries (H_q, M, D) over (H, N, D): two products, over K and over V."""
        heads, rows, dim = kept
        scores = rows * queries[0] * queries[1]
        return cls(
            scores * (4 * dim + SCORE_FLOPS),
            8 * heads * rows * dim + QUERY_BYTES * prod(queries),
            products(head_map, heads),
        )

    @classmethod
    def of_transient(cls, kept: Shape, queries: Shape, head_map: Heads) -> Cost:
        """The same where K and V came with the command: they may have to be copied first."""
        return cls.of_attention(kept, queries, head_map) + cls(nbytes=64 * prod(kept))

    @classmethod
    def of_rows(cls, rows: int, queries: Shape) -> Cost:
        """Queries (H_q, M, D), each over so many rows of its own: they are sought and gathered, and
        have a product for themselves."""
        heads, count, dim = queries
        each = heads * count
        scores = rows * each
        return cls(
            scores * (4 * dim + SCORE_FLOPS),
            24 * scores * dim + QUERY_BYTES * prod(queries),
            each,
        )

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.nbytes + other.nbytes, self.calls + other.calls)

    @property
    def seconds(self) -> float:
        return self.flops / FLOPS + self.nbytes / BYTES + self.calls * CALL_SECONDS


class Engine:
    """Runs work with the backend of this name (choose()), which is made at the first use, since MLX
    takes a while to load and most servers are never asked for attention. But for wait_for(), its
    methods are called on the event loop."""

    def __init__(self, name: str = "auto", *, fp16: bool = False) -> None:
        self._name = name
        self._fp16 = fp16
        self._backend: AttentionBackend | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pion-attention")
        self._spent = 0.0  # seconds of this turn, as estimated
        self._soon: Callable[[Callable[[], None]], object] = lambda new_turn: new_turn()
        self._batch: Batch | None = None  # what more queries may be added to
        self._batching = Lock()  # held while that is done, and while it is closed to them

    def take_turns(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """Count what is done in each turn of the loop that this is the call_soon() of. Until then,
        every call is in a turn of its own."""
        self._soon = call_soon

    def do(self, work: Callable[[AttentionBackend], T], cost: Cost) -> T | Future[T]:
        """What `work` returns or raises: itself where it costs so little that it was done at once,
        else its future."""
        if self._has_time(cost):
            return work(self._ready())
        return self._executor.submit(self._run, work)

    def attend(
        self, kept: Resident, queries: Floats, head_map: Heads, then: Then[T], cost: Cost
    ) -> T | Future[T]:
        """do() what `then` makes of attention of queries (H_q, M, D) over all rows, together with
        others where these have to wait."""
        if self._has_time(cost):
            return then(self._ready(), kept.attend(queries, head_map))
        with self._batching:
            if self._batch is None or not self._batch.takes(kept, queries, head_map):
                self._batch = Batch(kept, head_map)
                self._executor.submit(self._run_batch, self._batch)
            return self._batch.add(queries, then)

    def wait_for(self, work: Callable[[AttentionBackend], T]) -> T:
        """What `work` returns or raises, for a thread that may wait. Raises PionError where the
        server is stopping."""
        try:
            done = self._executor.submit(self._run, work)
        except RuntimeError:
            raise PionError("the server is stopping") from None
        try:
            return done.result()
        except CancelledError:
            raise PionError("the server is stopping") from None

    def close(self) -> None:
        """Take no more work, and wait for none."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _has_time(self, cost: Cost) -> bool:
        """Whether this turn of the loop has time for it, which is then spent."""
        backend = self._backend
        if backend is None or not backend.threads or self._spent + cost.seconds > INLINE_SECONDS:
            return False
        first, self._spent = not self._spent, self._spent + cost.seconds
        if first:
            self._soon(self._new_turn)
        return True

    def _new_turn(self) -> None:
        self._spent = 0.0

    def _run(self, work: Callable[[AttentionBackend], T]) -> T:
        return work(self._ready())

    def _run_batch(self, batch: Batch) -> None:
        with self._batching:
            if self._batch is batch:
                self._batch = None
        batch.run(self._ready)

    def _ready(self) -> AttentionBackend:
        if self._backend is None:
            self._backend = choose(self._name, fp16=self._fp16)
        return self._backend
