"""Invariant: a key past its deadline is absent for every command, as with a real redis-server."""

from __future__ import annotations

import time
from typing import Any

import pytest

AFTER = [
    [b"GET", b"k"],
    [b"MGET", b"k", b"k"],
    [b"EXISTS", b"k"],
    [b"STRLEN", b"k"],
    [b"TYPE", b"k"],
    [b"TTL", b"k"],
    [b"PTTL", b"k"],
    [b"PERSIST", b"k"],
    [b"EXPIRE", b"k", b"100"],
    [b"EXPIRE", b"k", b"100", b"XX"],
    [b"PEXPIRE", b"k", b"-1"],
    [b"DEL", b"k"],
    [b"UNLINK", b"k"],
    [b"KEYS", b"*"],
    [b"SCAN", b"0"],
    [b"SET", b"k", b"new", b"XX"],
    [b"SET", b"k", b"new", b"XX", b"GET"],
    [b"SET", b"k", b"new", b"NX"],
    [b"SET", b"k", b"new", b"NX", b"GET"],
    [b"SET", b"k", b"new", b"KEEPTTL"],
    [b"SET", b"k", b"new", b"GET"],
]


@pytest.mark.parametrize("last", [b"PX", b"PXAT", b"EXAT", b"PEXPIRE"])
@pytest.mark.parametrize("words", AFTER, ids=lambda words: b" ".join(words).decode())
def test_absent_for_every_command(both: Any, words: list[bytes], last: bytes) -> None:
    said = []
    with both.clients() as clients:
        for client in clients:
            client.ask(b"FLUSHALL")
            if last == b"PEXPIRE":
                client.send(client.request([b"SET", b"k", b"v"]))
                client.send(client.request([b"PEXPIRE", b"k", b"1"]))
                assert (client.reply(), client.reply()) == (b"+OK\r\n", b":1\r\n")
            else:
                assert client.ask(b"SET", b"k", b"v", last, b"1") == b"+OK\r\n"
            time.sleep(0.002)  # PX counts from now; the other deadlines are long past
            said.append([client.ask(*words), client.ask(b"PTTL", b"k"), client.ask(b"GET", b"k")])
    assert said[0] == said[1]


def test_memory_of_expired_keys_comes_back_unasked(both: Any) -> None:
    def used(client: Any) -> int:
        line = next(each for each in client.ask(b"INFO", b"memory").split() if b"used_" in each)
        return int(line.partition(b":")[2])

    with both.clients() as (pion, _):
        pion.ask(b"FLUSHALL")
        before = used(pion)
        for number in range(50):
            pion.ask(b"SET", b"key-%d" % number, b"v" * 1000, b"PX", b"100")
        held = used(pion)
        give_up = time.monotonic() + 20
        while used(pion) > before and time.monotonic() < give_up:
            time.sleep(0.02)
        assert held > before
        assert used(pion) == before
        assert pion.ask(b"DBSIZE") == b":0\r\n"
