"""The order in which units may be evicted: a child before its parent, else by last use.

A unit's stamp is when it was used last, (milliseconds, a running number). There is no clock here:
tell() says what time it is. A lease is a use ahead of time, so whatever is used until it ends goes
first, and what is under lease only where nothing else is left.

Two queues hold the units that may go now, both in the order of their stamps: one for those that
were used in that order, which is nearly all, and a sorted one for the rest. A unit with children is
in neither, so looking for victims costs no more than the victims, however long the chains are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heappop, heappush, merge
from typing import Any, TypeAlias

from sortedcontainers import SortedDict

from pion_server.store.units import Unit

Stamp: TypeAlias = tuple[int, int]


class Recency:
    """Units, iterated from the least to the most recently used one."""

    def __init__(self) -> None:
        self._stamps: dict[Unit, Stamp] = {}
        self._parents: dict[Unit, Unit] = {}
        self._children: dict[Unit, int] = {}  # how many; the parent itself need not be there
        self._used: OrderedDict[Stamp, Unit] = OrderedDict()
        self._apart: Any = SortedDict()  # Stamp -> Unit: under lease, or childless again
        self._now_ms = 0
        self._serial = 0

    def __contains__(self, unit: object) -> bool:
        return unit in self._stamps

    def __len__(self) -> int:
        return len(self._stamps)

    def __iter__(self) -> Iterator[Unit]:
        return iter(sorted(self._stamps, key=self._stamps.__getitem__))

    def stamps(self) -> dict[Unit, Stamp]:
        """When each unit was used last: a copy, which costs less than bringing it in order."""
        return self._stamps.copy()

    def parents(self) -> dict[Unit, Unit]:
        """The parent of each unit that has one, there or not: a copy."""
        return self._parents.copy()

    def tell(self, now_ms: int) -> None:
        """It is `now_ms` (milliseconds since any fixed moment). One that runs back stands still."""
        self._now_ms = max(self._now_ms, now_ms)

    def touch(self, unit: Unit, lead_ms: int = 0) -> None:
        """The unit is used now, or counts as used in `lead_ms`; an earlier use is not taken back.
        One that is not there is passed over."""
        old = self._stamps.get(unit)
        self._serial += 1
        stamp = (self._now_ms + lead_ms, self._serial)
        if old is not None and old < stamp:
            self._take_out(old)
            self._put(unit, stamp, self._apart if lead_ms else self._used)

    def add(self, unit: Unit) -> None:
        """Enter a unit as used now; one that is there stays as it is."""
        if unit not in self._stamps:
            self._serial += 1
            self._put(unit, (self._now_ms, self._serial), self._used)

    def remove(self, unit: Unit) -> None:
        """Take out a unit that is there. Its children are nobody's, until it is back."""
        self._take_out(self._stamps.pop(unit))
        self.follow(unit, None)

    def follow(self, unit: Unit, parent: Unit | None) -> None:
        """Make `unit` a child of `parent`, there or not, or (None) of nobody."""
        before = self._parents.pop(unit, None)
        if before is not None:
            self._lose_child(before)
        if parent is not None:
            self._parents[unit] = parent
            self._children[parent] = self._children.get(parent, 0) + 1
            if parent in self._stamps:
                self._take_out(self._stamps[parent])

    def parent(self, unit: Unit) -> Unit | None:
        """The unit that this one is a child of."""
        return self._parents.get(unit)

    def descends(self, unit: Unit | None, ancestor: Unit) -> bool:
        """Whether `unit` is `ancestor`, or below it. A walk up from `unit`, but for an ancestor
        without children, as every newcomer of a chain is one."""
        if ancestor not in self._children:
            return unit == ancestor
        while unit is not None and unit != ancestor:
            unit = self._parents.get(unit)
        return unit is not None

    def victims(self, spared: Callable[[Unit], bool]) -> Iterator[Unit]:
        """Units in the order of eviction, but for those that are `spared` (asked when a unit's turn
        comes) and their ancestors. Nothing may change meanwhile."""
        left: dict[Unit, int] = {}
        childless: list[tuple[Stamp, Unit]] = []  # a heap: parents whose children all went here
        queue = merge(self._used.items(), self._apart.items())  # stamps are unique
        head = next(queue, None)
        while head or childless:
            if head is None or (childless and childless[0] < head):
                _, unit = heappop(childless)
            else:
                _, unit = head
                head = next(queue, None)
            if spared(unit):
                continue
            yield unit
            parent = self._parents.get(unit)
            if parent in self._stamps:
                left[parent] = left.get(parent, self._children[parent]) - 1
                if left[parent] == 0:
                    heappush(childless, (self._stamps[parent], parent))

    def _put(self, unit: Unit, stamp: Stamp, queue: Any) -> None:
        self._stamps[unit] = stamp
        if unit not in self._children:
            queue[stamp] = unit

    def _take_out(self, stamp: Stamp) -> None:
        if self._used.pop(stamp, None) is None:
            self._apart.pop(stamp, None)

    def _lose_child(self, parent: Unit) -> None:
        self._children[parent] -= 1
        if self._children[parent] == 0:
            del self._children[parent]
            if parent in self._stamps:
                self._apart[self._stamps[parent]] = parent
