"""Invariant: every call goes out in the form the server documents, and a reply that does not fit
it is an error, never a wrong value.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from pion_server.client import Call, Client, PionError, ProtocolError, calls
from pion_server.client.methods import Commands, method
from pion_server.wire.encode import encode_request
from pion_server.wire.limits import Limits
from pion_server.wire.requests import RequestDecoder
from pion_server.wire.values import OK, Reply, Status

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)
HASHES = np.array([1, 2**64 - 1], np.uint64)
FINGER = "ab" * 8
TWO = (("fp16", 4), ("fp32", 8))


def sent(call: Call[Any]) -> list[bytes]:
    """The arguments as a server reads them."""
    decoder = RequestDecoder(Limits())
    for part in encode_request(call.args):
        at = 0
        while at < len(part):
            room = decoder.get_buffer()
            count = min(len(room), len(part) - at)
            room[:count] = part[at : at + count]
            decoder.buffer_updated(count)
            at += count
            request = decoder.next_request()
    assert request is not None
    return [bytes(argument) for argument in request]


FORMS: list[tuple[Call[Any], str]] = [
    (calls.ping(), "PING"),
    (calls.echo("h\u00e9"), "ECHO h\u00e9"),
    (calls.hello(), "HELLO 3"),
    (calls.hello("ann", "pw"), "HELLO 3 AUTH ann pw"),
    (calls.auth("pw"), "AUTH default pw"),
    (calls.select(3), "SELECT 3"),
    (calls.set_("k", "v"), "SET k v"),
    (calls.set_(b"k", 7, ex=5, nx=True), "SET k 7 EX 5 NX"),
    (calls.set_("k", b"v", px=5, xx=True), "SET k v PX 5 XX"),
    (calls.set_get("k", "v", ex=1), "SET k v EX 1 GET"),
    (calls.get("k"), "GET k"),
    (calls.mget("a", "b"), "MGET a b"),
    (calls.mset({"a": 1, "b": "x"}), "MSET a 1 b x"),
    (calls.exists("a", "b"), "EXISTS a b"),
    (calls.delete("a"), "DEL a"),
    (calls.strlen("a"), "STRLEN a"),
    (calls.expire("a", 9), "EXPIRE a 9"),
    (calls.ttl("a"), "TTL a"),
    (calls.pttl("a"), "PTTL a"),
    (calls.persist("a"), "PERSIST a"),
    (calls.dbsize(), "DBSIZE"),
    (calls.scan(4, match="a*", count=10), "SCAN 4 MATCH a* COUNT 10"),
    (calls.type_("a"), "TYPE a"),
    (calls.flushdb(), "FLUSHDB"),
    (calls.info("server", "memory"), "INFO server memory"),
    (calls.v_create("s", 4), "V.CREATE s 4"),
    (calls.v_create("s", np.int64(4), "bf16"), "V.CREATE s 4 VQUANT bf16"),
    (calls.v_create_schema("s", TWO), "V.CREATE s 0 SCHEMA 2 fmt=fp16,dim=4 fmt=fp32,dim=8"),
    (calls.v_storebatch("s", 1, 2, 3, b"xyz"), "V.STOREBATCH s 1 2 3 xyz"),
    (calls.v_storebatch("s", 1, 2, 3, b"xyz", fmt="BF16"), "V.STOREBATCH s 1 2 3 xyz FMT BF16"),
    (calls.v_fetch_ids("s", 1, [5, 2]), "V.FETCH s 1 5 2"),
    (calls.v_fetch("s", 1, 0, 9), "V.FETCH s 1 RANGE 0 9"),
    (calls.v_fetch("s", 1, 0, 9, fmt="NATIVE"), "V.FETCH s 1 RANGE 0 9 FMT NATIVE"),
    (calls.v_fetch_batch("s", 0, 9, 2, fmt="FP16"), "V.FETCH s BATCH 0 9 2 FMT FP16"),
    (calls.prefix_register("n", 4, "fp16"), "KV.PREFIX.REGISTER n 4 fp16"),
    (
        calls.prefix_register(
            "n", 4, "fp16", layers=2, tokens=9, prefill_ms=1.5, fingerprint=FINGER
        ),
        f"KV.PREFIX.REGISTER n 4 fp16 LAYERS 2 TOKENS 9 PREFILL_MS 1.5 FINGERPRINT {FINGER}",
    ),
    (
        calls.prefix_register_schema("n", TWO, TWO[::-1], tokens=9),
        "KV.PREFIX.REGISTER.SCHEMA n K 2 fmt=fp16,dim=4 fmt=fp32,dim=8"
        " V 2 fmt=fp32,dim=8 fmt=fp16,dim=4 TOKENS 9",
    ),
    (
        calls.prefix_register_schema("n", TWO, TWO, parent=b"m"),
        "KV.PREFIX.REGISTER.SCHEMA n K 2 fmt=fp16,dim=4 fmt=fp32,dim=8"
        " V 2 fmt=fp16,dim=4 fmt=fp32,dim=8 PARENT m",
    ),
    (calls.prefix_register("n", 4, "fp16", parent="m"), "KV.PREFIX.REGISTER n 4 fp16 PARENT m"),
    (calls.prefix_lookup("n"), "KV.PREFIX.LOOKUP n"),
    (
        calls.prefix_lookup("n", tokens=9, prefill_ms=np.float64(2), fingerprint=FINGER),
        f"KV.PREFIX.LOOKUP n TOKENS 9 PREFILL_MS 2.0 FINGERPRINT {FINGER}",
    ),
    (calls.prefix_match(["n", b"m"]), "KV.PREFIX.MATCH 2 n m"),
    (calls.prefix_match(["n"], fingerprint=FINGER), f"KV.PREFIX.MATCH 1 n FINGERPRINT {FINGER}"),
    (calls.prefix_blocks("n"), "KV.PREFIX.BLOCKS n"),
    (
        calls.prefix_store("n", 0, 3, [(b"k", b"v"), (b"K", b"V")], first_layer=4, fmt="FP16"),
        "KV.PREFIX.STORE n 0 3 LAYERS 4 6 FMT FP16 DATA k v K V",
    ),
    (calls.prefix_fetch("n"), "KV.PREFIX.FETCH n"),
    (
        calls.prefix_fetch("n", layers=(1, 2), rows=(0, 9), fmt="NATIVE", fingerprint=FINGER),
        f"KV.PREFIX.FETCH n LAYERS 1 2 RANGE 0 9 FMT NATIVE FINGERPRINT {FINGER}",
    ),
    (calls.prefix_drop("n", "m"), "KV.PREFIX.DROP n m"),
    (calls.prefix_info(), "KV.PREFIX.INFO"),
    (calls.ssm_store("s", 3, b"xyz"), "SSM.PREFIX.STORE s 3 xyz"),
    (calls.ssm_fetch("s", 3), "SSM.PREFIX.FETCH s 3"),
    (calls.ssm_drop("s", 0), "SSM.PREFIX.DROP s 0"),
    (calls.ssm_drop("s"), "SSM.PREFIX.DROP s"),
    (calls.pion_stats(), "PION.STATS"),
    (calls.pion_stats_reset(), "PION.STATS RESET"),
]


@pytest.mark.parametrize(("call", "form"), FORMS, ids=[form for _, form in FORMS])
def test_the_wire_form(call: Call[Any], form: str) -> None:
    assert sent(call) == [word.encode() for word in form.split(" ")]


def test_binary_arguments() -> None:
    table = HASHES.tobytes()
    registered = sent(calls.prefix_register("n", 4, "fp16", blocks=(64, HASHES)))
    assert registered[4:] == [b"BLOCKS", b"64", b"2", table]
    asked = sent(calls.prefix_membership("n", HASHES[::-1]))
    assert asked[1:] == [b"n", b"2", table[8:] + table[:8]]
    assert sent(calls.v_storebatch("s", 0, 0, 2, ROWS))[5] == ROWS.tobytes()
    assert sent(calls.set_(b"\0\r\n\xff", ROWS))[1:] == [b"\0\r\n\xff", ROWS.tobytes()]


HEADS = np.ones((2, 3, 4), np.float32)  # of queries: two heads, three queries, four values
ONE = HEADS[:, :1].copy()
SUFFIX = np.zeros((1, 5, 4), np.float32)
Q, Q1, S = (each.tobytes() for each in (HEADS, ONE, SUFFIX))
ATTENTION: list[tuple[Call[Any], list[Any]]] = [
    (calls.attend_store("s", 1, SUFFIX, SUFFIX), ["STORE s 1 1 5 4", S, S]),
    (calls.attend_lookup("s", 1), ["LOOKUP s 1"]),
    (calls.attend_query("s", 1, HEADS), ["QUERY s 1 2 4 0", Q]),
    (calls.attend_query("s", 1, HEADS, top_k=7, window=9), ["QUERY s 1 2 4 7", Q, "9"]),
    (
        calls.attend_query_fused("s", 1, HEADS, SUFFIX, SUFFIX, [0, 0], window=9),
        ["QUERY_FUSED s 1 2 4 5 1", Q, S, S, b"\0\0", "9"],
    ),
    (
        calls.attend_query_sparse("s", 1, ONE, [[7], [1, 2]]),
        [
            "QUERY_SPARSE s 1 2 4 2",
            Q1,
            np.array([7, 0, 1, 2], "<u4").tobytes(),
            np.array([1, 2], "<u4").tobytes(),
        ],
    ),
    (
        calls.attend_query_sparse("s", 1, ONE, [[], []], window=9),
        ["QUERY_SPARSE s 1 2 4 0", Q1, b"", bytes(8), "9"],
    ),
    (
        calls.attend_query_sparse_auto("s", 1, ONE, [0, 2], 3, block=64, top_blocks=8),
        ["QUERY_SPARSE_AUTO s 1 2 4 64 8 3", Q1, b"\0\2"],
    ),
    (
        calls.attend_query_sparse_auto_fused(
            "s", 1, ONE, SUFFIX, SUFFIX, np.array([0, 0]), block=64, top_blocks=8, window=9
        ),
        ["QUERY_SPARSE_AUTO_FUSED s 1 2 4 64 8 1 5", Q1, S, S, b"\0\0", "9"],
    ),
]


@pytest.mark.parametrize(("call", "form"), ATTENTION, ids=lambda each: str(each)[:60])
def test_the_wire_form_of_attention(call: Call[Any], form: list[Any]) -> None:
    words, *blobs = form
    name, *rest = words.encode().split(b" ")
    blobs = [blob.encode() if isinstance(blob, str) else blob for blob in blobs]
    assert sent(call) == [b"ATTEND.PREFIX." + name, *rest, *blobs]


def test_attention_of_what_is_sent_along() -> None:
    keys = np.zeros((2, 5, 4), np.float32)
    form = sent(calls.attend_querybatch(HEADS, keys, keys, top_k=3))
    assert form == [b"ATTEND.QUERYBATCH", *b"2 5 4 3".split(), Q, *[keys.tobytes()] * 2]


def test_other_arrays_are_sent_as_fp32() -> None:
    half, turned = HEADS.astype(np.float16), np.asfortranarray(HEADS)
    for queries in (half, turned):
        assert sent(calls.attend_query("s", 1, queries))[-1] == Q


def test_attention_that_was_answered() -> None:
    out = np.arange(HEADS.size, dtype="<f4").reshape(HEADS.shape)
    lse = np.arange(6, dtype="<f4").reshape(2, 3)
    several = calls.attend_query("s", 1, HEADS).result(out.tobytes() + lse.tobytes())
    assert several.lse is not None
    assert (several.out == out).all()
    assert (several.lse == lse).all()
    one = calls.attend_query("s", 1, ONE).result(out.tobytes()[:32])
    assert one.out.shape == (2, 1, 4)
    assert one.lse is None
    with pytest.raises(ProtocolError):
        calls.attend_query("s", 1, HEADS).result(out.tobytes())


@pytest.mark.parametrize(
    ("reply", "warmed"), [("16", (16, 0)), ("3 skipped_dim=2", (3, 2)), ("0", (0, 0))]
)
def test_layers_that_got_warm(reply: str, warmed: tuple[int, int]) -> None:
    assert calls.prefix_warm("n", 8, 64).result(Status(reply)) == warmed
    assert sent(calls.prefix_warm("n", 8, 64)) == b"KV.PREFIX.WARM n 8 64".split()
    assert sent(calls.prefix_warm("n", 8, 64, "x"))[-1] == b"x"


def test_arrays_are_held_by_reference() -> None:
    for call in (
        calls.set_("k", ROWS),
        calls.prefix_store("n", 0, 2, [(ROWS, ROWS)]),
        calls.attend_store("s", 0, ROWS[None], ROWS[None]),
    ):
        view = call.args[-1]
        assert isinstance(view, memoryview)
        assert np.shares_memory(np.frombuffer(view, np.uint8), ROWS)


def test_only_calls_that_may_run_twice_are_repeated() -> None:
    unsafe = {call.name for call, _ in FORMS if not call.retry}
    assert unsafe == {"SET", "DEL", "PERSIST", "KV.PREFIX.DROP"}
    assert calls.set_("k", "v", ex=3).retry
    assert not calls.set_("k", "v", nx=True).retry
    assert not calls.set_("k", "v", xx=True).retry
    assert not calls.set_get("k", "v").retry


def head(**changes: Reply) -> dict[str, Reply]:
    words: Reply = [b"fmt=fp16,dim=4"]
    fields: dict[str, Reply] = {"tokens": 9, "start": 1, "end": 3, "first_layer": 2, "layers": 1}
    return {**fields, "keys": words, "values": words, **changes}


VALUES: list[tuple[Call[Any], Reply, Any]] = [
    (calls.ping(), Status("PONG"), "PONG"),
    (calls.set_("k", "v"), OK, True),
    (calls.set_("k", "v", nx=True), None, False),
    (calls.set_get("k", "v"), None, None),
    (calls.set_get("k", "v"), b"old", b"old"),
    (calls.get("k"), None, None),
    (calls.mget("a", "b"), [b"x", None], [b"x", None]),
    (calls.persist("k"), 1, True),
    (calls.scan(), [b"17", [b"a", b"b"]], (17, [b"a", b"b"])),
    (calls.info(), b"# Server\r\na:1\r\n\r\nb:x:y\r\n", {"a": "1", "b": "x:y"}),
    (calls.prefix_lookup("n"), Status("HIT"), True),
    (calls.prefix_lookup("n"), Status("MISS"), False),
    (calls.prefix_blocks("n"), Status("UNKNOWN"), None),
    (calls.prefix_membership("n", HASHES), Status("UNKNOWN"), None),
    (calls.prefix_fetch("n"), None, None),
    (calls.ssm_store("s", 0, b"x"), OK, None),
    (calls.ssm_fetch("s", 0), b"x", b"x"),
    (calls.ssm_fetch("s", 0), None, None),
    (calls.prefix_info(), b"vstore_bytes:12\r\n", {"vstore_bytes": 12}),
]


@pytest.mark.parametrize(("call", "reply", "value"), VALUES)
def test_the_value_of_a_reply(call: Call[Any], reply: Reply, value: Any) -> None:
    assert call.result(reply) == value


def test_block_tables_and_bitmaps() -> None:
    table = calls.prefix_blocks("n").result(struct.pack("<II2Q", 64, 2, 1, 2**64 - 1))
    assert table is not None
    assert table.block_size == 64
    assert table.hashes.tolist() == HASHES.tolist()
    probes = np.arange(10, dtype=np.uint64)
    found = calls.prefix_membership("n", probes).result(bytes([0b1000_0001, 0b10]))
    assert found is not None
    assert found.dtype == np.bool_
    assert np.flatnonzero(found).tolist() == [0, 7, 9]


def test_prefix_rows() -> None:
    rows = calls.prefix_fetch("n").result([head(), b"key-rows", memoryview(b"value-rows")])
    assert rows is not None
    assert (rows.tokens, rows.start, rows.end, rows.first_layer) == (9, 1, 3, 2)
    assert rows.keys == rows.values == (("fp16", 4),)
    assert [(bytes(k), bytes(v)) for k, v in rows.rows] == [(b"key-rows", b"value-rows")]


MISFITS: list[tuple[Call[Any], Reply]] = [
    (calls.ping(), 5),
    (calls.set_("k", "v"), b"OK"),
    (calls.v_create("s", 4), Status("QUEUED")),
    (calls.get("k"), [b"v"]),
    (calls.mget("a"), b"v"),
    (calls.mget("a"), [4]),
    (calls.dbsize(), b"4"),
    (calls.scan(), [b"0"]),
    (calls.scan(), [b"x", []]),
    (calls.info(), b"\xff"),
    (calls.hello(), [b"server", b"x"]),
    (calls.v_fetch("s", 0, 0, 1), None),
    (calls.v_fetch_batch("s", 0, 1, 1), [None]),
    (calls.prefix_lookup("n"), Status("MAYBE")),
    (calls.prefix_blocks("n"), b"short"),
    (calls.prefix_blocks("n"), struct.pack("<IIQ", 64, 2, 1)),
    (calls.prefix_membership("n", HASHES), Status("OK")),
    (calls.prefix_membership("n", HASHES), b""),
    (calls.prefix_fetch("n"), []),
    (calls.prefix_fetch("n"), [head()]),
    (calls.prefix_fetch("n"), [head(), b"k"]),
    (calls.prefix_fetch("n"), [head(), b"k", b"v", b"k", b"v"]),
    (calls.prefix_fetch("n"), [head(keys=[b"fp16"]), b"k", b"v"]),
    (calls.prefix_fetch("n"), [head(tokens=None), b"k", b"v"]),
    (calls.prefix_fetch("n"), [{}, b"k", b"v"]),
    (calls.pion_stats(), OK),
]


@pytest.mark.parametrize(("call", "reply"), MISFITS)
def test_a_reply_that_does_not_fit_is_a_protocol_error(call: Call[Any], reply: Reply) -> None:
    with pytest.raises(ProtocolError):
        call.result(reply)


def test_an_error_reply_is_raised() -> None:
    with pytest.raises(PionError, match="no room"):
        calls.ping().result(PionError("no room"))


def test_every_builder_is_a_method_except_those_of_a_connection() -> None:
    builders = {
        name.rstrip("_")
        for name in calls.__all__
        if callable(getattr(calls, name)) and name[0].islower()
    }
    methods = {name for name, value in vars(Commands).items() if isinstance(value, method)}
    assert builders - methods == {"auth", "hello", "select"}
    assert methods <= builders


def test_docstrings_and_parameters_are_carried_over() -> None:
    client = Client()
    assert client.prefix_fetch.__doc__ == calls.prefix_fetch.__doc__
    assert Client.prefix_fetch is calls.prefix_fetch


def test_arguments_are_in_no_repr() -> None:
    assert repr(calls.hello("ann", "s3cr3t")) == "<Call HELLO, 4 arguments>"
    assert "s3cr3t" not in repr([calls.auth("s3cr3t"), calls.set_("k", "s3cr3t")])
