"""PION.WORKERS: who answers for this server, and where each of them is reached."""

from __future__ import annotations

import os
from ipaddress import ip_address

from pion_server.commands.context import Context
from pion_server.commands.registry import command
from pion_server.team import Member
from pion_server.wire.values import Payload, Reply


@command(
    "PION.WORKERS",
    arity=1,
    group="PION",
    syntax="PION.WORKERS",
    reply="an array of maps: worker, host, port, pid (0 where it was never up), up, fast_port, "
    "unixsocket",
)
def workers(ctx: Context, raw: list[Payload]) -> Reply:
    """The worker processes in the order of their numbers. `port` leads to that one alone; the port
    of the server leads to any. `host` is the one of this connection where the server listens on
    every address. A server without -w is worker 0. `fast_port` (0: none) is that of the binary
    lane, `unixsocket` (empty: none) a path on the server's machine."""
    server = ctx.server
    path = str(server.config.unixsocket or "")
    alone = [Member(0, server.port, server.fast_port, path, os.getpid(), up=True)]
    host = reachable(server.config.host, ctx.client.local_address)
    return [
        {
            "worker": each.worker,
            "host": host,
            "port": each.port,
            "pid": each.pid,
            "up": each.up,
            "fast_port": each.fast_port,
            "unixsocket": each.unixsocket,
        }
        for each in (server.team.members() if server.team else alone)
    ]


def reachable(host: str, local_address: str) -> str:
    """`host`; where it stands for every address that of `local_address`, which is host:port, or
    path:0 of a Unix socket."""
    try:
        everywhere = ip_address(host).is_unspecified
    except ValueError:
        everywhere = not host
    if not everywhere:
        return host
    here = local_address.rpartition(":")[0].strip("[]")
    return "127.0.0.1" if here.startswith("/") else here
