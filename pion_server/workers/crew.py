"""The team as one worker sees it (team.Team): the roster, the directories, the way to worker 0."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pion_server.team import Directory, Member
from pion_server.wire.values import Payload, Reply
from pion_server.workers.directory import SharedDirectory
from pion_server.workers.handover import Handover, tenant_names
from pion_server.workers.relay import Relay
from pion_server.workers.shared import Shared


class Crew:
    """Made of what the supervisor has handed over."""

    def __init__(self, given: Handover) -> None:
        self._given = given
        self._tenants = tenant_names(given.config)
        self._shared = Shared(given.memory, given.config.workers, len(self._tenants))
        self._relay = Relay(given.inner)

    @property
    def index(self) -> int:
        """Team.index."""
        return self._given.index

    def members(self) -> list[Member]:
        """Team.members."""
        return [
            Member(worker, own.port, own.fast_port, own.unixsocket, *self._shared.seated(worker))
            for worker, own in enumerate(self._given.own)
        ]

    def directory(self, tenant: str) -> Directory:
        """Team.directory."""
        return SharedDirectory(
            self._shared,
            self.index,
            self._given.config.workers,
            self._tenants.index(tenant),
            bytes.fromhex(self._given.key),
        )

    def ask_first(
        self, tenant: str, db: int, request: Sequence[Payload], repeatable: bool
    ) -> asyncio.Task[Reply]:
        """Team.ask_first."""
        return self._relay.ask(tenant, db, request, repeatable)

    async def close(self) -> None:
        """Pass nothing on any more."""
        await self._relay.close()
