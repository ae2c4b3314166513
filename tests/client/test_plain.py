"""Invariant: plain commands mean the same from either client, on pion-server and on real Redis."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import numpy as np
import pytest

from pion_server.client import Call, PionError, calls
from pion_server.client.calls.base import integer

CLIENT_ID = Call(("CLIENT", "ID"), integer)


@pytest.fixture(params=["pion_server", "pion_server fast", "redis_server"])
def url(request: pytest.FixtureRequest) -> str:
    """Db 9 of a real server."""
    server, _, lane = request.param.partition(" ")
    return f"{request.getfixturevalue(server).urls[lane or 'resp']}/9"


@pytest.fixture
def client(connect: Any, url: str) -> Any:
    made = connect(url)
    made.flushdb()
    return made


def test_every_plain_command(client: Any) -> None:
    assert client.ping() == "PONG"
    assert client.echo("h\u00e9") == "h\u00e9".encode()
    assert client.set("a", "1") is True
    assert client.set("a", "2", nx=True) is False
    assert client.set("b", "2", xx=True) is False
    assert client.set_get("a", 3, ex=100) == b"1"
    assert 0 < client.ttl("a") <= 100
    assert 0 < client.pttl("a") <= 100_000
    assert (client.persist("a"), client.persist("a")) == (True, False)
    assert (client.ttl("a"), client.ttl("none")) == (-1, -2)
    assert (client.expire("a", 50), client.expire("none", 50)) == (True, False)
    client.mset({"b": b"\0\r\n", b"\xff": 2.5})
    assert client.mget("a", "none", "b", b"\xff") == [b"3", None, b"\0\r\n", b"2.5"]
    assert (client.get("none"), client.strlen("b"), client.exists("a", "a", "x")) == (None, 3, 2)
    assert (client.type("a"), client.type("none")) == ("string", "none")
    assert client.dbsize() == 3
    assert sorted(client.scan(count=100)[1]) == [b"a", b"b", b"\xff"]
    assert client.scan(match="b*", count=100) == (0, [b"b"])
    assert client.delete("a", "b", "none") == 2
    client.flushdb()
    assert client.dbsize() == 0
    assert client.info("server")["tcp_port"].isdecimal()


def test_a_scan_visits_every_key(client: Any) -> None:
    keys = {b"key-%d" % number for number in range(300)}
    client.mset(dict.fromkeys(keys, "x"))
    found, cursor = set(), -1
    while cursor:
        cursor, page = client.scan(max(cursor, 0))
        found |= set(page)
    assert found == keys


def test_errors_are_raised_and_the_connection_stays(client: Any) -> None:
    before = client.execute(CLIENT_ID)
    with pytest.raises(PionError, match=r"unknown command 'NO\.SUCH'"):
        client.execute(Call(("NO.SUCH",), integer))
    client.set("text", "x")
    with pytest.raises(PionError, match="invalid expire"):
        client.set("text", "x", ex=-1)
    assert client.execute(CLIENT_ID) == before


def test_a_pipeline_answers_in_order_with_errors_in_place(client: Any) -> None:
    replies = client.pipeline(
        [calls.set_("a", 1), Call(("NO.SUCH",), integer), calls.get("a"), calls.strlen("a")]
    )
    assert isinstance(replies[1], PionError)
    assert [replies[0], *replies[2:]] == [True, b"1", 1]
    assert client.pipeline([]) == []


def test_a_pipeline_larger_than_all_buffers_in_both_directions(client: Any) -> None:
    """More payloads than one sendmsg takes; each side must read while it still has to write."""
    messages = [b"%d:" % number + bytes(20_000) for number in range(1500)]
    replies = client.pipeline([calls.echo(message) for message in messages], timeout=30)
    assert replies == messages


@pytest.mark.parametrize("nbytes", [0, 1, 100, 16_383, 16_384, 16_385, 200_000])
def test_values_of_any_size_in_and_out_of_arrays(client: Any, nbytes: int) -> None:
    array = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    client.set("k", array)
    assert bytes(client.get("k")) == array.tobytes()
    into = np.zeros(nbytes, np.uint8)
    value = client.get("k", into=into)
    assert into.tobytes() == bytes(value) == array.tobytes()
    assert nbytes == 0 or np.shares_memory(np.frombuffer(value, np.uint8), into)


def test_a_buffer_of_another_size_is_an_error_and_the_connection_stays(client: Any) -> None:
    before = client.execute(CLIENT_ID)
    for nbytes in (10, 100_000):
        client.set("k", bytes(nbytes))
        for size in (nbytes - 1, nbytes + 1):
            into = np.ones(size, np.uint8)
            with pytest.raises(PionError, match=f"has {nbytes} bytes, the buffer .* has {size}"):
                client.get("k", into=into)
            assert into.all()
    assert client.get("none", into=np.ones(3, np.uint8)) is None
    assert client.execute(CLIENT_ID) == before


def test_several_values_each_into_its_own_buffer(client: Any) -> None:
    values = [bytes([number]) * size for number, size in ((1, 10), (2, 50_000), (3, 20))]
    client.mset(dict(zip("abc", values, strict=True)))
    buffers = [np.zeros(len(value), np.uint8) for value in values]
    got = client.mget("a", "none", "b", "c", into=lambda index, nbytes: buffers[index].data)
    assert got[1] is None
    assert [buffer.tobytes() for buffer in buffers] == values
    assert all(
        np.shares_memory(np.frombuffer(view, np.uint8), buffer)
        for view, buffer in zip((got[0], got[2], got[3]), buffers, strict=True)
    )


def test_every_call_of_a_pipeline_lands_in_its_own_buffer(client: Any) -> None:
    values = {f"k{size}": bytes([size % 251]) * size for size in (50_000, 10, 16_384, 1)}
    client.mset(values)
    buffers = {key: np.zeros(len(value), np.uint8) for key, value in values.items()}
    gets = [calls.get(key, into=buffer) for key, buffer in buffers.items()]
    got = client.pipeline([gets[0], calls.ping(), *gets[1:], calls.get("none")])
    assert (got.pop(1), got.pop()) == ("PONG", None)
    for view, (key, buffer) in zip(got, buffers.items(), strict=True):
        assert np.shares_memory(np.frombuffer(view, np.uint8), buffer)
        assert buffer.tobytes() == values[key]


def test_threads_share_a_client_without_mixing_replies(client: Any) -> None:
    wrong: list[bytes] = []

    def work() -> None:
        for _ in range(100):
            mine = uuid.uuid4().hex.encode()
            wrong.extend({mine} ^ {client.echo(mine)})

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
