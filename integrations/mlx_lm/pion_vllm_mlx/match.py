"""How long a leading run of a chain of blocks can be restored, asked in one round trip.

A block's rows are under its name, its rows of sliding layers under `<name>.w`, the states at its
end under `<name>.s`: a prefix needs all of the first, the second as far as the windows reach back,
and of the third only the last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pion_server.client import Call, calls
from pion_vllm_mlx.caches import Part
from pion_vllm_mlx.chain import Chain
from pion_vllm_mlx.layout import Layout

_SUFFIX = {Part.ROWS: "", Part.WINDOW: ".w", Part.STATE: ".s"}


def namespace(chain: Chain, end: int, part: Part) -> str:
    """Where a part of the block that ends at `end` is stored."""
    return chain.name(end) + _SUFFIX[part]


@dataclass(frozen=True, slots=True)
class Match:
    """The first `length` tokens of `chain` can be restored; 0: none."""

    chain: Chain
    length: int


class Probe:
    """The question, for the positions `stops` of a chain, in ascending order."""

    def __init__(self, layout: Layout, chain: Chain, stops: Sequence[int]) -> None:
        self._layout = layout
        self._chain = chain
        self._stops = stops
        self._run = list(chain.names(chain.boundaries)) if layout.rows.formats else []
        self._singles = list(dict.fromkeys(self._optional()))

    def calls(self, fingerprint: str) -> list[Call[int]]:
        """One MATCH for the run of full blocks, one for each namespace that may be there or not."""
        groups = [self._run] if self._run else []
        groups += [[name] for name in self._singles]
        return [calls.prefix_match(group, fingerprint=fingerprint) for group in groups]

    def present(self, answers: Sequence[int]) -> set[str]:
        """The namespaces that are there."""
        run = self._run[: answers[0]] if self._run else []
        found = zip(self._singles, answers[bool(self._run) :], strict=True)
        return {*run, *(name for name, hit in found if hit)}

    def longest(self, present: set[str]) -> int:
        """The last stop that can be restored, or 0."""
        full = len(present.intersection(self._run))
        for stop in reversed(self._stops):
            blocks = bisect_right(self._chain.boundaries, stop) if self._run else 0
            if blocks <= full and present.issuperset(self._needs(stop)):
                return stop
        return 0

    @property
    def names(self) -> Iterator[str]:
        """All namespaces that were asked for."""
        yield from self._run
        yield from self._singles

    def _optional(self) -> Iterator[str]:
        for stop in self._stops:
            yield from self._needs(stop)

    def _needs(self, stop: int) -> Iterator[str]:
        """What a restore at `stop` needs beside the run of full blocks."""
        if self._layout.rows.formats and stop not in self._chain.boundaries:
            yield namespace(self._chain, stop, Part.ROWS)
        for end in window_ends(self._layout, self._chain, stop):
            yield namespace(self._chain, end, Part.WINDOW)
        if self._layout.states:
            yield namespace(self._chain, stop, Part.STATE)


def window_ends(layout: Layout, chain: Chain, stop: int) -> list[int]:
    """The blocks that the windows reach back into from `stop`."""
    return [end for end in chain.ends(stop) if end > stop - layout.window]


def stops(chain: Chain, step: int, ends: Iterable[int]) -> list[int]:
    """The positions worth asking for: every `step` tokens, the end, and `ends` that are inside."""
    inside = (end for end in ends if 0 < end <= chain.length)
    found = {*range(step, chain.length + 1, step), *inside, chain.length}
    return sorted(found - {0})
