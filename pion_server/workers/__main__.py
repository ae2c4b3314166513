"""A worker process: `python -m pion_server.workers <index>`, started by the supervisor alone.

It reads what it is given from its standard input (handover.py), says `ready` on its standard
output, and serves until SIGTERM, SIGINT, or the end of its standard input.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace

import uvloop

from pion_server.errors import PionError
from pion_server.net.interpreter import spare_the_loop
from pion_server.net.listening import Entrance
from pion_server.net.server import PionServer, log_to_stderr, stop_signal, within_open_files
from pion_server.workers.crew import Crew
from pion_server.workers.handover import Handover, share_of
from pion_server.workers.relay import Insiders

log = logging.getLogger(__name__)
READY = b"ready\n"


async def work(given: Handover) -> None:
    """Be one worker. Raises PionError where it cannot start."""
    stopping = stop_signal()
    spare_the_loop()
    crew = Crew(given)
    server = PionServer(within_open_files(share_of(given.config, given.index)), crew)
    resp, fast, unix = map(_sockets, (given.resp, given.fast, given.unix))
    await server.start(Entrance(resp, fast, unix))
    if given.inner_listener is not None:
        inside = replace(server.state, tenants=Insiders(server.state.tenants))
        server.open_door(_sockets([given.inner_listener]), inside)
    _stop_without_supervisor(given, stopping)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    await stopping.wait()
    await server.stop()
    await crew.close()


def _sockets(descriptors: Sequence[int]) -> list[socket.socket]:
    return [socket.socket(fileno=fd) for fd in descriptors]


def _stop_without_supervisor(given: Handover, stopping: asyncio.Event) -> None:
    """Nothing comes on standard input but its end."""
    loop = asyncio.get_running_loop()

    def orphaned() -> None:
        loop.remove_reader(sys.stdin)
        if not stopping.is_set():
            log.warning("the supervisor is gone: stopping")
            shutil.rmtree(given.inner.parent, ignore_errors=True)
            stopping.set()

    loop.add_reader(sys.stdin, orphaned)


def main() -> int:
    """Returns the exit status."""
    line = sys.stdin.buffer.readline()
    if not line:
        return 1  # the supervisor is gone already
    given = Handover.unpack(line)
    log_to_stderr(given.config, f"worker {given.index}: ")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work(given))
    except PionError as error:
        print(f"pion-server: worker {given.index}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
