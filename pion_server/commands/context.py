"""What a command handler gets to see: the server, the client, and one way to change state."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pion_server.config import Config
from pion_server.stats import Stats
from pion_server.store.budget import make_room
from pion_server.store.mutations import Mutation
from pion_server.store.store import Store


@dataclass(slots=True)
class Client:
    """One connection as the commands see it (net/connection.py owns the socket)."""

    id: int
    address: str
    local_address: str
    authenticated: bool
    created: float = field(default_factory=time.time)
    last_active: float = field(default_factory=time.time)
    last_command: str = ""
    proto: int = 2
    db: int = 0
    name: bytes = b""
    library: dict[str, bytes] = field(default_factory=dict)
    no_evict: bool = False
    closing: bool = False  # set by QUIT: close once the reply is out


@dataclass(slots=True)
class Server:
    """The state behind every connection of this process."""

    config: Config
    store: Store
    stats: Stats
    started: float = field(default_factory=time.time)
    run_id: str = ""
    port: int = 0
    clients: dict[int, Client] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Context:
    """A handler's view of the server for one command."""

    server: Server
    client: Client

    @property
    def store(self) -> Store:
        return self.server.store

    def now_ms(self) -> int:
        """Wall clock, milliseconds since the epoch: what deadlines of keys are compared with."""
        return time.time_ns() // 1_000_000

    def apply(self, mutation: Mutation) -> int:
        """Make room for the mutation within --max-memory, then carry it out. The one choke point
        through which commands change state. Returns what Store.apply returns."""
        server = self.server
        server.stats.evicted += make_room(server.store, server.config.max_memory, mutation)
        return server.store.apply(mutation)
