"""Invariant: replies come whole and in the order of the requests, however these arrive and however
long each takes, and a pipeline sees its own writes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ROWS, DIM = 4096, 512  # 8 MB in fp32: converting them takes some milliseconds, off the event loop


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


def test_ten_thousand_commands_in_one_write(wire: Any) -> None:
    requests, replies = [], []
    for i in range(2500):
        requests += [("SET", "n", i), ("GET", "n"), ("ECHO", "x" * (i % 50)), ("PING",)]
        replies += [b"+OK\r\n", bulk(b"%d" % i), bulk(b"x" * (i % 50)), b"+PONG\r\n"]
    wire.write(b"".join(wire.request(*words) for words in requests))
    wire.expect(b"".join(replies))


def test_a_pipeline_sees_a_write_that_must_be_converted(wire: Any) -> None:
    rows = [np.full(ROWS * DIM, value, np.float32).tobytes() for value in (1, 2, 3)]
    wire.send("KV.PREFIX.DROP", "order")
    wire.send("KV.PREFIX.REGISTER", "order", DIM, "fp16", "LAYERS", 1, "TOKENS", ROWS)
    for blob in rows:
        wire.send("KV.PREFIX.STORE", "order", 0, ROWS, "DATA", blob, blob)
        wire.send("ECHO", "behind it")
        wire.send("KV.PREFIX.LOOKUP", "order")
        wire.send("V.FETCH", "order_pv", 0, ROWS - 1)
    wire.line()
    wire.expect(b"+OK\r\n")
    for blob in rows:
        wire.expect(b"+OK\r\n" + bulk(b"behind it") + b"+HIT\r\n" + bulk(blob[-4 * DIM :]))


def test_a_slow_write_keeps_nobody_else_waiting(wire: Any, pion_server: Any, dial: Any) -> None:
    other = dial(pion_server.port)
    wire.send("V.CREATE", "slow-write", DIM)
    wire.expect(b"+OK\r\n")
    blob = bytes(ROWS * DIM * 4)
    for layer in range(8):
        wire.send("V.STOREBATCH", "slow-write", layer, 0, ROWS, blob)
        assert other.ask("PING") == b"+PONG\r\n"
    wire.expect(b"+OK\r\n" * 8)


def test_a_large_reply_keeps_its_place_between_small_ones(wire: Any) -> None:
    wire.send("V.CREATE", "place", DIM, "VQUANT", "bf16")
    wire.send("V.STOREBATCH", "place", 0, 0, ROWS, bytes(ROWS * DIM * 2), "FMT", "NATIVE")
    wire.expect(b"+OK\r\n" * 2)
    fetch = ("V.FETCH", "place", 0, "RANGE", 0, ROWS, "FMT")
    requests = [("ECHO", "1"), (*fetch, "FP32"), ("ECHO", "2"), (*fetch, "BF16"), ("ECHO", "3")]
    wire.write(b"".join(wire.request(*words) for words in requests))
    wire.expect(bulk(b"1"))
    wire.expect_bulk(bytes(ROWS * DIM), 4)
    wire.expect(bulk(b"2"))
    wire.expect_bulk(bytes(ROWS * DIM), 2)
    wire.expect(bulk(b"3"))


def test_a_long_pipeline_of_replies_that_do_not_fit_the_socket(wire: Any) -> None:
    """120 MB are owed before the first byte is read."""
    value = b"v" * 40_000
    wire.send("SET", "long-pipeline", value)
    wire.expect(b"+OK\r\n")
    wire.write(wire.request("GET", "long-pipeline") * 3000)
    for _ in range(3000):
        wire.expect(bulk(value))


def test_requests_that_arrive_byte_by_byte(wire: Any) -> None:
    requests = b"".join(
        [
            wire.request("SET", "drip", b"\r\n$3\r\n"),
            b"GET drip\r\n",
            wire.request("V.CREATE", "drip", 2, "VQUANT", "fp32"),
            wire.request("V.STOREBATCH", "drip", 0, 0, 1, b"\r\n\r\n\r\n\r\n"),
            wire.request("V.FETCH", "drip", 0, 0),
            b"*0\r\n\r\n",
            b"ECHO 'a b'\r\n",
        ]
    )
    for at in range(len(requests)):
        wire.write(requests[at : at + 1])
    held, rows = bulk(b"\r\n$3\r\n"), bulk(b"\r\n\r\n\r\n\r\n")
    wire.expect(b"+OK\r\n" + held + b"+OK\r\n+OK\r\n" + rows + bulk(b"a b"))


def test_errors_keep_their_place(wire: Any) -> None:
    wire.write(wire.request("ECHO", "1") + b"NOPE\r\n" + b"GET\r\n" + wire.request("ECHO", "2"))
    wire.expect(bulk(b"1") + b"-ERR unknown command 'NOPE', with args beginning with: \r\n")
    wire.expect(b"-ERR wrong number of arguments for 'get' command\r\n" + bulk(b"2"))
