"""Tenants: whose store a connection works on.

A tenant is a store of its own, with attention state, counters, limits, and connections. AUTH picks
one, and a command sees nothing but that one, so there is no check that a command could forget.
Without --tenant and --requirepass there is one, `default`, and everybody is it without AUTH.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import TypeAlias

from pion_server.attention.engine import Engine
from pion_server.attention.table import Limits, Table
from pion_server.config import DEFAULT_TENANT, MAX_SECRET, Config
from pion_server.errors import PionError
from pion_server.journal.commits import Commits, Release
from pion_server.journal.journal import Journal
from pion_server.journal.wal import Policy
from pion_server.stats import Stats
from pion_server.store.admission import Admission, Newcomer
from pion_server.store.budget import NO_LIMIT, Budget, make_room, trim
from pion_server.store.mutations import Mutation
from pion_server.store.store import Store
from pion_server.store.units import Unit
from pion_server.team import Directory, Team

log = logging.getLogger(__name__)

# Payload that may wait for the disk; it counts in nobody's memory limit once it was replaced.
MAX_BACKLOG = 256 << 20

Wake: TypeAlias = Callable[[], None]


@dataclass(slots=True, eq=False)
class Client:
    """One connection as the commands see it (net/connection.py owns the socket)."""

    address: str
    local_address: str
    id: int = 0  # counted by its tenant: a number for all would tell how many others there are
    tenant: Tenant | None = None  # None until it has logged in
    created: float = field(default_factory=time.time)
    last_active: float = field(default_factory=time.time)
    last_command: str = ""
    proto: int = 2
    db: int = 0
    name: bytes = b""
    library: dict[str, bytes] = field(default_factory=dict)
    no_evict: bool = False
    closing: bool = False  # close once the reply is out


@dataclass(slots=True, eq=False)
class Tenant:
    """A store, and what goes with it. `seats`: how many clients at a time."""

    name: str
    budget: Budget = NO_LIMIT
    admission: Admission = field(default_factory=Admission, repr=False)
    seats: int = 1
    store: Store = field(default_factory=Store, repr=False)
    attention: Table = field(default_factory=Table, repr=False)
    engine: Engine = field(default_factory=Engine, repr=False)  # the same for all tenants
    stats: Stats = field(default_factory=Stats, repr=False)
    clients: dict[int, Client] = field(default_factory=dict, repr=False)
    journal: Journal | None = field(default=None, repr=False)  # None: memory only
    directory: Directory | None = field(default=None, repr=False)  # None: there is one process
    _commits: Commits | None = field(default=None, repr=False)
    _ids: Iterator[int] = field(default_factory=lambda: count(1), repr=False)

    def remember(self, folder: Path, policy: Policy, call: Callable[[Wake], object]) -> None:
        """Start from what the journal in `folder` holds, and log every change there from now on.
        `call` runs a function on the event loop, from any thread. Raises PionError where the
        folder cannot be used."""
        self.journal, self.store, report = Journal.open(folder, policy)
        self._commits = commits = Commits(self.journal)
        self.journal.watch(lambda: call(commits.advance))
        if report.records:
            log.info("tenant %s: recovered in %.2f s: %s", self.name, report.seconds, report)
        self._evict(trim(self.store, self.budget))

    def join(self) -> None:
        """Tell the other workers what is held here. What another holds by now is dropped."""
        if self.directory is not None:
            for drop in self.directory.fill(self.store):
                self._carry_out(drop)

    def apply(self, *mutations: Mutation) -> int:
        """Make room for all the mutations within the budget, then carry them out: the one choke
        point through which state changes. Returns the sum of what Store.apply returns.

        Raises what make_room raises and Elsewhere, with nothing changed.
        """
        self.store.recency.tell(time.time_ns() // 1_000_000)
        with self.directory.claim(mutations) if self.directory else nullcontext():
            self._evict(make_room(self.store, self.budget, *mutations))
            return sum(map(self._carry_out, mutations))

    def offer(self, *newcomers: Newcomer) -> None:
        """apply() those that --admission lets in, and forget the others without a word."""
        welcome = [each for each in newcomers if self.admission.lets_in(self.store, each)]
        self.stats.turned_away += len(newcomers) - len(welcome)
        self.apply(*welcome)

    def _evict(self, units: list[Unit]) -> None:
        for unit in units:
            self._carry_out(unit)
        self.stats.evicted += len(units)

    def _carry_out(self, mutation: Mutation) -> int:
        # In this order and with nothing in between, so that the log leads to what is in memory.
        result = self.store.apply(mutation)
        self.attention.note(mutation)
        if self.journal is not None:
            self.journal.append(mutation)
        if self.directory is not None:
            self.directory.note(self.store, mutation)
        return result

    @property
    def logged(self) -> int:
        """The number of the last record of the journal, 0 without one."""
        return self.journal.last if self.journal is not None else 0

    def when_safe(self, release: Release) -> None:
        """Have `release` called once everything up to `logged` is as safe as --wal-fsync says."""
        if self._commits is None:
            release(None)
        else:
            self._commits.wait(self.logged, release)

    def refuse_lost_writes(self) -> None:
        """Raises Misconf while the journal could not keep a write."""
        refusal = self.journal.refusal() if self.journal is not None else None
        if refusal is not None:
            raise refusal

    def is_behind(self) -> bool:
        """Whether the journal has so much left to write that no more writes should come."""
        return self.journal is not None and self.journal.backlog_bytes > MAX_BACKLOG

    def admit(self, client: Client) -> None:
        """Make a client this tenant's. Raises PionError, in Redis' words, where its seats are
        taken; the client is to be closed then."""
        if client.tenant is self:
            return
        if len(self.clients) >= self.seats:
            client.closing = True
            raise PionError("max number of clients reached")
        dismiss(client)
        client.tenant, client.id = self, next(self._ids)
        self.clients[client.id] = client
        self.stats.connections += 1


def dismiss(client: Client) -> None:
    """The client is no tenant's any more."""
    if client.tenant is not None:
        del client.tenant.clients[client.id]
        client.tenant = None


class Tenants:
    """All tenants of a server. Of secrets only keyed digests are kept here."""

    def __init__(self, config: Config, team: Team | None = None) -> None:
        self._key = secrets.token_bytes(32)
        options, limits = config.everyone, limits_of(config)
        self.engine = Engine(config.attention, fp16=config.metal_attention_fp16)
        self._logins = [
            (
                self._digest(each.name.encode(), each.secret.get_secret_value().encode()),
                _tenant(config, each.name, limit, team, self.engine),
            )
            for each, limit in zip(options, limits, strict=True)
        ]
        # The tenant of everybody who comes, where there is no lock.
        self.open = (
            None
            if config.locked
            else _tenant(config, DEFAULT_TENANT, config.max_memory, team, self.engine)
        )

    def __iter__(self) -> Iterator[Tenant]:
        return iter([self.open] if self.open else [tenant for _, tenant in self._logins])

    def find(self, user: bytes | memoryview, password: bytes | memoryview) -> Tenant | None:
        """Whose name and secret these are. Takes equally long whether the user, the password or
        nothing is wrong; with no lock any password will do."""
        if self.open is not None:
            return self.open if user == self.open.name.encode() else None
        guess, found = self._digest(user, password), None
        for login, tenant in self._logins:
            if hmac.compare_digest(guess, login):
                found = tenant  # and on, so that no place in the list is told by the time it takes
        return found

    def _digest(self, user: bytes | memoryview, password: bytes | memoryview) -> bytes:
        """Equally long for all. A word beyond MAX_SECRET is cut, and is still none of ours."""
        words = (bytes(word[: MAX_SECRET + 1]) for word in (user, password))
        return b"".join(blake2b(word, key=self._key).digest() for word in words)


def _tenant(config: Config, name: str, memory: int, team: Team | None, engine: Engine) -> Tenant:
    return Tenant(
        name,
        Budget(memory, config.max_sessions),
        Admission(config.admission),
        attention=Table(_attention_limits(config, memory)),
        engine=engine,
        seats=config.maxclients // max(1, len(config.everyone)),
        stats=Stats(team.index if team else 0),
        directory=team.directory(name) if team else None,
    )


def _attention_limits(config: Config, memory: int) -> Limits:
    """Of one tenant, whose store may hold `memory` bytes."""
    share = max(1, config.attend_memory // max(1, len(config.everyone)))
    return Limits(config.attend_slots, share if config.attend_memory else memory)


def limits_of(config: Config) -> list[int]:
    """The memory limit of each tenant with a secret. Those without a quota have even shares of what
    the others leave of --max-memory, or no limit (0) where there is none."""
    quotas = [tenant.quota for tenant in config.everyone]
    left = config.max_memory - sum(quota or 0 for quota in quotas)
    share = left // quotas.count(None) if config.max_memory and None in quotas else 0
    return [share if quota is None else quota for quota in quotas]
