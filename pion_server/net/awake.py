"""Going to sleep and being woken is the larger part of a short request's time. So where a request
comes soon after the one before, the event loop looks for the next one as long before it sleeps.

It sleeps at once where clients take longer than that, and gives way to whoever wants its core:
often the very client that it waits for.
"""

from __future__ import annotations

import asyncio
import os
import time

# From an answer to the next request of a client of this machine, where both had to be woken; the
# client waits for the answer in the same way (client/sync.py). With half as much, two that once
# went to sleep send each other to sleep again.
AWAKE_SECONDS = 300e-6


class Awake:
    """Keeps the running loop awake."""

    def __init__(self) -> None:
        self.jobs = 0  # under way in other threads, which need the interpreter
        self._until = 0.0
        self._turning = False

    def came(self) -> bool:
        """There is something to do: whether that came soon after the last was done."""
        return time.perf_counter() < self._until

    def done(self, soon: bool) -> None:
        """It is done; if it came `soon`, the next may, too."""
        self._until = time.perf_counter() + AWAKE_SECONDS
        if soon and not self._turning:
            self._turning = True
            self._turn()

    def _turn(self) -> None:
        self._turning = not self.jobs and time.perf_counter() < self._until
        if self._turning:
            os.sched_yield()
            asyncio.get_running_loop().call_soon(self._turn)
