"""Where attention is computed: one backend for the process, used by one thread at a time.

Small work is done at once, on the event loop, since a hop to another thread costs as much as a
small query (about 0.1 ms). Anything larger, all that MLX does, and whatever meets the backend busy
goes to the engine's own thread; so the loop never waits.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import TypeVar

from pion_server.attention.base import AttentionBackend
from pion_server.attention.choose import choose
from pion_server.errors import PionError

T = TypeVar("T")

# Work beyond this would be felt by the other clients of the loop.
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
    takes a while to load and most servers are never asked for attention."""

    def __init__(self, name: str = "auto", *, fp16: bool = False) -> None:
        self._name = name
        self._fp16 = fp16
        self._backend: AttentionBackend | None = None
        self._lock = Lock()  # held while the backend is in use
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pion-attention")

    def do(self, work: Callable[[AttentionBackend], T], cost: Cost) -> T | Future[T]:
        """What `work` returns or raises: itself where it costs so little that it was done at once,
        else its future."""
        if (
            cost.seconds > INLINE_SECONDS
            or not self._may_be_inline
            or not self._lock.acquire(False)
        ):
            return self._executor.submit(self._locked, work)
        try:
            return work(self._ready())
        finally:
            self._lock.release()

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

    def _locked(self, work: Callable[[AttentionBackend], T]) -> T:
        with self._lock:
            return work(self._ready())

    def _ready(self) -> AttentionBackend:
        if self._backend is None:
            self._backend = choose(self._name, fp16=self._fp16)
        return self._backend

    @property
    def _may_be_inline(self) -> bool:
        return self._backend is not None and self._backend.name == "numpy"

    def close(self) -> None:
        """Take no more work, and wait for none."""
        self._executor.shutdown(wait=False, cancel_futures=True)
