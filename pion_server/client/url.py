"""`pion://[user:password@]host[:port][/db]`: where a server is, and who we say we are.

`pion+fast://` is the same over the binary lane, whose port is the next one. `pions://` and
`pions+fast://` are those over TLS, and may end in `?ca=FILE&cert=FILE&key=FILE`: the authorities to
believe instead of the machine's, and a certificate to show. `pion+unix://[user:password@]/path` is
a Unix socket. User, password, IPv6 zones, paths and options are percent-decoded. A URL may hold a
password, so no error and no repr made here shows any part of it beyond scheme, host and port. The
scheme picks the transport from a table: how the rest of the URL is read, which sockets can reach
the server, and what is spoken there.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol
from urllib.parse import SplitResult, unquote, urlsplit

from pion_server import DEFAULT_PORT
from pion_server.client.calls import Worker
from pion_server.client.tls import client_context
from pion_server.errors import PionError
from pion_server.wire.lanes import FAST, RESP, Lane
from pion_server.wire.tcp import Option, tcp_options

DEFAULT_URL = f"pion://127.0.0.1:{DEFAULT_PORT}"
_FORM = "pion://[user:password@]host[:port][/db]"
_UNIX_FORM = "pion+unix://[user:password@]/path"
_ENCODE = "percent-encode any of / ? # @ : [ ] in the user and the password"


class Address(NamedTuple):
    """One way to reach a server, as `socket.socket(family)` and `connect(sockaddr)` take it."""

    family: int
    sockaddr: Any


class Place(Protocol):
    """Where a server listens, under one transport. `str()` of it is fit for logs."""

    @property
    def tls(self) -> ssl.SSLContext | None:
        """How to encrypt the connection, if it is to be."""

    @property
    def host(self) -> str:
        """Whom the server's certificate must name."""

    def socket_options(self, address: Address) -> list[Option]:
        """What to set before connecting to `address`."""

    def resolve(self) -> list[Address]:
        """The addresses to try, in order; may block on a name server. Raises OSError."""

    @property
    def lane(self) -> Lane:
        """What is spoken there."""

    def of(self, worker: Worker) -> Place:
        """Where that worker of the server is reached in the same way. The host stays, for that name
        is the one that leads there from here, and that certificates are for. Raises PionError
        where there is no such way."""


@dataclass(frozen=True, slots=True)
class Tcp:
    """A host and a port."""

    host: str
    port: int
    tls: ssl.SSLContext | None = field(default=None, repr=False, compare=False)
    lane: Lane = field(default=RESP, repr=False)

    def socket_options(self, address: Address) -> list[Option]:
        # KEEPALIVE: a machine that went away is noticed on connections that stay idle for hours.
        return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *tcp_options(address.sockaddr[0])]

    def resolve(self) -> list[Address]:
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        return [Address(family, sockaddr) for family, _, _, _, sockaddr in found]

    def of(self, worker: Worker) -> Tcp:
        port = worker.fast_port if self.lane is FAST else worker.port
        if not port:
            raise PionError(f"worker {worker.worker} of {self} has no binary lane")
        return replace(self, port=port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Unix:
    """A Unix socket of this machine."""

    path: str
    tls: None = None
    host: str = ""
    lane: Lane = field(default=RESP, repr=False)

    def socket_options(self, address: Address) -> list[Option]:
        return []

    def resolve(self) -> list[Address]:
        return [Address(socket.AF_UNIX, self.path)]

    def of(self, worker: Worker) -> Unix:
        if not worker.unixsocket:
            raise PionError(f"worker {worker.worker} of {self} has no Unix socket")
        return replace(self, path=worker.unixsocket)

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed URL. `password` None: no AUTH."""

    place: Place
    user: str = "default"
    password: str | None = field(default=None, repr=False)
    db: int = 0


def parse_url(url: str) -> Endpoint:
    """The endpoint a URL names. Raises PionError, which never quotes the URL."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise PionError(f"not a valid URL; the form is {_FORM}; {_ENCODE}") from None
    transport = TRANSPORTS.get(parts.scheme)
    if transport is None:
        known = ", ".join(f"{scheme}://" for scheme in TRANSPORTS)
        raise PionError(f"unknown URL scheme; known here: {known}; the form is {_FORM}")
    if parts.fragment or (parts.query and not transport.options):
        raise PionError(f"a URL has no ? or # part; {_ENCODE}")
    return transport.read(parts, _options(parts.query, transport.options), transport.lane)


def _options(query: str, known: tuple[str, ...]) -> dict[str, str]:
    """`name=value&...`, each name at most once."""
    words = [part.partition("=")[::2] for part in query.split("&") if part]
    options = {name: unquote(value) for name, value in words if value}
    if len(options) < len(words) or not options.keys() <= set(known):
        raise PionError(f"behind ? come {', '.join(f'{name}=...' for name in known)}, each once")
    return options


def _tls(parts: SplitResult, options: dict[str, str], lane: Lane) -> Endpoint:
    if "key" in options and "cert" not in options:
        raise PionError("key=... goes with cert=...")
    context = client_context(*(options.get(name) for name in _TLS_OPTIONS))
    return _tcp(parts, {}, lane, context)


def _tcp(
    parts: SplitResult, options: dict[str, str], lane: Lane, tls: ssl.SSLContext | None = None
) -> Endpoint:
    try:
        host, port = parts.hostname, parts.port
    except ValueError:  # its words may quote the password
        raise PionError(f"the port must be a number from 1 to 65535; {_ENCODE}") from None
    if port == 0:
        raise PionError("the port must be a number from 1 to 65535, got 0")
    port = port or (DEFAULT_PORT + 1 if lane is FAST else DEFAULT_PORT)
    place = Tcp(unquote(host or "127.0.0.1"), port, tls, lane)
    return Endpoint(place, *_login(parts), _db(parts.path))


def _unix(parts: SplitResult, options: dict[str, str], lane: Lane) -> Endpoint:
    _, _, host = parts.netloc.rpartition("@")
    if host or not parts.path.strip("/"):
        raise PionError(f"a Unix socket is a path behind three slashes; the form is {_UNIX_FORM}")
    return Endpoint(Unix(unquote(parts.path), lane=lane), *_login(parts))


def _login(parts: SplitResult) -> tuple[str, str | None]:
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    if user and not password:
        raise PionError(f"a user without a password; the form is {_FORM}")
    return user or "default", password or None


def _db(path: str) -> int:
    number = path.strip("/")
    if not number:
        return 0
    if not (number.isascii() and number.isdecimal() and len(number) <= 9):
        raise PionError("what follows the host must be the number of a db, as in /0")
    return int(number)


class Transport(NamedTuple):
    """How the URLs of one scheme are read, what is spoken there, and the options that they may have
    behind a `?`."""

    read: Callable[[SplitResult, dict[str, str], Lane], Endpoint]
    lane: Lane = RESP
    options: tuple[str, ...] = ()


_TLS_OPTIONS = ("ca", "cert", "key")
TRANSPORTS = {
    "pion": Transport(_tcp),
    "pions": Transport(_tls, RESP, _TLS_OPTIONS),
    "pion+fast": Transport(_tcp, FAST),
    "pions+fast": Transport(_tls, FAST, _TLS_OPTIONS),
    "pion+unix": Transport(_unix),
}
