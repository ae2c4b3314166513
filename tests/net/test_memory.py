"""Invariant: a prefix goes in and out of the server without a second copy of it; a conversion holds
what the client sent besides what it stores, at most KEPT bytes stay for the next bulks, and an
upload that breaks off leaves nothing behind.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion_server.net.memory import KEPT

MB = 1 << 20
LAYERS, ROWS, DIM = 16, 8192, 1024  # 16 MB a side and layer in fp16, 512 MB in all
SLACK = 48 * MB
ROW = np.arange(DIM).astype(np.float16)


@pytest.fixture
def peak() -> Callable[[int], int]:
    """peak(pid): the most memory the process has ever had."""
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory of another process is read from /proc, which only Linux has")

    def peak(pid: int) -> int:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    return peak


def store(wire: Any, blob: bytes, blobs: int, *options: Any) -> None:
    """One KV.PREFIX.STORE in which the same blob is every layer of both sides."""
    head = wire.request("KV.PREFIX.STORE", "big", 0, ROWS, *options, "DATA")
    words = 5 + len(options)
    assert head.startswith(b"*%d\r\n" % words)
    wire.write(head.replace(b"*%d" % words, b"*%d" % (words + blobs), 1))
    for _ in range(blobs):
        wire.write(b"$%d\r\n" % len(blob))
        wire.write(blob)
        wire.write(b"\r\n")
    wire.expect(b"+OK\r\n")


def read(wire: Any, layers: int, pattern: bytes) -> None:
    """A KV.PREFIX.FETCH, compared piece by piece."""
    wire.send("KV.PREFIX.FETCH", "big", "FMT", "NATIVE")
    wire.expect(b"*%d\r\n*14\r\n" % (1 + 2 * layers))
    head = b""
    while head.count(b"dim=") < 2 * layers:
        head += wire.line()
    for _ in range(2 * layers):
        wire.expect_bulk(pattern * 512, ROWS // 512)


def test_512_mb_in_and_out_without_a_copy(start_pion: Any, dial: Any, peak: Any) -> None:
    server = start_pion()
    wire, before = dial(server.port), peak(server.pid)
    declared = ("LAYERS", LAYERS, "TOKENS", ROWS)
    assert wire.ask("KV.PREFIX.REGISTER", "big", DIM, "fp16", *declared) == b"+OK\r\n"
    store(wire, ROW.tobytes() * ROWS, 2 * LAYERS, "FMT", "NATIVE")
    read(wire, LAYERS, ROW.tobytes())
    assert peak(server.pid) - before < 512 * MB + SLACK


def test_512_mb_of_fp32_are_stored_as_256(start_pion: Any, dial: Any, peak: Any) -> None:
    server = start_pion()
    wire, before, layers = dial(server.port), peak(server.pid), LAYERS // 2
    declared = ("LAYERS", layers, "TOKENS", ROWS)
    assert wire.ask("KV.PREFIX.REGISTER", "big", DIM, "fp16", *declared) == b"+OK\r\n"
    store(wire, ROW.astype(np.float32).tobytes() * ROWS, 2 * layers)
    assert peak(server.pid) - before < 2 * 256 * MB + KEPT + SLACK
    read(wire, layers, ROW.tobytes())
    assert peak(server.pid) - before < 2 * 256 * MB + KEPT + SLACK


def test_one_blob_of_320_mb(start_pion: Any, dial: Any, peak: Any) -> None:
    """Its memory grows as its bytes come, and growing copies nothing."""
    server = start_pion()
    wire, before = dial(server.port), peak(server.pid)
    piece, count = ROW.tobytes() * ROWS, 20
    wire.send("V.CREATE", "blob", DIM)
    head = wire.request("V.STOREBATCH", "blob", 0, 0, count * ROWS, b"", "FMT", "NATIVE")
    start, end = head.split(b"$0\r\n")
    wire.write(start + b"$%d\r\n" % (count * len(piece)))
    for _ in range(count):
        wire.write(piece)
    wire.write(end)
    wire.expect(b"+OK\r\n" * 2)
    wire.send("V.FETCH", "blob", 0, "RANGE", 0, count * ROWS, "FMT", "NATIVE")
    wire.expect_bulk(ROW.tobytes() * 1024, count * ROWS // 1024)
    assert peak(server.pid) - before < 320 * MB + SLACK


@pytest.mark.parametrize("end", ["close", "reset"])
def test_an_upload_that_breaks_off_leaves_nothing(
    pion_server: Any, dial: Any, resident: Any, eventually: Any, end: str
) -> None:
    other, wire = dial(pion_server.port), dial(pion_server.port)
    other.ask("KV.PREFIX.DROP", "cut")
    other.ask("KV.PREFIX.REGISTER", "cut", DIM, "fp16", "LAYERS", 1, "TOKENS", ROWS)
    before, blob = resident(pion_server.pid), bytes(200 * MB)
    wire.write(b"*7\r\n" + wire.request("KV.PREFIX.STORE", "cut", 0, ROWS, "DATA")[4:])
    wire.write(b"$%d\r\n%b\r\n" % (16 * MB, blob[: 16 * MB]))
    wire.write(b"$%d\r\n" % (300 * MB))
    wire.write(blob)
    eventually(lambda: resident(pion_server.pid) > before + 150 * MB)
    getattr(wire, end)()
    eventually(lambda: resident(pion_server.pid) < before + SLACK)
    assert other.ask("KV.PREFIX.LOOKUP", "cut") == b"+MISS\r\n"
    assert other.ask("V.FETCH", "cut_pk", 0, 0) == b"-ERR layer 0: row 0 is not stored\r\n"


def test_a_length_alone_takes_no_memory(pion_server: Any, dial: Any, resident: Any) -> None:
    wires, before = [dial(pion_server.port) for _ in range(20)], resident(pion_server.pid)
    for wire in wires:
        wire.write(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % (4 << 30))
    assert dial(pion_server.port).ask("PING") == b"+PONG\r\n"
    assert resident(pion_server.pid) - before < SLACK


def test_whoever_leaves_while_rows_are_converted_leaves_all_or_nothing(
    pion_server: Any, dial: Any, eventually: Any
) -> None:
    other = dial(pion_server.port)
    blob = np.full(ROWS * DIM, 3, np.float32).tobytes()
    for attempt in range(4):
        ns = f"leaver-{attempt}"
        wire = dial(pion_server.port)
        wire.ask("KV.PREFIX.REGISTER", ns, DIM, "fp16", "LAYERS", 1, "TOKENS", ROWS)
        wire.send("KV.PREFIX.STORE", ns, 0, ROWS, "DATA", blob, blob)
        wire.reset()
        # It was received whole, so it is carried out, unless the reset overtook it.
        there = other.ask("KV.PREFIX.MATCH", 1, ns)
        assert there in (b":0\r\n", b":1\r\n")
        for side in ("_pk", "_pv"):
            reply = other.ask("V.FETCH", ns + side, 0, 0)
            if reply.startswith(b"$"):
                other.take(4 * DIM + 2)
                eventually(lambda ns=ns: other.ask("KV.PREFIX.MATCH", 1, ns) == b":1\r\n")
        assert other.ask("KV.PREFIX.DROP", ns) == b":1\r\n"


def test_rows_never_land_in_a_namespace_that_took_the_place_of_theirs(
    pion_server: Any, dial: Any, eventually: Any
) -> None:
    """Dropped and registered anew while they were converted, in a codec of the same width."""
    writer, other = dial(pion_server.port), dial(pion_server.port)
    blob = np.ones(ROWS * DIM, np.float32).tobytes()
    for attempt in range(4):
        writer.ask("KV.PREFIX.REGISTER", "place", DIM, "fp16", "FINGERPRINT", "aa")
        writer.send("CLIENT", "SETNAME", f"writer-{attempt}")
        writer.expect(b"+OK\r\n")
        writer.send("KV.PREFIX.STORE", "place", 0, ROWS, "DATA", blob, blob)
        eventually(lambda name=f"writer-{attempt}": storing(other, name.encode()))
        other.write(
            other.request("KV.PREFIX.DROP", "place")
            + other.request("KV.PREFIX.REGISTER", "place", DIM, "bf16", "FINGERPRINT", "bb")
        )
        other.expect(b":1\r\n+OK\r\n")
        assert writer.line().startswith((b"+OK\r\n", b"-ERR the session was replaced"))
        assert other.ask("V.FETCH", "place_pk", 0, 0) == b"-ERR layer 0: row 0 is not stored\r\n"
        assert other.ask("KV.PREFIX.DROP", "place") == b":1\r\n"


def storing(wire: Any, name: bytes) -> bool:
    """Whether the named client's last command is KV.PREFIX.STORE, as CLIENT LIST tells."""
    wire.send("CLIENT", "LIST")
    text = wire.take(int(wire.line()[1:]) + 2)
    line = next(line for line in text.splitlines() if b"name=" + name + b" " in line)
    return b" cmd=kv.prefix.store " in line
