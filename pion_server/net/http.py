"""HTTP for watching: GET over HTTP/1.1, one request a connection, on 127.0.0.1 alone.

h11 reads the requests. Whatever comes in, a connection ends after SECONDS, holds MAX_HEAD bytes and
is one of at most MAX_CONNECTIONS. There is no password, so nobody but this machine is let in, and
no browser that was told another name for it: a page of anywhere could read the numbers otherwise
(DNS rebinding).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TypeAlias
from urllib.parse import urlsplit

import h11

from pion_server.config import is_loopback
from pion_server.errors import PionError

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
# Several browsers and scrapers at a time; within the descriptors that server.py spares.
MAX_CONNECTIONS = 64
MAX_HEAD = 8192  # request line and headers; what web servers commonly take
# From accepting to the last byte of the answer: local peers need milliseconds.
SECONDS = 10.0
# Beside what an answer has of its own. An answer is of its moment, and for its own pages only.
HEADERS = {
    "Connection": "close",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes out. `more`: further headers."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = HTTPStatus.OK
    more: Mapping[str, str] = field(default_factory=dict)


# Takes the value of the Accept header.
Page: TypeAlias = Callable[[str], Awaitable[Answer]]


class HttpEndpoint:
    """Pages by path, for the loop that runs."""

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self._pages = pages
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener: asyncio.Server | None = None

    async def listen(self, port: int) -> int:
        """Answer from now on; returns the port. Raises PionError where that is not possible."""
        try:
            self._listener = await asyncio.start_server(self._serve, HOST, port, limit=MAX_HEAD)
        except OSError as error:
            reason = error.strerror or str(error)
            raise PionError(f"cannot listen on {HOST}:{port} for metrics: {reason}") from error
        return int(self._listener.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Answer no more, if ever."""
        if self._listener is not None:
            self._listener.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._writers) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._writers.add(writer)
        try:
            async with asyncio.timeout(SECONDS):
                await self._converse(reader, writer)
        except OSError:  # TimeoutError is one: the peer is gone, or too slow
            pass
        except Exception:
            log.exception("a page failed; this is a defect of the server")
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        method = b""
        try:
            request = await _next_request(connection, reader)
            if request is None:
                return
            method, answer = request.method, await self._answer(request)
        except h11.RemoteProtocolError as error:
            answer = _refusal(error.error_status_hint, str(error))
        writer.transport.set_write_buffer_limits(high=0)  # drain() waits for the last byte
        writer.write(connection.send(_head(answer)) or b"")
        if method != b"HEAD":
            writer.write(answer.body)
        await writer.drain()

    async def _answer(self, request: h11.Request) -> Answer:
        headers = {name: value.decode("latin-1") for name, value in request.headers}
        path = request.target.partition(b"?")[0].decode("latin-1")
        if not _is_us(headers.get(b"host", HOST)):
            return _refusal(HTTPStatus.MISDIRECTED_REQUEST, "ask for localhost or 127.0.0.1")
        if request.method not in (b"GET", b"HEAD"):
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, "GET only", Allow="GET, HEAD")
        page = self._pages.get(path)
        if page is None:
            known = " ".join(self._pages)
            return _refusal(HTTPStatus.NOT_FOUND, f"no such page; there are {known}")
        return await page(headers.get(b"accept", ""))


async def _next_request(
    connection: h11.Connection, reader: asyncio.StreamReader
) -> h11.Request | None:
    """The request's head; None where the peer leaves instead."""
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await reader.read(MAX_HEAD))
    return event if isinstance(event, h11.Request) else None


def _is_us(host: str) -> bool:
    """Whether a Host header, with or without a port, names this machine from within."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def _refusal(status: int, why: str, **more: str) -> Answer:
    return Answer(f"{why}\n".encode(), status=status, more=more)


def _head(answer: Answer) -> h11.Response:
    headers = {
        "Content-Type": answer.content_type,
        "Content-Length": str(len(answer.body)),
        **HEADERS,
        **answer.more,
    }
    reason = HTTPStatus(answer.status).phrase
    return h11.Response(
        status_code=answer.status, headers=list(headers.items()), reason=reason.encode()
    )
