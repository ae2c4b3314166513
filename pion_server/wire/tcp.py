"""Options that both ends set on a TCP socket: (level, option, value); only data."""

from __future__ import annotations

import ipaddress
import socket
from typing import TypeAlias

Option: TypeAlias = tuple[int, int, int]

# What is under way between two processes of one machine should fit in a core's second-level cache.
# The kernel's own choice grows to megabytes, which go out to memory and back: half the speed.
LOOPBACK_SEND_BUFFER = 256 * 1024


def tcp_options(peer: str) -> list[Option]:
    """For a connection with `peer`, a numeric address. A peer elsewhere gets no fixed buffer: it
    would bound what is under way to it."""
    # A request or reply that ends in a short segment must not wait for an ACK.
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    if ipaddress.ip_address(peer.partition("%")[0]).is_loopback:
        options.append((socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_SEND_BUFFER))
    return options
