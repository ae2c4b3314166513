"""What a worker of `-w N` is told about the others; the implementations are in workers/.

Every name of a tenant has one home: the worker that holds whatever goes by it. A namespace, its
recurrent states and its two sessions, `<ns>_pk` and `<ns>_pv`, are one name. A server that is one
process has neither a Team nor a Directory (None).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from pion_server.store.mutations import Mutation
from pion_server.store.store import Store


@dataclass(frozen=True, slots=True)
class Listing:
    """What another worker holds under a name. `tokens` and what follows are those of its namespace
    (store/prefixes.py), if it has one; it is `sealed` only while that worker serves."""

    worker: int
    namespace: bool = False
    sealed: bool = False
    tokens: int = 0
    prefill_ms: float | None = None
    fingerprint: bytes | None = None


class Directory(Protocol):
    """Where the names of one tenant live."""

    def find(self, name: bytes) -> Listing | None:
        """What another worker holds under a namespace's name, or None."""

    def find_session(self, sid: bytes) -> Listing | None:
        """What another worker holds under the name that a session belongs to, or None."""

    def claim(self, mutations: Sequence[Mutation]) -> AbstractContextManager[None]:
        """While it is open no other worker makes what these mutations make. Raises Elsewhere where
        one has done so, OutOfMemory where the directory has no room for another name."""

    def note(self, store: Store, mutation: Mutation) -> None:
        """Tell the others what `store` holds now under the names that `mutation` was about."""

    def fill(self, store: Store) -> list[Mutation]:
        """Tell the others all that `store` holds, and nothing of before; for a worker that starts.
        Returns the drops of what another worker holds by now."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker: where it listens beside the port that all share; `pid` 0: it was never there.
    `fast_port` 0 and `unixsocket` empty: there is none."""

    worker: int
    port: int
    fast_port: int
    unixsocket: str
    pid: int
    up: bool


class Team(Protocol):
    """The workers of a server, as one of them sees them."""

    @property
    def index(self) -> int:
        """Which one this is, counted from 0."""

    def members(self) -> list[Member]:
        """All of them, this one included, in the order of their numbers."""

    def directory(self, tenant: str) -> Directory:
        """Where that tenant's names live."""

    def ask_first(
        self, tenant: str, db: int, request: Sequence[Any], repeatable: bool
    ) -> asyncio.Future[Any]:
        """Have worker 0, which keeps the plain keys of all, carry out a request: its reply, or
        PionError. In the order of the calls, and within a deadline. `repeatable`: whether running
        it twice is the same as once."""
