"""Threads that run an engine's blocking calls: questions never wait behind payloads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from pion_lmcache.remote import Unavailable

P = ParamSpec("P")
T = TypeVar("T")


class Lanes:
    """One thread for questions, `connections` threads for transfers."""

    def __init__(self, connections: int) -> None:
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="pion-ask")
        self._moving = ThreadPoolExecutor(connections, thread_name_prefix="pion-move")

    def ask(self, run: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a small call. After close() the future has failed with Unavailable."""
        return _submitted(self._asking, run, *args, **kwargs)

    def move(self, run: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """`ask` for a call that carries payloads."""
        return _submitted(self._moving, run, *args, **kwargs)

    def close(self) -> None:
        """Cancel what waits, and wait for what runs."""
        for lane in (self._asking, self._moving):
            lane.shutdown(wait=False, cancel_futures=True)
        for lane in (self._asking, self._moving):
            lane.shutdown(wait=True)


def _submitted(
    lane: ThreadPoolExecutor, run: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> Future[T]:
    try:
        return lane.submit(run, *args, **kwargs)
    except RuntimeError:  # it is shut down
        failed: Future[T] = Future()
        failed.set_exception(Unavailable())
        return failed
