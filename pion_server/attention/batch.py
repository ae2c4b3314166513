"""Queries of several clients over the same K/V, answered in one product: K and V are read once for
all of them, which is most of what a query costs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from pion_server.attention.base import AttentionBackend, Floats, Heads, Partial, Resident
from pion_server.attention.merge import together

T = TypeVar("T")
# What is made of an answer.
Then: TypeAlias = "Callable[[AttentionBackend, Partial], T]"

# Queries a head: beyond, a product takes as long as its parts, and short ones wait for long ones.
ROOM = 16


@dataclass(slots=True)
class Batch:
    """Queries of one head map, over all rows."""

    kept: Resident
    head_map: Heads
    _asked: list[Floats] = field(default_factory=list)
    _thens: list[Then[Any]] = field(default_factory=list)
    _futures: list[Future[Any]] = field(default_factory=list)

    def takes(self, kept: Resident, queries: Floats, head_map: Heads) -> bool:
        """Whether queries (H_q, M, D) belong to it, and there is room."""
        count = sum(each.shape[1] for each in (*self._asked, queries))
        same = kept is self.kept and bytes(head_map) == bytes(self.head_map)
        return same and count <= ROOM

    def add(self, queries: Floats, then: Then[T]) -> Future[T]:
        """What `then` will have made of the answer, or the error that came in between."""
        future: Future[T] = Future()
        self._asked.append(queries)
        self._thens.append(then)
        self._futures.append(future)
        return future

    def run(self, ready: Callable[[], AttentionBackend]) -> None:
        """Answer all with the backend that is `ready`. No more may be added. What goes wrong with
        one of them afterwards is its own.

        Errors lose their tracebacks: a future would hold the frame that holds it, and with it all
        queries, until the next full garbage collection."""
        try:
            backend = ready()
            found = together(self.kept, self._asked, self.head_map)
        except Exception as error:
            for future in self._futures:
                future.set_exception(error.with_traceback(None))
            return
        for future, then, each in zip(self._futures, self._thens, found, strict=True):
            try:
                future.set_result(then(backend, each))
            except Exception as error:
                future.set_exception(error.with_traceback(None))
