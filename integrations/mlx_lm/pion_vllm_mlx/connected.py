"""What an object that talks to Pion has: counters, connections, a thread that stores."""

from __future__ import annotations

import weakref
from typing import Any, Self

from pion_vllm_mlx.background import Background
from pion_vllm_mlx.remote import Remote
from pion_vllm_mlx.stats import Stats


class Connected:
    """One pion-server at `url`. `timeout` (seconds) bounds what one call can lose to it."""

    def __init__(self, url: str, timeout: float) -> None:
        self._timeout = timeout
        self._stats = Stats()
        self._remote = Remote(url, timeout, self._stats)
        self._remotes = [self._remote]  # to be closed
        self._background = Background()
        # Runs on close(), when the object is collected, or when the interpreter exits.
        self._finish = weakref.finalize(self, _finish, self._background, self._remotes, timeout)

    def stats(self) -> dict[str, Any]:
        """Counters since the start: hits, misses, hit_rate, fetch_ms_total, store_ms_total, ...

        Times are milliseconds, sizes bytes; `errors` counts failures by kind.
        """
        return self._stats.as_dict()

    def flush(self) -> bool:
        """Wait until pending stores are over; False where that takes longer than `timeout`."""
        return self._background.wait(self._timeout)

    def close(self) -> None:
        """Finish pending stores, as flush() does, and close the connections."""
        self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _finish(background: Background, remotes: list[Remote], timeout: float) -> None:
    background.close(timeout)
    for remote in remotes:
        remote.close()
