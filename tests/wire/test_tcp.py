"""Invariant: only a peer on this machine gets a fixed send buffer; nobody waits for an ACK."""

from __future__ import annotations

import socket

import pytest

from pion_server.wire.tcp import LOOPBACK_SEND_BUFFER, tcp_options

NODELAY = (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.8.8", "::1"])
def test_a_peer_on_this_machine(peer: str) -> None:
    buffer = (socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_SEND_BUFFER)
    assert tcp_options(peer) == [NODELAY, buffer]


@pytest.mark.parametrize("peer", ["192.0.2.1", "2001:db8::1", "fe80::1%eth0", "0.0.0.0"])
def test_a_peer_elsewhere(peer: str) -> None:
    assert tcp_options(peer) == [NODELAY]
