"""Plain keys: the 16 numbered dbs of a Redis server.

Every key has a sequence number for as long as it lives, and SCAN walks them in that order: a key
that is there during a whole scan is returned, whatever comes and goes meanwhile. There is no clock
here: a key whose deadline has passed is absent for every read that says so (`now_ms`), and is taken
away by the DeleteKeys that `expired` makes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any

from sortedcontainers import SortedDict, SortedSet

from pion_server.errors import PionError
from pion_server.store.mutations import DeleteKeys

DBS = 16
# What Python takes for a key beside its name and value, resident on CPython 3.11.
KEY_BYTES = 1000


def cost(key: bytes, value: bytes | memoryview) -> int:
    """Bytes that a key counts for."""
    return KEY_BYTES + len(key) + len(value)


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's value; `expires_ms` is its deadline in milliseconds since the epoch, or None."""

    value: bytes | memoryview
    expires_ms: int | None
    sequence: int

    def gone(self, now_ms: int) -> bool:
        return self.expires_ms is not None and self.expires_ms <= now_ms


@dataclass(slots=True)
class _Db:
    entries: dict[bytes, Entry] = field(default_factory=dict)
    order: Any = field(default_factory=SortedDict)  # sequence -> key


class Keys:
    """All dbs. `nbytes` is what they count for in the memory budget. A db that does not exist is a
    PionError."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._dbs = [_Db() for _ in range(DBS)]
        self._deadlines: Any = SortedSet()  # (expires_ms, db, key)
        self._last = 0

    def count(self, db: int) -> int:
        """How many keys the db holds, expired ones that are not yet taken away included."""
        return len(self._db(db).entries)

    def get(self, db: int, key: bytes, now_ms: int) -> Entry | None:
        """The key's entry unless it has expired by `now_ms`."""
        entry = self._db(db).entries.get(key)
        return None if entry is None or entry.gone(now_ms) else entry

    def entries(self, db: int) -> dict[bytes, Entry]:
        """All keys of a db as they are now, expired ones that are not yet taken away included."""
        return self._db(db).entries.copy()

    def scan(self, db: int, cursor: int, count: int, now_ms: int) -> tuple[int, list[bytes]]:
        """Up to `count` keys from `cursor` on (0 starts), and the cursor to go on from (0: done).
        Expired keys are stepped over, so a page may be short."""
        state = self._db(db)
        page = list(islice(state.order.irange(minimum=cursor), count + 1))
        following = page[count] if len(page) > count else 0
        names = (state.order[sequence] for sequence in page[:count])
        return following, [name for name in names if not state.entries[name].gone(now_ms)]

    def expired(self, now_ms: int, limit: int) -> list[DeleteKeys]:
        """The mutations that take away up to `limit` keys whose deadline has passed."""
        due: dict[int, list[bytes]] = defaultdict(list)
        soonest = islice(self._deadlines, limit)
        for _, db, key in takewhile(lambda deadline: deadline[0] <= now_ms, soonest):
            due[db].append(key)
        return [DeleteKeys(db, tuple(names)) for db, names in due.items()]

    def size(self, db: int, key: bytes) -> int:
        """Bytes the key counts for; 0 where it is not held."""
        entry = self._db(db).entries.get(key)
        return cost(key, entry.value) if entry else 0

    def put(self, db: int, key: bytes, value: bytes | memoryview, expires_ms: int | None) -> None:
        """Set a key; one that is held keeps its place in a scan."""
        state = self._db(db)
        self.nbytes += cost(key, value) - self.size(db, key)
        old = state.entries.get(key)
        if old is None:
            self._last += 1
            state.order[self._last] = key
        elif old.expires_ms is not None:
            self._deadlines.discard((old.expires_ms, db, key))
        if expires_ms is not None:
            self._deadlines.add((expires_ms, db, key))
        kept = value.toreadonly() if isinstance(value, memoryview) else value
        state.entries[key] = Entry(kept, expires_ms, old.sequence if old else self._last)

    def expire(self, db: int, key: bytes, expires_ms: int | None) -> bool:
        """Give a key another deadline; False where it is not held."""
        entry = self._db(db).entries.get(key)
        if entry is None:
            return False
        self.put(db, key, entry.value, expires_ms)
        return True

    def delete(self, db: int, key: bytes) -> bool:
        """Take a key away; False where it was not held."""
        state = self._db(db)
        self.nbytes -= self.size(db, key)
        entry = state.entries.pop(key, None)
        if entry is None:
            return False
        del state.order[entry.sequence]
        if entry.expires_ms is not None:
            self._deadlines.discard((entry.expires_ms, db, key))
        return True

    def clear(self, db: int) -> list[bytes]:
        """Take every key of a db away; returns their names. Sequence numbers are not used again,
        so a scan that is under way goes on unharmed."""
        entries = self._db(db).entries
        self.nbytes -= sum(cost(key, entry.value) for key, entry in entries.items())
        self._deadlines = SortedSet(deadline for deadline in self._deadlines if deadline[1] != db)
        self._dbs[db] = _Db()
        return list(entries)

    def _db(self, db: int) -> _Db:
        if not 0 <= db < DBS:
            raise PionError("DB index is out of range")
        return self._dbs[db]
