"""The process in front of `-w N`: it holds what outlives a worker, starts the workers, and starts
one that died again.

It serves no client itself. The sockets and the mapping are made here and inherited, so that a
worker that comes back has the same port, clients that come meanwhile wait for it in the backlog,
and the others still know what it holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pion_server
from pion_server.config import Config
from pion_server.errors import PionError
from pion_server.net.listening import Entrance, entrances, listen_unix
from pion_server.net.server import log_entrance, stop_signal
from pion_server.workers.folders import prepare_folder
from pion_server.workers.handover import Handover, Own, own_place, tenant_names
from pion_server.workers.shared import Shared

log = logging.getLogger(__name__)

# Between the death of a worker and the next start: doubled each time it does not live for STEADY.
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
STEADY = 10.0
# How long a worker may take to stop: it may be recovering its log, which cannot be interrupted.
STOP_SECONDS = 30.0


async def supervise(config: Config) -> None:
    """Run the workers until SIGTERM or SIGINT. Raises PionError where they cannot start."""
    stop = asyncio.create_task(stop_signal().wait())
    prepare_folder(config)
    with outfitted(config) as (entrance, shared, given):
        workers = [Worker(each, shared) for each in given]
        keepers = [asyncio.create_task(worker.keep()) for worker in workers]
        ready = asyncio.create_task(_all_of(worker.ready for worker in workers))
        try:
            await _first_of(stop, ready, *keepers)
            if ready.done():
                log_entrance(config, entrance)
                await _first_of(stop, *keepers)
        finally:
            ready.cancel()
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
    log.info("pion-server stopped")


async def _all_of(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    """Wait until one is done; raises what it raised."""
    done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    for future in done:
        future.result()


class Worker:
    """One worker, in one process after the other."""

    def __init__(self, given: Handover, shared: Shared) -> None:
        self._given = given
        self._shared = shared
        self.ready = asyncio.Event()  # it has served at least once

    async def keep(self) -> None:
        """Start it, and again whenever it ends. Raises PionError where it has never come up."""
        pause = FIRST_PAUSE
        while True:
            began = time.monotonic()
            end = await self._live()
            if not self.ready.is_set():
                raise PionError(f"worker {self._given.index} could not start: {end}")
            pause = FIRST_PAUSE if time.monotonic() - began > STEADY else pause
            log.warning("worker %d is gone: %s; next try in %.1f s", self._given.index, end, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _live(self) -> str:
        """One process, from its start to its end; how it ended."""
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "pion_server.workers", str(self._given.index)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=self._given.descriptors,
                process_group=0,  # Ctrl-C in a terminal is for the supervisor
                env=_environment(),
            )
        except OSError as error:
            return f"no process could be started: {error}"
        try:
            return await self._accompany(process)
        finally:
            self._shared.seat(self._given.index, process.pid, up=False)
            await _end(process)

    async def _accompany(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):  # it ended at once
            process.stdin.write(self._given.pack())
            await process.stdin.drain()
        if await process.stdout.readline():
            self._shared.seat(self._given.index, process.pid, up=True)
            self.ready.set()
        status = await process.wait()
        return f"exit status {status}" if status >= 0 else signal.Signals(-status).name


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, and SIGKILL where that is not enough."""
    for end, seconds in ((process.terminate, STOP_SECONDS), (process.kill, None)):
        with contextlib.suppress(ProcessLookupError):
            end()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), seconds)
            return


def _environment() -> dict[str, str]:
    """That of the supervisor, and where its own code is: a worker must be of the same."""
    home = str(Path(pion_server.__file__).parent.parent)
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def outfitted(config: Config) -> Iterator[tuple[Entrance, Shared, list[Handover]]]:
    """The entrance that all workers share, what else they do, and what each of them is given.
    Raises PionError."""
    count = config.workers
    places = [(config.port, config.unixsocket), *(own_place(config, each) for each in range(count))]
    with ExitStack() as stack:
        door, *own = stack.enter_context(entrances(config, places))
        try:
            shared = Shared.create(count, len(tenant_names(config)))
            folder = tempfile.mkdtemp(prefix="pion-")  # nobody else may look into it
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            inner = stack.enter_context(listen_unix(Path(folder) / "worker-0"))
        except OSError as error:
            raise PionError(f"cannot make what workers share: {error}") from error
        key = secrets.token_hex(16)
        yield (
            door,
            shared,
            [
                Handover(
                    index=index,
                    config=config,
                    resp=_descriptors(door.resp, own[index].resp),
                    fast=_descriptors(door.fast, own[index].fast),
                    unix=_descriptors(door.unix, own[index].unix),
                    own=tuple(_own(each) for each in own),
                    memory=shared.fd,
                    key=key,
                    inner=Path(inner.getsockname()),
                    inner_listener=None if index else inner.fileno(),
                )
                for index in range(count)
            ],
        )


def _descriptors(*listeners: Sequence[socket.socket]) -> tuple[int, ...]:
    return tuple(each.fileno() for each in chain(*listeners))


def _own(entrance: Entrance) -> Own:
    path = str(entrance.path or "")
    return Own(port=entrance.port, fast_port=entrance.fast_port, unixsocket=path)
