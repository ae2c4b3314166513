"""The other end of the wire: `Client` and `AsyncClient`, one method a command.

    with Client("pion://127.0.0.1:1974") as client:
        rows = client.prefix_fetch("my-prefix", fmt="NATIVE")

Arrays go out without a copy and replies can be received into the caller's memory. Every call has a
deadline. Errors are the classes of pion_server/errors.py.
"""

from pion_server.client.asynchronous import AsyncClient
from pion_server.client.calls import (
    Attended,
    BlockTable,
    Call,
    Fmt,
    Layout,
    PrefixRows,
    Sink,
    Warmed,
    Worker,
)
from pion_server.client.sync import Client
from pion_server.client.url import DEFAULT_URL
from pion_server.errors import (
    ColdMiss,
    ConnectionFailed,
    DeadlineExceeded,
    Elsewhere,
    Mismatch,
    NoAuth,
    OutOfMemory,
    PionError,
    ProtocolError,
    WrongPass,
)
from pion_server.wire.values import Payload

__all__ = [
    "DEFAULT_URL",
    "AsyncClient",
    "Attended",
    "BlockTable",
    "Call",
    "Client",
    "ColdMiss",
    "ConnectionFailed",
    "DeadlineExceeded",
    "Elsewhere",
    "Fmt",
    "Layout",
    "Mismatch",
    "NoAuth",
    "OutOfMemory",
    "Payload",
    "PionError",
    "PrefixRows",
    "ProtocolError",
    "Sink",
    "Warmed",
    "Worker",
    "WrongPass",
]
