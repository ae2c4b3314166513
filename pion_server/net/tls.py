"""TLS: the server's certificate, and the handshake of one connection."""

from __future__ import annotations

import asyncio
import ssl

from pion_server.config import Config
from pion_server.errors import PionError

HANDSHAKE_SECONDS = 10.0
# How long a peer may take to close its side once ours is closed.
CLOSING_SECONDS = 5.0


def server_context(config: Config) -> ssl.SSLContext | None:
    """TLS 1.2 and later with the configured certificate; None where none is configured. Raises
    PionError where the files cannot be used."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # An empty password makes an encrypted key an error; without one OpenSSL asks the terminal.
        context.load_cert_chain(config.tls_cert, config.tls_key, password="")
        if config.tls_ca is not None:
            context.load_verify_locations(config.tls_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise PionError(
            f"cannot use the files of --tls-cert, --tls-key or --tls-ca: {error.strerror or error}"
        ) from error
    return context


async def secured(
    transport: asyncio.Transport, protocol: asyncio.BaseProtocol, context: ssl.SSLContext
) -> asyncio.Transport | None:
    """The encrypted transport above `transport`, which is paused; None where the handshake failed:
    then it is closed, and the protocol may or may not have been told."""
    try:
        return await asyncio.get_running_loop().start_tls(
            transport,
            protocol,
            context,
            server_side=True,
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=CLOSING_SECONDS,
        )
    except OSError:  # all that a peer can do wrong: no TLS, no certificate, too slow, gone
        return None
