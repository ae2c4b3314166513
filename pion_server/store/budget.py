"""The memory budget: before a mutation, drop the least recently used units until it fits.

A unit goes whole: a namespace with both sessions, a session without one, or a plain key.
"""

from __future__ import annotations

from pion_server.errors import OutOfMemory
from pion_server.store.mutations import Mutation
from pion_server.store.state import Unit
from pion_server.store.store import Store


def make_room(store: Store, max_memory: int, mutation: Mutation) -> int:
    """Evict, through store.apply, so that `mutation` keeps store.bytes_used within `max_memory`
    bytes (0: no limit). What the mutation itself uses stays. Returns the number of units evicted.

    Raises OutOfMemory, with nothing evicted, where it cannot fit, and what apply would raise where
    the mutation cannot be carried out: a refused write never costs anybody their prefix.
    """
    if max_memory == 0:
        return 0
    plan = store.plan(mutation)
    excess = store.bytes_used + plan.growth - max_memory
    if plan.growth <= 0 or excess <= 0:
        return 0
    victims: list[Unit] = []
    for unit in store.recency:
        if unit in plan.units:
            continue
        victims.append(unit)
        excess -= store.size(unit)
        if excess <= 0:
            break
    if excess > 0:
        raise OutOfMemory(
            f"this write needs {plan.growth} bytes and is {excess} over --max-memory {max_memory}, "
            "even with everything else evicted"
        )
    for unit in victims:
        store.apply(unit)
    return len(victims)
