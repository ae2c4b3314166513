"""Going to sleep and being woken is the larger part of a short request's time. So where a request
comes soon after the one before, the event loop looks for the next one as long before it sleeps.

It sleeps at once where clients take longer than that, so a core is kept from others only while the
server is busy with short requests anyway.
"""

from __future__ import annotations

import asyncio
import time

# From an answer to the next request of a client of this machine, and a bit; the client waits for
# the answer in the same way (client/sync.py).
AWAKE_SECONDS = 150e-6


class Awake:
    """Keeps the running loop awake."""

    def __init__(self) -> None:
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
        self._turning = time.perf_counter() < self._until
        if self._turning:
            asyncio.get_running_loop().call_soon(self._turn)
