"""Whether a restore is worth it: what prefilling and restoring took here lately, per token and
per byte.

Nothing is known at first, and then everything is worth a try. Later restores that would take
longer than prefilling what they save are skipped, but for one now and then: networks get better.
"""

from __future__ import annotations

KEEP = 0.8  # of what is known when something new is learned
TRY_EVERY = 16


class _Rate:
    """Seconds per unit, recent ones first."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._units = 0.0

    def learn(self, units: float, seconds: float) -> None:
        self._units = KEEP * self._units + units
        self._seconds = KEEP * self._seconds + seconds

    def seconds(self, units: float) -> float | None:
        """How long so many units take; None where nothing is known."""
        return self._seconds / self._units * units if self._units else None


class Pace:
    """The pace of one engine process."""

    def __init__(self) -> None:
        self._prefill = _Rate()
        self._restore = _Rate()
        self._skipped = 0

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A prefill of so many tokens took so long."""
        self._prefill.learn(tokens, seconds)

    def restored(self, nbytes: int, seconds: float) -> None:
        """A restore of so many bytes took so long."""
        self._restore.learn(nbytes, seconds)

    def prefill_seconds(self, tokens: int) -> float | None:
        """How long it takes to prefill so many tokens, None where nothing is known."""
        return self._prefill.seconds(tokens)

    def worth(self, tokens: int, nbytes: int) -> bool:
        """Whether to restore `nbytes` in the place of prefilling `tokens`."""
        prefill, restore = self._prefill.seconds(tokens), self._restore.seconds(nbytes)
        if prefill is None or restore is None or restore <= prefill:
            return True
        self._skipped += 1
        return self._skipped % TRY_EVERY == 0
