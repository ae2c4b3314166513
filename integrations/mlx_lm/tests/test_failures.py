"""Whatever Pion does wrong is a miss: counted, never raised, never a wrong or a missing answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache
from pion_vllm_mlx import PionPromptCache, PrefixStore, remote
from pion_vllm_mlx.background import Job
from pion_vllm_mlx.caches import make_caches
from pion_vllm_mlx.fingerprint import model_fingerprint, prefix_fingerprint
from pion_vllm_mlx.layout import Layout, read_layout
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.processes import pion_server
from pion_vllm_mlx.states import freeze, pack

from pion_server.client import Client

Connect = Callable[..., PionPromptCache]
Tiny = Callable[..., nn.Module]

IDS = list(range(40))
HELLO = b"%1\r\n$5\r\nproto\r\n:3\r\n"


def assert_prefilled(model: Any, caches: Sequence[KVCache], ids: Sequence[int] = IDS) -> None:
    for cache, wanted in zip(caches, prefill(model, ids), strict=True):
        assert cache.offset == len(ids)
        assert mx.array_equal(cache.keys[:, :, : len(ids)], wanted.keys[:, :, : len(ids)])
        assert mx.array_equal(cache.values[:, :, : len(ids)], wanted.values[:, :, : len(ids)])


def assert_miss(pion: PionPromptCache, model: Any, namespace: str, kind: str) -> None:
    """One request is a miss of this kind, stores nothing, and is answered rightly."""
    before = pion.stats()
    assert_prefilled(model, pion.get_or_prefill(IDS, namespace=namespace))
    after = pion.stats()
    assert (after["hits"], after["misses"]) == (before["hits"], before["misses"] + 1)
    assert after["errors"][kind] == before["errors"].get(kind, 0) + 1
    assert after["stores"] == before["stores"]
    assert after["bytes_fetched"] == before["bytes_fetched"]


def native_layout(model: Any) -> Layout:
    return read_layout(model, make_caches(model), "native", blocks=False)


def fingerprint_of(model: Any) -> str:
    return prefix_fingerprint(model_fingerprint(model), native_layout(model).words(), IDS)


class BadServer:
    """Accepts connections and answers each piece that arrives with the next of `replies`.

    After the last one it hangs, or closes the connection.
    """

    def __init__(self, replies: Sequence[bytes], then_close: bool) -> None:
        self._replies = replies
        self._then_close = then_close
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for sock in [self._listener, *self._open]:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        for reply in self._replies:
            if not sock.recv(1 << 16):
                return
            sock.sendall(reply)
        if self._then_close:
            sock.close()


@contextmanager
def bad_server(*replies: bytes, then_close: bool = False) -> Iterator[BadServer]:
    server = BadServer(replies, then_close)
    try:
        yield server
    finally:
        server.close()


def waits(gate: threading.Event) -> None:
    gate.wait()


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_no_server(tiny: Tiny, connect: Connect, namespace: str) -> None:
    model = tiny("llama")
    pion = connect(model, port=closed_port())
    assert_miss(pion, model, namespace, "ConnectionFailed")
    assert_miss(pion, model, namespace, "Away")  # not asked again at once
    assert pion.lookup(namespace) is False
    assert pion.flush()


def test_no_such_host(tiny: Tiny, connect: Connect, namespace: str) -> None:
    model = tiny("llama")
    pion = connect(model, host="pion.invalid")
    assert_miss(pion, model, namespace, "ConnectionFailed")


def test_a_hanging_server_costs_one_timeout(tiny: Tiny, connect: Connect, namespace: str) -> None:
    model = tiny("llama")
    with bad_server() as server:
        pion = connect(model, port=server.port, timeout=0.3)
        assert_miss(pion, model, namespace, "DeadlineExceeded")
        for _ in range(3):
            assert_miss(pion, model, namespace, "Away")
        assert server.connections == 1


def test_a_server_that_hangs_in_the_middle(tiny: Tiny, connect: Connect, namespace: str) -> None:
    model = tiny("llama")
    with bad_server(HELLO, b"+HIT\r\n*5\r\n%7\r\n$6\r\ntok") as server:
        pion = connect(model, port=server.port, timeout=0.3)
        assert_miss(pion, model, namespace, "DeadlineExceeded")


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "ProtocolError"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", "DeadlineExceeded"),  # TLS: no line ever ends
        (b"-ERR unknown command 'HELLO'\r\n", "PionError"),
    ],
)
def test_another_kind_of_server(
    tiny: Tiny, connect: Connect, namespace: str, reply: bytes, kind: str
) -> None:
    model = tiny("llama")
    with bad_server(reply) as server:
        assert_miss(connect(model, port=server.port, timeout=0.5), model, namespace, kind)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"+HIT\r\n+OK\r\n", "ProtocolError"),
        (b":1\r\n*1\r\n%0\r\n", "ProtocolError"),
        (b"+HIT\r\n*1\r\n%0\r\n", "ProtocolError"),
        (b"+HIT\r\n*0\r\n", "ProtocolError"),
        (b"+HIT\r\n-ERR rows are missing\r\n", "PionError"),
        (b"+HIT\r\n$3\r\nabcdef\r\n", "ProtocolError"),
    ],
)
def test_replies_that_make_no_sense(
    tiny: Tiny, connect: Connect, namespace: str, reply: bytes, kind: str
) -> None:
    model = tiny("llama")
    with bad_server(HELLO, reply) as server:
        assert_miss(connect(model, port=server.port, timeout=2), model, namespace, kind)


def test_a_connection_that_breaks_inside_the_rows(
    tiny: Tiny, connect: Connect, namespace: str
) -> None:
    model = tiny("llama")
    nbytes = len(IDS) * 32 * 2
    head = b"*5\r\n%7\r\n" + b"".join(
        b"$%d\r\n%s\r\n%s\r\n" % (len(name), name, value)
        for name, value in [
            (b"tokens", b":40"), (b"start", b":0"), (b"end", b":40"), (b"first_layer", b":0"),
            (b"layers", b":2"), (b"keys", b"*0"), (b"values", b"*0"),
        ]
    )  # fmt: skip
    part = b"$%d\r\n%s\r\n$%d\r\n%s" % (nbytes, bytes(nbytes), nbytes, bytes(nbytes // 2))
    with bad_server(HELLO, b"+HIT\r\n" + head + part, then_close=True) as server:
        assert_miss(connect(model, port=server.port), model, namespace, "ConnectionFailed")


def test_another_model(tiny: Tiny, connect: Connect, namespace: str) -> None:
    first, second = tiny("llama"), tiny("llama", rope_theta=2e4)
    pion = connect(first)
    pion.get_or_prefill(IDS, namespace=namespace)
    assert pion.flush()
    assert_miss(connect(second), second, namespace, "Mismatch")
    again = connect(first)  # the first model still has its rows
    again.get_or_prefill(IDS, namespace=namespace)
    assert again.stats()["hits"] == 1


def test_two_models_that_race_for_a_namespace(tiny: Tiny, connect: Connect, namespace: str) -> None:
    """Both look up before either stores: the first to store wins, whole, and the other is told."""
    first, second = tiny("llama"), tiny("llama", rope_theta=2e4)
    winner, loser = connect(first, vquant="native"), connect(second, vquant="native")
    gate = threading.Event()
    assert loser._background.submit(Job("gate", 0, lambda: waits(gate)))
    loser.get_or_prefill(IDS, namespace=namespace)
    winner.get_or_prefill(IDS, namespace=namespace)
    assert winner.flush()
    gate.set()
    assert loser.flush()
    assert (loser.stats()["stores"], loser.stats()["errors"]) == (0, {"Mismatch": 1})
    assert_prefilled(first, winner.get_or_prefill(IDS, namespace=namespace))
    assert winner.stats()["hits"] == 1


@pytest.mark.parametrize("ids", [IDS[:-1], [*IDS, 40], [*IDS[:-1], 50], IDS[::-1]])
def test_other_tokens_under_the_same_namespace(
    tiny: Tiny, connect: Connect, namespace: str, ids: list[int]
) -> None:
    model = tiny("llama")
    with connect(model) as pion:
        pion.get_or_prefill(ids, namespace=namespace)
        assert pion.flush()
    assert_miss(connect(model), model, namespace, "Mismatch")


def test_another_format_under_the_same_namespace(
    tiny: Tiny, connect: Connect, namespace: str
) -> None:
    model = tiny("llama")
    with connect(model, vquant="fp16") as pion:
        pion.get_or_prefill(IDS, namespace=namespace)
        assert pion.flush()
    assert_miss(connect(model, vquant="native"), model, namespace, "Mismatch")


@pytest.mark.parametrize(
    ("layers", "dim", "tokens", "codec"),
    [
        (4, 16, 40, "fp32"),  # narrower rows
        (4, 64, 20, "fp32"),  # wider and fewer, as many bytes
        (1, 32, 40, "fp32"),
        (5, 32, 40, "fp32"),
        (4, 32, 39, "fp32"),
        (4, 32, 41, "fp32"),
        (4, 32, 40, "fp16"),
        (4, 64, 40, "fp16"),  # as many bytes
    ],
)
def test_rows_of_another_shape_under_our_fingerprint(
    tiny: Tiny, connect: Connect, port: int, namespace: str,
    layers: int, dim: int, tokens: int, codec: str,
) -> None:  # fmt: skip
    """A client that lies about what it stores: the K/V must be refused, not used."""
    model = tiny("llama")
    fingerprint = fingerprint_of(model)
    blob = np.zeros((tokens, dim), np.float32)
    schema = [(codec, dim)] * layers
    with Client(f"pion://127.0.0.1:{port}") as client:
        client.prefix_register_schema(
            namespace, schema, schema, tokens=tokens, fingerprint=fingerprint
        )
        client.prefix_store(namespace, 0, tokens, [(blob, blob)] * layers)
        assert client.prefix_lookup(namespace, fingerprint=fingerprint)
    assert_miss(connect(model, vquant="native"), model, namespace, "Mismatch")


def test_a_prefix_that_was_stored_without_a_fingerprint(
    tiny: Tiny, connect: Connect, port: int, namespace: str
) -> None:
    model = tiny("llama")
    with Client(f"pion://127.0.0.1:{port}") as client:
        client.prefix_register(namespace, 32, "fp32", layers=4, tokens=40)
        blob = np.zeros((40, 32), np.float32)
        client.prefix_store(namespace, 0, 40, [(blob, blob)] * 4)
    assert_miss(connect(model, vquant="native"), model, namespace, "Mismatch")


def test_half_a_prefix_is_a_miss_and_is_completed(
    tiny: Tiny, connect: Connect, port: int, namespace: str
) -> None:
    """A writer that died between REGISTER and STORE leaves nothing that could be used."""
    model = tiny("llama")
    rows, fingerprint = native_layout(model).rows, fingerprint_of(model)
    with Client(f"pion://127.0.0.1:{port}") as client:
        client.prefix_register_schema(
            namespace, rows.keys, rows.values, tokens=len(IDS), fingerprint=fingerprint
        )
        blob = np.zeros((len(IDS), 32), np.float32)
        client.prefix_store(namespace, 0, len(IDS), [(blob, blob)])  # one layer of four
    pion = connect(model, vquant="native")
    assert_prefilled(model, pion.get_or_prefill(IDS, namespace=namespace))
    assert pion.flush()
    assert_prefilled(model, pion.get_or_prefill(IDS, namespace=namespace))
    assert (pion.stats()["misses"], pion.stats()["hits"]) == (1, 1)


@pytest.mark.parametrize(
    ("blob", "kind"),
    [
        (None, None),
        (b"", "ValueError"),
        (pack(freeze([mx.zeros((1, 3, 64))])), "Mismatch"),  # one array too few
        (
            pack(freeze([mx.zeros((1, 3, 64)), mx.zeros((1, 1, 64))])),
            "Mismatch",
        ),  # one axis too many
    ],
)
def test_a_state_that_is_gone_or_wrong(
    tiny: Tiny, connect: Connect, port: int, namespace: str, blob: bytes | None, kind: str | None
) -> None:
    model = tiny("recurrent_gemma")
    with connect(model, vquant="native") as pion:
        pion.get_or_prefill(IDS, namespace=namespace)
    with Client(f"pion://127.0.0.1:{port}") as client:
        if blob is None:
            client.ssm_drop(namespace, 0)
        else:
            client.ssm_store(namespace, 0, blob)
    pion = connect(model, vquant="native")
    caches = pion.get_or_prefill(IDS, namespace=namespace)
    logits = [model(mx.array([[5]]), cache=each) for each in (caches, prefill(model, IDS))]
    assert mx.array_equal(*logits)
    assert (pion.stats()["misses"], pion.stats()["errors"]) == (1, {kind: 1} if kind else {})


def test_a_server_that_wants_a_password(tiny: Tiny, connect: Connect, namespace: str) -> None:
    model = tiny("llama")
    secret = "p:a/s@s#w%?rd"
    with pion_server("--requirepass", secret) as port:
        assert_miss(connect(model, port=port), model, namespace, "NoAuth")
        wrong = connect(model, port=port, password="wrong")
        assert_miss(wrong, model, namespace, "WrongPass")
        right = connect(model, port=port, password=secret)
        right.get_or_prefill(IDS, namespace=namespace)
        assert right.flush()
        assert right.stats()["stores"] == 1


def test_a_server_that_comes_back(
    tiny: Tiny, connect: Connect, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server dies under a client and another one takes its place: hits, misses, hits."""
    model = tiny("llama")
    with pion_server() as port:
        pion = connect(model, port=port, vquant="native")
        for _ in range(2):
            pion.get_or_prefill(IDS, namespace=namespace)
    assert pion.stats()["hits"] == 1
    assert_miss(pion, model, namespace, "ConnectionFailed")
    monkeypatch.setattr(remote, "RETRY_AFTER_S", 0.0)
    pion._remote._away_until = 0.0
    with pion_server(port=port):
        for _ in range(2):
            assert_prefilled(model, pion.get_or_prefill(IDS, namespace=namespace))
        assert (pion.stats()["hits"], pion.stats()["stores"]) == (2, 2)


def test_only_an_answer_ends_a_row_of_failures(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses double as long as nothing is heard, whatever is handed over to be stored meanwhile."""
    monkeypatch.setattr(remote, "RETRY_AFTER_S", 0.0)
    model = tiny("llama")
    with PrefixStore(model, f"pion://127.0.0.1:{closed_port()}", timeout=30) as store:
        caches = prefill(model, IDS)
        for count in range(3):
            assert store._remote._failures == 2 * count
            assert store.match(IDS).length == 0
            store.insert(IDS, caches)
            assert store.flush()
    assert store.stats()["errors"] == {"ConnectionFailed": 6}


def test_what_is_long_may_take_longer_than_the_timeout(
    tiny: Tiny, connect: Connect, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a prefix that does not fit through a slow network in that time is never stored, and
    the server is taken for hanging each time."""
    given: list[float] = []
    pipeline = Client.pipeline

    def recorded(self: Client, requests: Any, *, timeout: float) -> Any:
        given.append(timeout)
        return pipeline(self, requests, timeout=timeout)

    monkeypatch.setattr(Client, "pipeline", recorded)
    monkeypatch.setattr(remote, "LEAST_BYTES_PER_S", 1.0)
    pion = connect(tiny("llama"), vquant="native")
    pion.get_or_prefill(IDS, namespace=namespace)
    assert pion.flush()
    assert max(given) == 30 + pion.stats()["bytes_stored"] > 30


def test_a_failure_is_logged_once(
    tiny: Tiny, connect: Connect, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("llama")
    with bad_server(HELLO, b"+OK\r\n+OK\r\n", b"+OK\r\n+OK\r\n") as server:
        pion = connect(model, port=server.port)
        for _ in range(2):
            assert_miss(pion, model, namespace, "ProtocolError")
    (record,) = [r for r in caplog.records if r.name == "pion_vllm_mlx.remote"]
    assert "ProtocolError" in record.getMessage()


def test_a_namespace_the_server_refuses(tiny: Tiny, connect: Connect) -> None:
    model = tiny("llama")
    assert_miss(connect(model), model, "n" * (1 << 20), "PionError")
