"""Where the names of a tenant live: the tables of all its workers as one (team.Directory).

A name that nobody holds is claimed under a lock of its own, held while the first thing under it is
made and listed; so two workers cannot come to hold the same. Nothing else takes a lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from hashlib import blake2b

from pion_server.errors import Elsewhere, OutOfMemory
from pion_server.store.mutations import Mutation
from pion_server.store.prefixes import name_of_session
from pion_server.store.store import Store
from pion_server.team import Listing
from pion_server.workers.names import (
    MAKERS,
    drops_of,
    listing_of,
    names_in,
    names_of,
)
from pion_server.workers.shared import Shared
from pion_server.workers.table import CAPACITY, DIGEST


class SharedDirectory:
    """As worker `index` of `workers` sees it. `key`, the same for all, keeps tenants from choosing
    names that would crowd together."""

    def __init__(self, shared: Shared, index: int, workers: int, tenant: int, key: bytes) -> None:
        self._shared = shared
        self._index = index
        self._key = key
        self._own = shared.own_table(index, tenant)
        self._others = [
            (worker, shared.table(worker, tenant)) for worker in range(workers) if worker != index
        ]

    def find(self, name: bytes) -> Listing | None:
        """Directory.find: never what this worker holds itself."""
        digest = self._digest(name)
        return None if digest in self._own else self._elsewhere(digest)

    def find_session(self, sid: bytes) -> Listing | None:
        """Directory.find_session."""
        return self.find(name_of_session(sid))

    @contextmanager
    def claim(self, mutations: Sequence[Mutation]) -> Iterator[None]:
        """Directory.claim."""
        made = {name for each in mutations if isinstance(each, MAKERS) for name in names_of(each)}
        digests = sorted(set(map(self._digest, made)))
        new = [digest for digest in digests if digest not in self._own]
        with ExitStack() as locks:
            for digest in new:  # in an order that is the same for all, or two might wait in a ring
                locks.enter_context(self._lock(digest))
                if (found := self._elsewhere(digest)) is not None:
                    raise Elsewhere(found.worker)
                if self._own.full:
                    raise OutOfMemory(f"this worker holds {CAPACITY} names, and can take no more")
            yield

    def note(self, store: Store, mutation: Mutation) -> None:
        """Directory.note."""
        for name in names_of(mutation):
            listing, digest = listing_of(store, name, self._index), self._digest(name)
            if listing is not None:
                self._own.put(digest, listing)
            else:
                self._own.remove(digest)

    def fill(self, store: Store) -> list[Mutation]:
        """Directory.fill. Another worker can hold the same where logs lost their last second to a
        power cut, the drop here among it."""
        names = {self._digest(name): name for name in names_in(store)}
        self._own.refill(
            (digest, listing)
            for digest, name in names.items()
            if (listing := listing_of(store, name, self._index)) is not None
        )
        drops: list[Mutation] = []
        for digest, name in names.items():
            with self._lock(digest):
                if self._elsewhere(digest) is not None:
                    self._own.remove(digest)
                    drops += drops_of(store, name)
        return drops

    def _elsewhere(self, digest: bytes) -> Listing | None:
        for worker, table in self._others:
            if (listing := table.find(digest)) is not None:
                _, up = self._shared.seated(worker)
                return listing if up else Listing(worker)
        return None

    def _digest(self, name: bytes) -> bytes:
        return blake2b(name, digest_size=DIGEST, key=self._key).digest()

    def _lock(self, digest: bytes) -> AbstractContextManager[None]:
        return self._shared.lock(int.from_bytes(digest[:8], "little") >> 2)
