"""The whole life of a tenant in commands, and servers with two tenants."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
import uvloop

from pion_server.config import Config
from pion_server.net.listening import Entrance, listen
from pion_server.net.server import PionServer

from ..raw import SECONDS, Raw, Word

ALICE, BOB = ("alice", "alices-s3cret"), ("bob", "bobs-s3cret")
SECRETS = dict((ALICE, BOB))


class Name(bytes):
    """A word of a command that names a key, a session or a namespace."""


ROWS = np.arange(8, dtype="<f4").tobytes()  # 2 rows of 4 values
ROW, ZERO, ONE = ROWS[:16], b"\0", b"\1\0\0\0"
HASHES = bytes(range(16))
SCHEMA = "fmt=fp16,dim=4"
DECLARED = ["LAYERS", 1, "TOKENS", 2, "PREFILL_MS", "12.5", "FINGERPRINT", "aa"]
K1, K2, K3, K4, KX = (Name(b"k%d" % number) for number in range(5))
SID, NS, MS, IX, NONE = map(Name, (b"session", b"space", b"schemas", b"index", b"absent"))

# Every command of the server in an order that makes sense. A tenant that runs it all begins and
# ends with nothing.
LIFE: list[list[Word]] = [
    ["PING"],
    ["ECHO", "x"],
    ["HELLO", 2],
    ["CLIENT", "SETNAME", "me"],
    ["CLIENT", "GETNAME"],
    ["CLIENT", "ID"],
    ["CLIENT", "SETINFO", "LIB-NAME", "lib"],
    ["CLIENT", "NO-EVICT", "ON"],
    ["SET", K1, "value 1"],
    ["SET", K2, "value 2", "EX", 1_000_000],
    ["MSET", K3, "value 3", K4, "value 4"],
    ["GET", K1],
    ["GET", NONE],
    ["MGET", K1, K2, NONE],
    ["STRLEN", K2],
    ["EXISTS", K1, K2, NONE],
    ["TYPE", K1],
    ["EXPIRE", K3, 1_000_000],
    ["PEXPIRE", K4, 1_000_000_000],
    ["TTL", K3],
    ["PTTL", K4],
    ["PERSIST", K3],
    ["DBSIZE"],
    ["KEYS", "*"],
    ["SCAN", 0, "COUNT", 100],
    ["SELECT", 3],
    ["SET", KX, "gone at once", "PXAT", 1],
    ["DBSIZE"],
    ["SET", K1, "of db 3"],
    ["SELECT", 0],
    ["V.CREATE", SID, 4, "VQUANT", "fp32"],
    ["V.STOREBATCH", SID, 0, 0, 2, ROWS],
    ["V.FETCH", SID, 0, 1, 0],
    ["V.FETCH", SID, 0, "RANGE", 0, 2],
    ["V.FETCH", SID, "BATCH", 0, 2, 1],
    ["V.FETCH", NONE, 0, 0],
    ["KV.PREFIX.REGISTER", NS, 4, "fp32", *DECLARED, "BLOCKS", 64, 2, HASHES, "PARENT", NONE],
    ["KV.PREFIX.LOOKUP", NS],
    ["KV.PREFIX.STORE", NS, 0, 2, "DATA", ROWS, ROWS],
    ["KV.PREFIX.LOOKUP", NS, "FINGERPRINT", "aa"],
    ["KV.PREFIX.LOOKUP", NS, "FINGERPRINT", "bb"],
    ["KV.PREFIX.LOOKUP", NONE],
    ["KV.PREFIX.MATCH", 2, NS, NONE],
    ["KV.PREFIX.FETCH", NS],
    ["KV.PREFIX.BLOCKS", NS],
    ["KV.PREFIX.MEMBERSHIP", NS, 1, HASHES[:8]],
    ["SSM.PREFIX.STORE", NS, 3, "state"],
    ["SSM.PREFIX.STORE", SID, 3, "another state"],
    ["SSM.PREFIX.FETCH", NS, 3],
    ["SSM.PREFIX.FETCH", NONE, 3],
    ["SSM.PREFIX.DROP", SID],
    ["SSM.PREFIX.FETCH", SID, 3],
    ["KV.PREFIX.REGISTER.SCHEMA", MS, "K", 1, SCHEMA, "V", 1, SCHEMA, "PARENT", NS],
    ["ATTEND.PREFIX.STORE", SID, 0, 1, 2, 4, ROWS, ROWS],
    ["ATTEND.PREFIX.LOOKUP", SID, 0],
    ["ATTEND.PREFIX.LOOKUP", NONE, 0],
    ["ATTEND.PREFIX.QUERY", SID, 0, 1, 4, 0, ROW],
    ["ATTEND.PREFIX.QUERY_FUSED", SID, 0, 1, 4, 1, 1, ROW, ROW, ROW, ZERO],
    ["ATTEND.PREFIX.QUERY_SPARSE", SID, 0, 1, 4, 1, ROW, bytes(4), ONE],
    ["ATTEND.PREFIX.QUERY_SPARSE_AUTO", SID, 0, 1, 4, 1, 1, 1, ROW, ZERO],
    ["ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED", SID, 0, 1, 4, 1, 1, 1, 1, ROW, ROW, ROW, ZERO],
    ["ATTEND.QUERYBATCH", 1, 2, 4, 0, ROW, ROWS, ROWS],
    ["KV.PREFIX.WARM", NS, 1, 4, SID],
    ["ATTEND.PREFIX.QUERY", SID, 0, 1, 4, 0, ROW],
    ["KV.STORE", IX, 0, 0, 2, ROWS, ROWS],
    ["ATTEND.STORE", IX, 0, 1, 2, 4, ROWS, ROWS],
    ["KV.FETCH", IX, 0, 0, 4],
    ["KV.INFO", IX],
    ["ATTEND.QUERY", IX, 0, 1, 4, 1, ROW],
    ["KV.PREFIX.INFO"],
    ["KV.PREFIX.SAVE"],
    ["PION.WORKERS"],
    ["PION.STATS"],
    ["INFO"],
    ["CLIENT", "LIST"],
    ["CLIENT", "LIST", "ID", 1, 2, 3, 4, 5, 6, 7, 8],
    ["CLIENT", "INFO"],
    ["CONFIG", "GET", "*"],
    ["COMMAND"],
    ["COMMAND", "COUNT"],
    ["COMMAND", "INFO", "get"],
    ["COMMAND", "DOCS", "get"],
    ["DEL", K3, NONE],
    ["UNLINK", K4, NONE],
    ["DBSIZE"],
    ["KV.PREFIX.DROP", MS, NONE],
    ["KV.PREFIX.DROP", IX],
    ["KV.PREFIX.DROP", NS],
    ["KV.PREFIX.INFO"],
    ["FLUSHDB"],
    ["FLUSHALL"],
    ["DBSIZE"],
    ["PION.STATS", "RESET"],
    ["PION.STATS"],
    ["RESET"],
    ["GET", K1],
    ["AUTH", "<me>", "<secret>"],
    ["INFO"],
    ["QUIT"],
]


@pytest.fixture(scope="session")
def life() -> list[list[Word]]:
    """LIFE; <me> and <secret> stand for who lives it."""
    return LIFE


@pytest.fixture(scope="session")
def name_type() -> type[bytes]:
    """Which words of LIFE are names."""
    return Name


Dial = Callable[..., Raw]


@pytest.fixture
def dial() -> Iterator[Dial]:
    """Opens connections: dial(port), dial(port, "alice"), dial(port, tls=context)."""
    opened: list[Raw] = []

    def dial(port: int, user: str | None = None, tls: ssl.SSLContext | None = None) -> Raw:
        opened.append(Raw(port, tls))
        if user is not None:
            assert opened[-1].ask("AUTH", user, SECRETS[user]) == b"+OK\r\n"
        return opened[-1]

    yield dial
    for raw in opened:
        raw.close()


@pytest.fixture
def two_tenants(start_pion: Any) -> Callable[..., Any]:
    """Starts servers with the tenants alice and bob: two_tenants(alice=":1mb")."""

    def start(*args: str, alice: str = "", bob: str = "") -> Any:
        each = (f"{':'.join(ALICE)}{alice}", f"{':'.join(BOB)}{bob}")
        return start_pion("--tenant", each[0], "--tenant", each[1], *args)

    return start


class Inside:
    """A server in this process, so that a test can change what it goes by and look into it."""

    def __init__(self, **options: Any) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.server = PionServer(Config(port=0, **options))
        self.on_loop(self.server.start(Entrance(listen("127.0.0.1", 0))))

    @property
    def port(self) -> int:
        return self.server.state.port

    def on_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS)

    def stop(self) -> None:
        try:
            self.on_loop(self.server.stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


@pytest.fixture
def inside(dial: Dial) -> Iterator[Callable[..., Inside]]:
    """Starts servers in this process: inside(maxclients=3)."""
    servers: list[Inside] = []

    def start(**options: Any) -> Inside:
        servers.append(Inside(**options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
