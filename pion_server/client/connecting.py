"""From a place to a connected socket, blocking and awaited; the blocking one with TLS on top.

Addresses are tried in order, each with its share of the time that is left, so one that swallows
packets does not keep the next from being tried. The socket is handed out non-blocking.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pion_server.client.deadline import Deadline
from pion_server.client.tls import reason
from pion_server.client.url import Address, Place
from pion_server.errors import ConnectionFailed


def connect(place: Place, deadline: Deadline) -> socket.socket:
    """A connected socket. Raises ConnectionFailed or DeadlineExceeded."""
    addresses = _resolve(place, deadline)
    failure: OSError | None = None
    for position, address in enumerate(addresses):
        try:
            with _new_socket(place, address) as sock:
                sock.settimeout(deadline.left() / (len(addresses) - position))
                sock.connect(address.sockaddr)
                ready = _secured(sock, place, deadline)
                ready.setblocking(False)
                return ready
        except OSError as error:
            failure = error
    deadline.left()
    raise unreachable(place, failure) from failure


def _secured(sock: socket.socket, place: Place, deadline: Deadline) -> socket.socket:
    """The connected socket, encrypted if the place wants it. Raises OSError."""
    if place.tls is None:
        return sock
    sock.settimeout(deadline.left())
    return place.tls.wrap_socket(sock, server_hostname=place.host)


async def connect_async(place: Place, deadline: Deadline) -> socket.socket:
    """A connected socket, without TLS yet. Raises ConnectionFailed or DeadlineExceeded."""
    loop = asyncio.get_running_loop()
    try:
        addresses = await loop.run_in_executor(None, place.resolve)
    except (OSError, UnicodeError) as error:
        raise _unknown(place, error) from error
    failure: OSError | None = None
    for position, address in enumerate(addresses):
        try:
            with _new_socket(place, address) as sock:
                sock.setblocking(False)
                async with asyncio.timeout(deadline.left() / (len(addresses) - position)):
                    await loop.sock_connect(sock, address.sockaddr)
                return sock
        except OSError as error:
            failure = error
    deadline.left()
    raise unreachable(place, failure) from failure


@contextmanager
def _new_socket(place: Place, address: Address) -> Iterator[socket.socket]:
    """A socket that is closed if connecting it fails."""
    sock = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        for option in place.socket_options(address):
            sock.setsockopt(*option)
        yield sock
    except BaseException:
        sock.close()
        raise


def _resolve(place: Place, deadline: Deadline) -> list[Address]:
    """The place's addresses. A name server may hang and getaddrinfo has no timeout, so the question
    is asked on a thread that can be left behind."""
    answers: queue.SimpleQueue[list[Address] | OSError | UnicodeError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(place.resolve())
        except (OSError, UnicodeError) as error:
            answers.put(error)

    threading.Thread(target=ask, name="pion-resolve", daemon=True).start()
    try:
        answer = answers.get(timeout=deadline.left())
    except queue.Empty:
        raise deadline.exceeded() from None
    if isinstance(answer, list):
        return answer
    raise _unknown(place, answer) from answer


def _unknown(place: Place, failure: OSError | UnicodeError) -> ConnectionFailed:
    return ConnectionFailed(f"cannot find {place}: {failure}")


def unreachable(place: Place, failure: OSError | None) -> ConnectionFailed:
    """What to raise where no address of a place could be connected to."""
    return ConnectionFailed(f"cannot reach {place}: {reason(failure) if failure else 'timed out'}")
