"""Counters of one object that talks to Pion; its thread and its storing thread add to them."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

_TOTALS = (
    "hits",
    "misses",
    "restores_skipped",  # since prefilling was faster
    "tokens_restored",
    "stores",
    "stores_dropped",  # refused before sending: too many under way, or the server was away
    "bytes_fetched",
    "bytes_stored",
    "fetch_ms_total",
    "store_ms_total",
    "prefill_ms_total",
    "attend_calls",  # queries to the server's attention
    "attend_ms_total",
    "cold_rehydrates",  # how often attention state had to be made anew
)


class Stats:
    """Totals since the start; times in milliseconds, sizes in bytes of rows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, float] = dict.fromkeys(_TOTALS, 0)
        self._errors: Counter[str] = Counter()

    def add(self, **amounts: float) -> None:
        """Add to the totals named."""
        with self._lock:
            for name, amount in amounts.items():
                self._totals[name] += amount

    def error(self, kind: str) -> bool:
        """Count a failure; whether it is the first of its kind."""
        with self._lock:
            self._errors[kind] += 1
            return self._errors[kind] == 1

    def as_dict(self) -> dict[str, Any]:
        """The totals, `hit_rate` (0.0 before the first request), and `errors` by kind."""
        with self._lock:
            totals = dict(self._totals)
            errors = dict(self._errors)
        requests = totals["hits"] + totals["misses"]
        return {**totals, "hit_rate": totals["hits"] / max(requests, 1), "errors": errors}
