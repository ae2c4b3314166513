"""One method a command, for both clients, from one table.

`method(build)` turns a function that builds a `Call[T]` into a method with the same parameters and
docstring: on a `Client` it returns T, on an `AsyncClient` an awaitable of T; on the class it is
`build` itself. AUTH, HELLO and SELECT have no method: they belong to a connection, which is
replaced when it breaks, so the URL says them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from types import MethodType
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload

from pion_server.client import calls
from pion_server.client.calls import Call

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class Runner(Protocol):
    """A client that waits for its calls."""

    def execute(self, call: Call[R], *, timeout: float | None = None) -> R: ...


class AsyncRunner(Protocol):
    """A client whose calls are awaited."""

    async def execute(self, call: Call[R], *, timeout: float | None = None) -> R: ...


class method(Generic[P, T]):  # noqa: N801 - used as a keyword, like property
    """A command as a method of both clients."""

    def __init__(self, build: Callable[P, Call[T]]) -> None:
        @functools.wraps(build)
        def run(client: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
            return client.execute(build(*args, **kwargs))

        self._build = build
        self._run = run

    @overload
    def __get__(self, client: None, owner: type) -> Callable[P, Call[T]]: ...
    @overload
    def __get__(self, client: Runner, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncRunner, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...

    def __get__(self, client: Any, owner: type) -> Any:
        return self._build if client is None else MethodType(self._run, client)


class Commands:
    """The table."""

    ping = method(calls.ping)
    echo = method(calls.echo)
    info = method(calls.info)
    set = method(calls.set_)
    set_get = method(calls.set_get)
    get = method(calls.get)
    mget = method(calls.mget)
    mset = method(calls.mset)
    exists = method(calls.exists)
    delete = method(calls.delete)
    strlen = method(calls.strlen)
    expire = method(calls.expire)
    ttl = method(calls.ttl)
    pttl = method(calls.pttl)
    persist = method(calls.persist)
    dbsize = method(calls.dbsize)
    scan = method(calls.scan)
    type = method(calls.type_)
    flushdb = method(calls.flushdb)

    v_create = method(calls.v_create)
    v_create_schema = method(calls.v_create_schema)
    v_storebatch = method(calls.v_storebatch)
    v_fetch_ids = method(calls.v_fetch_ids)
    v_fetch = method(calls.v_fetch)
    v_fetch_batch = method(calls.v_fetch_batch)

    prefix_register = method(calls.prefix_register)
    prefix_register_schema = method(calls.prefix_register_schema)
    prefix_lookup = method(calls.prefix_lookup)
    prefix_match = method(calls.prefix_match)
    prefix_blocks = method(calls.prefix_blocks)
    prefix_membership = method(calls.prefix_membership)
    prefix_store = method(calls.prefix_store)
    prefix_fetch = method(calls.prefix_fetch)
    prefix_drop = method(calls.prefix_drop)
    prefix_info = method(calls.prefix_info)

    attend_store = method(calls.attend_store)
    attend_lookup = method(calls.attend_lookup)
    attend_query = method(calls.attend_query)
    attend_query_fused = method(calls.attend_query_fused)
    attend_query_sparse = method(calls.attend_query_sparse)
    attend_query_sparse_auto = method(calls.attend_query_sparse_auto)
    attend_query_sparse_auto_fused = method(calls.attend_query_sparse_auto_fused)
    attend_querybatch = method(calls.attend_querybatch)
    prefix_warm = method(calls.prefix_warm)

    ssm_store = method(calls.ssm_store)
    ssm_fetch = method(calls.ssm_fetch)
    ssm_drop = method(calls.ssm_drop)

    pion_stats = method(calls.pion_stats)
    pion_stats_reset = method(calls.pion_stats_reset)
    pion_workers = method(calls.pion_workers)
