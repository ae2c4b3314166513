"""TLS for `pions://`: what a client believes, and a socket that behaves like a plain one.

The server's certificate is always checked, and that it is the host's which the URL names. Whom to
believe is what the machine believes, or the authorities of `?ca=FILE` alone.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterable, Iterator
from typing import Any

from pion_server.errors import PionError

# The largest TLS record; more in one call would only be cut by OpenSSL.
RECORD = 16 * 1024
# What one recv_into() takes at most: a server that sends as fast as we read would not let it end,
# and it is between two of them that the caller looks at its deadline.
RECEIVE_MAX = 1 << 20
_NOT_NOW = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


def client_context(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    """TLS 1.2 and later. `ca`: a PEM file of authorities; `cert`, `key`: PEM files with which to
    show who we are. Raises PionError where a file cannot be used."""
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            # An empty password: an encrypted key is an error, not a question on the terminal.
            context.load_cert_chain(cert, key, password="")
    except OSError as error:
        raise PionError(f"the URL names a file that is of no use: {reason(error)}") from None
    context.sslsocket_class = TlsSocket
    return context


def reason(error: OSError) -> str:
    """What went wrong, in OpenSSL's words or those of the system."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error}"
    # Event loops word the same errno in their own ways.
    return os.strerror(error.errno) if error.errno else "timed out"


def undelivered(sock: Any) -> bool:
    """Whether bytes have come that no poll() tells of, since they are already decrypted."""
    return isinstance(sock, ssl.SSLSocket) and sock.pending() > 0


class TlsSocket(ssl.SSLSocket):
    """An SSLSocket that is used like a plain non-blocking socket: sendmsg() takes as much and
    recv_into() gives as much as there is room or data for, up to RECEIVE_MAX, or else they raise
    BlockingIOError."""

    def sendmsg(self, buffers: Iterable[memoryview], *_: Any) -> int:  # type: ignore[override]
        sent = 0
        for record in _records(buffers):
            try:
                taken = self.send(record)
            except _NOT_NOW:
                break
            sent += taken
            if taken < len(record):
                break
        if not sent:
            raise BlockingIOError
        return sent

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        view, received = memoryview(buffer)[:RECEIVE_MAX], 0
        while received < len(view):
            try:
                more = super().recv_into(view[received:], nbytes, flags)
            except _NOT_NOW:
                if not received:
                    raise BlockingIOError from None
                break
            if not more:
                break
            received += more
        return received


def _records(buffers: Iterable[memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes in pieces of at most RECORD, small neighbours joined. A piece that was not
    taken comes again as the start of one, which is what OpenSSL wants of a second attempt."""
    small: list[memoryview] = []
    size = 0
    for view in buffers:
        if small and size + len(view) > RECORD:
            yield b"".join(small)
            small, size = [], 0
        if len(view) > RECORD:
            yield from (view[at : at + RECORD] for at in range(0, len(view), RECORD))
        else:
            small.append(view)
            size += len(view)
    if small:
        yield b"".join(small)
