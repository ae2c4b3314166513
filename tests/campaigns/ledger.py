"""What a server has acknowledged, kept outside of it.

Each writer owns its things, so the history of a thing is a line: what it was told last, and what it
was being told when the server died, which may have happened or not.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from things import KINDS, REMOVABLE, Thing

from pion_server.client import Client
from pion_server.errors import PionError


@dataclass
class Entry:
    """`held` was acknowledged (None: nothing); of `unsure`, each may be what is there instead."""

    held: int | None = None
    unsure: set[int | None] = field(default_factory=set)

    @property
    def possible(self) -> set[int | None]:
        return {self.held} | self.unsure


class Writer(threading.Thread):
    """Writes to its own things until it is stopped or the server is gone."""

    def __init__(self, number: int, things: int, seed: int) -> None:
        super().__init__(daemon=True)
        kinds = itertools.cycle(KINDS)
        self.entries = {Thing(next(kinds), f"{number}-{index}"): Entry() for index in range(things)}
        self._random = random.Random(seed)
        self._tags: Iterator[int] = itertools.count(number * 10**12 + 1)
        self.url = ""
        self.acknowledged = 0
        self.stopping = threading.Event()

    def run(self) -> None:
        with Client(self.url, timeout=20) as client:
            while not self.stopping.is_set() and self._step(client):
                pass

    def _step(self, client: Client) -> bool:
        thing = self._random.choice(list(self.entries))
        entry = self.entries[thing]
        tag = None if self._removes(thing) else next(self._tags)
        # In several commands a write may be half done, so that nothing is there.
        entry.unsure |= {tag, None} if thing.kind == "prefix" else {tag}
        try:
            if tag is None:
                thing.remove(client)
            else:
                thing.write(client, tag)
        except PionError:
            return False
        entry.held, entry.unsure = tag, set()
        self.acknowledged += 1
        return True

    def _removes(self, thing: Thing) -> bool:
        return thing.kind in REMOVABLE and self._random.random() < 0.15

    def check(self, client: Client) -> None:
        """What is there must be what was acknowledged last, or what was on its way."""
        for thing, entry in self.entries.items():
            found = thing.read(client)
            assert found in entry.possible, f"{thing}: {found}, not one of {entry.possible}"
            if thing.kind == "prefix" and found is not None:
                # Raises Mismatch: rows under another fingerprint would go to the wrong model.
                assert client.prefix_lookup(thing.name, fingerprint=f"{found:016x}")
            entry.held, entry.unsure = found, set()

    def again(self, url: str, seed: int) -> Writer:
        """The same writer, with the same things, for the next server."""
        heir = Writer(0, 0, seed)
        heir.entries, heir._tags, heir.url = self.entries, self._tags, url
        return heir
