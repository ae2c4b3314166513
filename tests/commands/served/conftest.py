"""One connection to a real server in raw RESP: nothing between a test and the wire tidies up.

Replies are `+text` and `-text` as str, bulks as bytes, and int, float, bool, None, list and dict.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ...raw import SECONDS, Word, request


class Raw:
    """A connection; `ask` is one command and its reply."""

    def __init__(self, port: int, proto: int) -> None:
        self.proto = proto
        self._socket = socket.create_connection(("127.0.0.1", port), SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")
        assert isinstance(self.ask("HELLO", proto), list if proto == 2 else dict)

    def ask(self, *words: Word) -> Any:
        self.send(*words)
        return self.reply()

    def send(self, *words: Word) -> None:
        self._socket.sendall(request(*words))

    def reply(self) -> Any:
        line = self._file.readline()
        assert line.endswith(b"\r\n"), f"the server closed: {line!r}"
        kind, rest = chr(line[0]), line[1:-2]
        match kind:
            case "+" | "-":
                return kind + rest.decode()
            case ":":
                return int(rest)
            case "$":
                return None if rest == b"-1" else self._bulk(int(rest))
            case "*":
                return [self.reply() for _ in range(int(rest))]
            case "%":
                return {self.reply(): self.reply() for _ in range(int(rest))}
            case "_":
                return None
            case "#":
                return rest == b"t"
            case ",":
                return float(rest)
        raise AssertionError(f"no RESP type: {line!r}")

    def map(self, reply: Any) -> dict[bytes, Any]:
        """A map reply of either protocol."""
        if self.proto == 3:
            assert isinstance(reply, dict)
            return reply
        assert isinstance(reply, list)
        return dict(zip(reply[::2], reply[1::2], strict=True))

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def _bulk(self, nbytes: int) -> bytes:
        data = self._file.read(nbytes + 2)
        assert len(data) == nbytes + 2
        assert data.endswith(b"\r\n")
        return data[:-2]


@pytest.fixture(scope="module", params=[2, 3], ids=["resp2", "resp3"])
def proto(request: pytest.FixtureRequest) -> int:
    """Both protocols, one after the other."""
    return int(request.param)


Connect = Callable[..., Raw]


@pytest.fixture(scope="module")
def connect(proto: int) -> Iterator[Connect]:
    """Opens connections: connect(port)."""
    opened: list[Raw] = []

    def connect(port: int) -> Raw:
        opened.append(Raw(port, proto))
        return opened[-1]

    yield connect
    for raw in opened:
        raw.close()


@pytest.fixture(scope="module")
def raw(pion_server: Any, connect: Connect) -> Raw:
    """One connection to the shared server for all tests of a file."""
    return connect(pion_server.port)


_names = itertools.count()


@pytest.fixture(scope="module")
def new_name() -> Callable[[], bytes]:
    """Names that nobody has used, for sessions and namespaces."""
    return lambda: b"name-%d" % next(_names)
