"""Listening sockets: RESP on a port, the binary lane on the next one, RESP on a Unix socket.

The binary lane is a faster way to what the port also offers. So where its port is taken the server
says so, and does without.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pion_server.config import Config
from pion_server.errors import PionError

log = logging.getLogger(__name__)

BACKLOG = 511  # Redis' figure
LAST_PORT = 65535
# Only its owner may connect to a Unix socket, from the moment it is there.
OWNER_ONLY = 0o177


@dataclass(frozen=True, slots=True)
class Entrance:
    """Sockets by what is spoken there; no lane but RESP on TCP has to be there."""

    resp: Sequence[socket.socket]
    fast: Sequence[socket.socket] = ()
    unix: Sequence[socket.socket] = ()
    path: Path | None = field(default=None)

    @property
    def port(self) -> int:
        return _port(self.resp)

    @property
    def fast_port(self) -> int:
        """0: there is no binary lane."""
        return _port(self.fast) if self.fast else 0


def _port(listeners: Sequence[socket.socket]) -> int:
    port: int = listeners[0].getsockname()[1]
    return port


@contextmanager
def entrances(
    config: Config, places: Sequence[tuple[int, Path | None]]
) -> Iterator[list[Entrance]]:
    """An entrance for each port (0: a free one) and path; the binary lane is at all of them or at
    none. Raises PionError, naming address and cause."""
    with ExitStack() as stack:
        resp = [_enter(stack, listen(config.host, port)) for port, _ in places]
        fast = _fast(stack, config, [port for port, _ in places])
        unix = [[stack.enter_context(_unix(path))] if path else [] for _, path in places]
        paths = [path for _, path in places]
        yield [Entrance(*each) for each in zip(resp, fast, unix, paths, strict=True)]


def _fast(stack: ExitStack, config: Config, ports: list[int]) -> list[list[socket.socket]]:
    try:
        with ExitStack() as attempt:
            wanted = [] if config.no_fast_lane else ports
            found = [_enter(attempt, listen(config.host, port and port + 1)) for port in wanted]
            stack.push(attempt.pop_all())
            return found or [[] for _ in ports]
    except PionError as error:
        log.warning("there is no binary lane: %s", error)
        return [[] for _ in ports]


def _enter(stack: ExitStack, listeners: list[socket.socket]) -> list[socket.socket]:
    return [stack.enter_context(each) for each in listeners]


def listen(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address of `host`; with port 0 on one free port for all. Raises
    PionError, naming address and cause."""
    try:
        if port > LAST_PORT:
            raise OSError("there is no such port")
        return _listen(host, port)
    except OSError as error:
        reason = error.strerror or str(error)
        raise PionError(f"cannot listen on {host}:{port}: {reason}") from error


def _listen(host: str, port: int) -> list[socket.socket]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    for family, sockaddr in dict.fromkeys((each[0], each[4]) for each in found):
        taken = listeners[0].getsockname()[1] if listeners else port
        address: Any = (sockaddr[0], taken, *sockaddr[2:])
        listeners.append(socket.create_server(address, family=family, backlog=BACKLOG))
        listeners[-1].setblocking(False)
    return listeners


@contextmanager
def _unix(path: Path) -> Iterator[socket.socket]:
    with listen_unix(path) as listener:
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def listen_unix(path: Path) -> socket.socket:
    """A listening Unix socket for this user alone; one that a dead server left behind is replaced.
    Raises PionError, naming path and cause."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        _remove_stale(path)
        mask = os.umask(OWNER_ONLY)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise PionError(f"cannot listen on {path}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def _remove_stale(path: Path) -> None:
    """Any other file stays, and cannot be bound to."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(BlockingIOError):
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
