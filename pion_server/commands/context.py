"""What a command handler gets to see: its client's tenant, and nothing of the others."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pion_server.commands.arguments import Arguments, within
from pion_server.config import Config
from pion_server.errors import NoAuth
from pion_server.stats import Stats
from pion_server.store.admission import Newcomer
from pion_server.store.mutations import Mutation
from pion_server.store.store import Store
from pion_server.team import Listing, Team
from pion_server.tenants import Client, Tenant, Tenants
from pion_server.wire.values import Payload


@dataclass(slots=True)
class Server:
    """What is behind every connection of this process. `tenants` is for AUTH and its like, `team`
    the other workers, if there are any."""

    config: Config
    tenants: Tenants
    team: Team | None = None
    started: float = field(default_factory=time.time)
    run_id: str = ""
    port: int = 0
    fast_port: int = 0  # of the binary lane; 0: there is none


@dataclass(frozen=True, slots=True)
class Context:
    """A handler's view of the server for one command. The tenant is the one that the client had
    when it sent the command, also in a Job that ends after the client has become another's."""

    server: Server
    client: Client
    _tenant: Tenant | None

    @property
    def tenant(self) -> Tenant:
        """Raises NoAuth in the few commands that may come before AUTH: all state lies behind."""
        if self._tenant is None:
            raise NoAuth("Authentication required.")
        return self._tenant

    @property
    def store(self) -> Store:
        return self.tenant.store

    @property
    def stats(self) -> Stats:
        return self.tenant.stats

    def apply(self, *mutations: Mutation) -> int:
        """Tenant.apply: the way in which commands change state."""
        return self.tenant.apply(*mutations)

    def offer(self, *newcomers: Newcomer) -> None:
        """Tenant.offer: apply(), for what --admission may turn away."""
        self.tenant.offer(*newcomers)

    def ignores(self, sid: bytes) -> bool:
        """Whether rows for a session are to be dropped without a word, since it was turned away."""
        return sid not in self.store.sessions and self.tenant.admission.ignores(sid)

    def elsewhere(self, namespace: bytes) -> Listing | None:
        """What is known of a namespace that another worker holds."""
        directory = self.tenant.directory
        listing = directory.find(namespace) if directory is not None else None
        return listing if listing is not None and listing.namespace else None

    def now_ms(self) -> int:
        """Wall clock, milliseconds since the epoch: what deadlines of keys are compared with."""
        return time.time_ns() // 1_000_000

    def arguments(self, raw: list[Payload]) -> Arguments:
        """A cursor that takes no name from outside of --ns-prefix."""
        return Arguments(raw, self.server.config.ns_prefix)

    def key(self, value: Payload) -> bytes:
        """The name of a plain key. Raises PionError where it is outside of --ns-prefix."""
        return within(self.server.config.ns_prefix, bytes(value))
