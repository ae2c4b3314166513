"""Plain keys under `-w N`: worker 0 has them all, and the others pass such commands on to it.

They do so as clients of a Unix socket that nobody else can reach, one connection for each tenant
and database, so that no tenant waits for another. There a name is enough to be that tenant.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pion_server.client import AsyncClient, Call, ConnectionFailed, DeadlineExceeded
from pion_server.client.url import Endpoint, Unix
from pion_server.errors import PionError
from pion_server.tenants import Tenant, Tenants
from pion_server.wire.values import Payload, Reply

# As long as LMCache waits for a remote call; worker 0 is back from a crash in a fraction of that
# unless it has gigabytes to recover.
SECONDS = 10.0


class Relay:
    """The connections of one worker to worker 0."""

    def __init__(self, path: Path) -> None:
        self._place = Unix(str(path))
        self._links: dict[tuple[str, int], AsyncClient] = {}

    def ask(
        self, tenant: str, db: int, request: Sequence[Payload], repeatable: bool
    ) -> asyncio.Task[Reply]:
        """Team.ask_first."""
        link = self._links.get((tenant, db))
        if link is None:
            endpoint = Endpoint(self._place, user=tenant, password="-", db=db)
            link = self._links[tenant, db] = AsyncClient(endpoint, timeout=SECONDS)
        call = Call(tuple(request), _as_it_is, retry=repeatable)
        return asyncio.create_task(_ask(link, call))

    async def close(self) -> None:
        for link in self._links.values():
            await link.close()


def _as_it_is(reply: Reply) -> Reply:
    return reply


async def _ask(link: AsyncClient, call: Call[Reply]) -> Reply:
    try:
        return await link.execute(call)
    except (ConnectionFailed, DeadlineExceeded) as error:
        raise PionError(
            "worker 0, which keeps the plain keys, did not answer; it may or may not have carried "
            "this out"
        ) from error


class Insiders(Tenants):
    """The tenants as the other workers get to see them: without a password, a limit on clients, or
    a place in CLIENT LIST."""

    def __init__(self, tenants: Tenants) -> None:
        self.open = None
        self._tenants = {
            tenant.name.encode(): replace(tenant, seats=sys.maxsize, clients={})
            for tenant in tenants
        }

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def find(self, user: Payload, password: Payload) -> Tenant | None:
        return self._tenants.get(bytes(user))
