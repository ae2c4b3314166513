"""The server's life: listen, keep house, stop cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import resource
import secrets
import signal
from concurrent.futures import ThreadPoolExecutor

from pion_server.commands.context import Server
from pion_server.commands.dispatcher import Dispatcher
from pion_server.commands.keys import sweep
from pion_server.config import Config
from pion_server.errors import PionError
from pion_server.net.connection import Connection
from pion_server.stats import Stats
from pion_server.store.store import Store

log = logging.getLogger(__name__)

SWEEP_SECONDS = 0.1  # how often expired keys are looked for, as in Redis (hz 10)
STOP_SECONDS = 1.0  # how long replies that are on their way may take once the server stops
# Each connection is one; the usual soft limits, 256 on macOS and 1,024 on Linux, are soon reached.
# No higher, since macOS takes no more than 10,240 whatever its hard limit says.
OPEN_FILES = 10_000


class PionServer:
    """One listening socket and everything behind it."""

    def __init__(self, config: Config) -> None:
        self.state = Server(config, Store(), Stats(), run_id=secrets.token_hex(20))
        self._dispatcher = Dispatcher(self.state)
        # Conversions release the GIL; more threads than this only fight over memory bandwidth.
        self._executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="pion-convert")
        self._connections: set[Connection] = set()
        self._ids = itertools.count(1)

    async def start(self) -> None:
        """Listen. Raises PionError, naming address and cause, where that is not possible."""
        config, loop = self.state.config, asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                self._accept, config.host, config.port, backlog=511
            )
        except OSError as error:
            reason = error.strerror or str(error)
            raise PionError(f"cannot listen on {config.host}:{config.port}: {reason}") from error
        self.state.port = self._listener.sockets[0].getsockname()[1]
        self._sweeper = asyncio.create_task(self._keep_house())
        log.info("pion-server listening on %s:%d", config.host, self.state.port)

    async def stop(self) -> None:
        """Take no more connections, let replies out for a moment, close the rest."""
        self._sweeper.cancel()
        self._listener.close()
        for connection in list(self._connections):
            connection.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                while self._connections:
                    await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection.abort()
        self._executor.shutdown(wait=False, cancel_futures=True)
        log.info("pion-server stopped")

    def _accept(self) -> Connection:
        connection = Connection(
            self._dispatcher, next(self._ids), self._executor, self._connections.discard
        )
        self._connections.add(connection)
        return connection

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                sweep(self.state)
            except Exception:
                log.exception("sweeping expired keys failed; this is a defect of the server")


def allow_open_files() -> None:
    """Raise the soft limit on open files to OPEN_FILES, as far as the hard one permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def serve(config: Config) -> None:
    """Run a server until SIGTERM or SIGINT."""
    allow_open_files()
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopping.set)
    server = PionServer(config)
    await server.start()
    await stopping.wait()
    await server.stop()
