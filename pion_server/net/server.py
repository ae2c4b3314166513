"""The server's life: listen, keep house, stop cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import secrets
import signal
import socket
import ssl
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from pion_server.commands.context import Server
from pion_server.commands.dispatcher import Dispatcher
from pion_server.commands.keys import sweep
from pion_server.config import Config, is_loopback
from pion_server.errors import PionError
from pion_server.net.awake import Awake
from pion_server.net.connection import Connection, Shared
from pion_server.net.door import Door
from pion_server.net.interpreter import spare_the_loop
from pion_server.net.listening import Entrance, entrances
from pion_server.net.lobby import ROOM, Lobby
from pion_server.net.memory import reuse_freed_blocks
from pion_server.net.tls import server_context
from pion_server.net.watching import Watch
from pion_server.team import Team
from pion_server.tenants import Tenant, Tenants
from pion_server.wire.lanes import FAST, RESP, Lane

log = logging.getLogger(__name__)

SWEEP_SECONDS = 0.1  # how often expired keys are looked for, as in Redis (hz 10)
STOP_SECONDS = 1.0  # how long replies that are on their way may take once the server stops
# Open files beside those of connections: libraries, the listener, logs.
SPARE_FILES = 200
# What macOS lets a process have, whatever its hard limit says.
MACOS_FILES = 10_240


class PionServer:
    """The way in and everything behind it. `team`: the workers that this one is of."""

    def __init__(self, config: Config, team: Team | None = None) -> None:
        self._tls = server_context(config)
        self.state = Server(config, Tenants(config, team), team, run_id=secrets.token_hex(20))
        self._doors: list[Door] = []
        self._watch = Watch(self.state)
        # Conversions release the GIL; more threads than this only fight over memory bandwidth.
        executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="pion-convert")
        self._shared = Shared(executor, Lobby(), Awake(), set())

    async def start(self, entrance: Entrance) -> None:
        """Recover what was kept, and let clients in. Raises PionError, naming folder and cause,
        where that is not possible."""
        reuse_freed_blocks()
        config, loop = self.state.config, asyncio.get_running_loop()
        self.state.tenants.engine.take_turns(loop.call_soon)
        for tenant in self.state.tenants:
            if config.data_dir is not None:
                folder = config.data_dir / tenant.name
                tenant.remember(folder, config.wal_fsync, loop.call_soon_threadsafe)
            tenant.join()
        self.state.port, self.state.fast_port = entrance.port, entrance.fast_port
        self.open_door(entrance.resp, self.state, tls=self._tls)
        self.open_door(entrance.fast, self.state, FAST, self._tls)
        self.open_door(entrance.unix, self.state)
        self._sweeper = asyncio.create_task(self._keep_house())
        if config.metrics_port is not None:
            port = await self._watch.listen(config.metrics_port)
            log.info("receipt, metrics and health: http://127.0.0.1:%d/", port)
        if self._tls is None and not is_loopback(config.host):
            log.warning("passwords and prefixes travel in the clear: no --tls-cert is given")

    def open_door(
        self,
        listeners: Sequence[socket.socket],
        state: Server,
        lane: Lane = RESP,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Let clients in here too. `state` is what they get to see."""
        dispatcher = Dispatcher(state)

        def make() -> Connection:
            return Connection(dispatcher, self._shared, lane)

        self._doors.append(Door(listeners, self._shared.lobby, tls, make))
        self._doors[-1].open()

    async def stop(self) -> None:
        """Take no more connections, let replies out for a moment, close the rest."""
        self._sweeper.cancel()
        self._watch.close()
        for door in self._doors:
            await door.close()
        for connection in list(self._shared.connections):
            connection.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                while self._shared.connections:
                    await asyncio.sleep(0.01)
        for connection in list(self._shared.connections):
            connection.abort()
        self._shared.executor.shutdown(wait=False, cancel_futures=True)
        self.state.tenants.engine.close()
        self._close_journals()
        log.info("pion-server stopped")

    def _close_journals(self) -> None:
        for tenant in self.state.tenants:
            try:
                if tenant.journal is not None:
                    tenant.journal.close()
            except PionError as error:
                log.error("what tenant %s stored last is not on disk: %s", tenant.name, error)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                for tenant in self.state.tenants:
                    sweep(tenant)
                    compact(tenant)
                    await asyncio.sleep(0)  # a thousand tenants are not one turn of the loop
            except Exception:
                log.exception("sweeping expired keys failed; this is a defect of the server")


def compact(tenant: Tenant) -> None:
    """Take a snapshot where the journal has grown far beyond what is held."""
    if tenant.journal is None or not tenant.journal.compact_due():
        return
    log.info("tenant %s: compacting %d bytes of log", tenant.name, tenant.journal.wal_bytes)
    tenant.journal.save().add_done_callback(_log_failure)


def _log_failure(saved: Future[None]) -> None:
    if (error := saved.exception()) is not None:
        log.warning("no snapshot was taken, the log goes on: %s", error)


def within_open_files(config: Config) -> Config:
    """Raise the soft limit on open files, 256 on macOS and 1,024 on Linux, to what --maxclients
    takes; where the system does not allow that, have fewer clients. Raises PionError where that
    leaves none."""
    beside = ROOM + SPARE_FILES
    allowed = raise_open_files(config.maxclients + beside)
    fits = allowed - beside
    if fits >= config.maxclients:
        return config
    if fits < max(1, len(config.everyone)):
        raise PionError(f"{allowed} open files are too few (ulimit -n): {beside + 1} are needed")
    log.warning("--maxclients is %d here: the limit on open files is %d", fits, allowed)
    return config.model_copy(update={"maxclients": fits})


def raise_open_files(wanted: int) -> int:
    """The soft limit on open files, raised towards `wanted` as far as it goes."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if n == resource.RLIM_INFINITY else n for n in limits)
    for limit in (min(wanted, hard), min(wanted, hard, MACOS_FILES)):
        if soft >= limit:
            break
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
            return limit
    return soft


async def serve(config: Config) -> None:
    """Run a server until SIGTERM or SIGINT."""
    server = PionServer(within_open_files(config))
    stopping = stop_signal()
    spare_the_loop()
    with entrances(config, [(config.port, config.unixsocket)]) as (entrance,):
        await server.start(entrance)
        log_entrance(config, entrance)
        await stopping.wait()
        await server.stop()


def log_entrance(config: Config, entrance: Entrance) -> None:
    """Say where clients come in, and that they may."""
    if entrance.fast_port:
        log.info("binary lane on port %d", entrance.fast_port)
    if entrance.path is not None:
        log.info("Unix socket %s", entrance.path)
    workers = f", {config.workers} workers" if config.workers > 1 else ""
    log.info("pion-server listening on %s:%d%s", config.host, entrance.port, workers)


def stop_signal() -> asyncio.Event:
    """Set once SIGTERM or SIGINT comes."""
    stopping = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    return stopping


def log_to_stderr(config: Config, who: str = "") -> None:
    """Have this process write its log there, at the configured level; `who` says which it is."""
    logging.basicConfig(
        level=config.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {who}%(message)s",
        stream=sys.stderr,
    )
