"""What a store may hold, and which units have to go for it: pure, the caller carries the drops out.

A unit goes whole, children before their parent, else the least recently used first (recency.py).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from pion_server.errors import OutOfMemory
from pion_server.store.mutations import Mutation
from pion_server.store.rules import NOTHING
from pion_server.store.state import sessions_of
from pion_server.store.store import Store
from pion_server.store.units import Unit


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a store, 0 for none: `memory` in bytes, `sessions` of which a namespace has two."""

    memory: int = 0
    sessions: int = 0


NO_LIMIT = Budget()


def make_room(store: Store, budget: Budget, *mutations: Mutation) -> list[Unit]:
    """The units whose drops, in this order, let all `mutations` be carried out within `budget`.
    What they use themselves is not among them, and nothing is where they add nothing.

    Raises OutOfMemory where they cannot fit, and what apply would raise where one of them cannot
    be carried out: a refused write never costs anybody their prefix.
    """
    if not (budget.memory or budget.sessions):
        return []
    plans = [store.plan(mutation) for mutation in mutations]
    growth = sum(plan.growth for plan in plans)
    made = sum(plan.sessions for plan in plans)
    return _choose(
        store,
        budget,
        store.bytes_used + growth - budget.memory if budget.memory and growth > 0 else 0,
        store.session_count + made - budget.sessions if budget.sessions and made else 0,
        frozenset().union(*(plan.uses | plan.needs for plan in plans)),
    )


def trim(store: Store, budget: Budget) -> list[Unit]:
    """The units whose drops, in this order, bring a recovered store within `budget`."""
    return _choose(
        store,
        budget,
        store.bytes_used - budget.memory if budget.memory else 0,
        store.session_count - budget.sessions if budget.sessions else 0,
        NOTHING,
    )


def _choose(
    store: Store, budget: Budget, nbytes: int, sessions: int, spared: Container[Unit]
) -> list[Unit]:
    """Units to get rid of that many bytes and sessions."""

    def keep(unit: Unit) -> bool:
        return unit in spared or (nbytes <= 0 and not sessions_of(unit))

    chosen: list[Unit] = []
    victims = store.recency.victims(keep)
    while nbytes > 0 or sessions > 0:
        unit = next(victims, None)
        if unit is None:
            raise OutOfMemory(_words(budget, nbytes, sessions))
        chosen.append(unit)
        nbytes -= store.size(unit)
        sessions -= sessions_of(unit)
    return chosen


def _words(budget: Budget, nbytes: int, sessions: int) -> str:
    over = [
        *([f"{nbytes} bytes over the memory limit of {budget.memory}"] if nbytes > 0 else []),
        *([f"{sessions} over the limit of {budget.sessions} sessions"] if sessions > 0 else []),
    ]
    return f"this write is {' and '.join(over)}, even with everything else evicted"
