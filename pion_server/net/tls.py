"""TLS: the server's certificate."""

from __future__ import annotations

import ssl

from pion_server.config import Config
from pion_server.errors import PionError


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
