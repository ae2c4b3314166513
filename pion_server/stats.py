"""The value receipt: what the prefix cache did for its users, measured and estimated kept apart."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

# Credited per token where no client reported a prefill time; the specification's figure.
ESTIMATED_SECONDS_PER_TOKEN = 555e-6


@dataclass(slots=True)
class Stats:
    """Counters of this process since its start, or since reset()."""

    worker: int = 0
    started: float = field(default_factory=time.monotonic)
    prefix_hits: int = 0
    prefix_misses: int = 0
    prefix_hits_measured: int = 0
    prefix_tokens_served: int = 0
    prefix_bytes_served: int = 0
    prefix_fetches: int = 0
    seconds_avoided_measured: float = 0.0
    seconds_avoided_estimated: float = 0.0
    commands: int = 0
    connections: int = 0
    key_hits: int = 0
    key_misses: int = 0
    evicted: int = 0  # units (store/units.py)
    turned_away: int = 0  # by --admission
    expired: int = 0

    def miss(self) -> None:
        """A LOOKUP that found nothing usable."""
        self.prefix_misses += 1

    def hit(self, tokens: int, prefill_ms: float | None) -> None:
        """A LOOKUP that spared the prefill of `tokens` tokens; `prefill_ms` where it is known."""
        self.prefix_hits += 1
        self.prefix_tokens_served += tokens
        if prefill_ms is None:
            self.seconds_avoided_estimated += tokens * ESTIMATED_SECONDS_PER_TOKEN
        else:
            self.prefix_hits_measured += 1
            self.seconds_avoided_measured += prefill_ms / 1000

    def fetched(self, nbytes: int) -> None:
        """Rows that left for a client."""
        self.prefix_fetches += 1
        self.prefix_bytes_served += nbytes

    def receipt(self) -> dict[str, int | float]:
        """The sixteen fields of PION.STATS, in the order of the specification."""
        measured, estimated = self.seconds_avoided_measured, self.seconds_avoided_estimated
        return {
            "kvprefix_hits": self.prefix_hits,
            "kvprefix_misses": self.prefix_misses,
            "kvprefix_tokens_served": self.prefix_tokens_served,
            "kvprefix_bytes_served": self.prefix_bytes_served,
            "prefill_seconds_avoided": round(measured + estimated, 6),
            "prefill_seconds_avoided_measured": round(measured, 6),
            "kvprefix_hits_measured": self.prefix_hits_measured,
            # Of subsystems that are not in this server; clients of the specification read them.
            "semantic_hits": 0,
            "semantic_misses": 0,
            "moe_hits": 0,
            "moe_misses": 0,
            "vector_queries": 0,
            "prefill_seconds_avoided_estimated": round(estimated, 6),
            "kvprefix_hits_estimated": self.prefix_hits - self.prefix_hits_measured,
            "worker": self.worker,
            "uptime_seconds": int(time.monotonic() - self.started),
        }

    def reset(self) -> None:
        """Counters to zero; uptime is not a counter."""
        self.__init__(self.worker, self.started)  # type: ignore[misc]
