"""Where attention is computed: one backend for the process, used by one thread at a time.

Small work is done at once, on the event loop, since a hop to another thread costs as much as a
small query (about 0.1 ms), but no more of it in a turn of the loop than its other clients would
feel. The rest, all that MLX does, and whatever meets the backend busy goes to the engine's own
thread; so the loop never waits. Queries that wait there for the same K/V become a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import TypeVar

from pion_server.attention.base import AttentionBackend, Floats, Heads, Resident
from pion_server.attention.batch import Batch, Then
from pion_server.attention.choose import choose
from pion_server.errors import PionError

T = TypeVar("T")

# Of one turn of the loop.
INLINE_SECONDS = 2e-3
# About what a core does; an estimate only decides where work is done.
FLOPS = 40e9
BYTES = 15e9


@dataclass(frozen=True, slots=True)
class Cost:
    """About what some work takes: operations, and bytes that go through memory."""

    flops: float = 0
    nbytes: float = 0

    @classmethod
    def of_attention(cls, kept: tuple[int, int, int], queries: tuple[int, ...]) -> Cost:
        """Queries (H_q, M, D) over (H, N, D): two products, over K and over V."""
        heads, rows, dim = kept
        return cls(4 * rows * prod(queries), 8 * heads * rows * dim)

    @property
    def seconds(self) -> float:
        return self.flops / FLOPS + self.nbytes / BYTES


class Engine:
    """Runs work with the backend of this name (choose()), which is made at the first use, since MLX
    takes a while to load and most servers are never asked for attention. But for wait_for(), its
    methods are called on the event loop."""

    def __init__(self, name: str = "auto", *, fp16: bool = False) -> None:
        self._name = name
        self._fp16 = fp16
        self._backend: AttentionBackend | None = None
        self._lock = Lock()  # held while the backend is in use
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pion-attention")
        self._spent = 0.0  # seconds of this turn, as estimated
        self._soon: Callable[[Callable[[], None]], object] = lambda new_turn: new_turn()
        self._batch: Batch | None = None  # the last one
        self._batching = Lock()  # held while queries are added to it, and while it is closed

    def take_turns(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """Count what is done in each turn of the loop that this is the call_soon() of. Until then,
        every call is in a turn of its own."""
        self._soon = call_soon

    def do(self, work: Callable[[AttentionBackend], T], cost: Cost) -> T | Future[T]:
        """What `work` returns or raises: itself where it costs so little that it was done at once,
        else its future."""
        if not self._begin_inline(cost):
            return self._executor.submit(self._locked, work)
        try:
            return work(self._ready())
        finally:
            self._lock.release()

    def attend(
        self, kept: Resident, queries: Floats, head_map: Heads, then: Then[T], cost: Cost
    ) -> T | Future[T]:
        """do() what `then` makes of attention of queries (H_q, M, D) over all rows, together with
        others where these have to wait."""
        if self._begin_inline(cost):
            try:
                return then(self._ready(), kept.attend(queries, head_map))
            finally:
                self._lock.release()
        with self._batching:
            if self._batch is None or not self._batch.takes(kept, queries, head_map):
                self._batch = Batch(kept, head_map)
                self._executor.submit(self._run, self._batch)
            return self._batch.add(queries, then)

    def wait_for(self, work: Callable[[AttentionBackend], T]) -> T:
        """What `work` returns or raises, for a thread that may wait. Raises PionError where the
        server is stopping."""
        try:
            done = self._executor.submit(self._locked, work)
        except RuntimeError:
            raise PionError("the server is stopping") from None
        try:
            return done.result()
        except CancelledError:
            raise PionError("the server is stopping") from None

    def close(self) -> None:
        """Take no more work, and wait for none."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _begin_inline(self, cost: Cost) -> bool:
        """Whether to go on at once, with the lock held."""
        ready = self._backend is not None and self._backend.name == "numpy"
        if not ready or self._spent + cost.seconds > INLINE_SECONDS:
            return False
        if not self._lock.acquire(blocking=False):
            return False
        first, self._spent = not self._spent, self._spent + cost.seconds
        if first:
            self._soon(self._new_turn)
        return True

    def _new_turn(self) -> None:
        self._spent = 0.0

    def _locked(self, work: Callable[[AttentionBackend], T]) -> T:
        with self._lock:
            return work(self._ready())

    def _run(self, batch: Batch) -> None:
        with self._lock:
            with self._batching:
                batch.open = False
            batch.run(self._ready)

    def _ready(self) -> AttentionBackend:
        if self._backend is None:
            self._backend = choose(self._name, fp16=self._fp16)
        return self._backend
