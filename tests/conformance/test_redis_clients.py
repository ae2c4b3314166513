"""Invariant: what people use with Redis works with Pion as it is: redis-py in every mode,
redis-cli, redis-benchmark.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

LARGE = bytes(range(256)) * 160_000  # 41 MB: beyond every buffer on the way


@pytest.fixture(params=[2, 3], ids=["RESP2", "RESP3"])
def client(pion_server: Any, request: pytest.FixtureRequest) -> Iterator[redis.Redis]:
    with redis.Redis(port=pion_server.port, protocol=request.param, client_name="me") as made:
        made.flushall()
        yield made


@pytest.fixture(params=[2, 3], ids=["RESP2", "RESP3"])
async def aclient(
    pion_server: Any, request: pytest.FixtureRequest
) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis(port=pion_server.port, protocol=request.param) as made:
        await made.flushall()
        yield made


def test_redis_py_strings_and_keys(client: redis.Redis) -> None:
    assert client.set("a", b"\0\xff") is True
    assert client.get("a") == b"\0\xff"
    assert client.set("a", "x", nx=True) is None
    assert client.set("a", "x", xx=True, get=True) == b"\0\xff"
    assert client.mset({"b": "1", "c": "2"}) is True
    assert client.mget("a", "b", "none") == [b"x", b"1", None]
    assert client.exists("a", "b", "none") == 2
    assert client.strlen("a") == 1
    assert client.set("t", "x", ex=100)
    assert 99 <= client.ttl("t") <= 100
    assert client.persist("t") is True
    assert client.ttl("t") == -1
    assert client.expire("t", 50, nx=True) is True
    assert 49_000 < client.pttl("t") <= 50_000
    assert client.type("a") == b"string"
    assert sorted(client.scan_iter(match="[ab]", count=2)) == [b"a", b"b"]
    assert sorted(client.keys()) == [b"a", b"b", b"c", b"t"]
    assert client.dbsize() == 4
    assert client.delete("a", "none") == 1
    assert client.unlink("b") == 1
    assert client.flushdb() is True
    assert client.dbsize() == 0


def test_redis_py_large_values_come_back_whole(client: redis.Redis) -> None:
    client.set("large", LARGE)
    assert client.get("large") == LARGE
    assert client.strlen("large") == len(LARGE)
    client.delete("large")


def test_redis_py_pipeline_sees_its_own_writes(client: redis.Redis) -> None:
    with client.pipeline(transaction=False) as pipe:
        for number in range(2000):
            pipe.set(f"k{number % 7}", number)
            pipe.get(f"k{number % 7}")
        replies = pipe.execute()
    assert replies[::2] == [True] * 2000
    assert replies[1::2] == [b"%d" % number for number in range(2000)]


def test_redis_py_errors_do_not_disturb_a_pipeline(client: redis.Redis) -> None:
    with client.pipeline(transaction=False) as pipe:
        pipe.set("a", 1).execute_command("NO.SUCH", "x").get("a").expire("a", "soon").get("a")
        replies = pipe.execute(raise_on_error=False)
    assert [replies[0], replies[2], replies[4]] == [True, b"1", b"1"]
    assert "unknown command 'NO.SUCH'" in str(replies[1])
    assert "not an integer" in str(replies[3])


def test_redis_py_connection_commands(client: redis.Redis) -> None:
    assert client.ping() is True
    assert client.echo("x") == b"x"
    assert client.client_getname() in ("me", b"me")
    mine = client.client_info()
    assert mine["name"] == "me"
    assert mine["id"] == client.client_id()
    assert mine["cmd"] == "client|info"
    assert mine["lib-name"].startswith("redis-py")
    assert str(mine["id"]) in [str(each["id"]) for each in client.client_list()]
    assert client.config_get("max*")["maxmemory"] == "0"
    assert client.select(0) is True


def test_redis_py_reads_info(client: redis.Redis) -> None:
    client.set("a", "v" * 1000, ex=100)
    client.get("a")
    info = client.info()
    assert info["role"] == "master"
    assert info["used_memory"] >= 1001
    assert info["db0"] == {"keys": 1}
    assert info["keyspace_hits"] >= 1
    assert info["kvprefix_hits"] >= 0
    assert tuple(map(int, info["redis_version"].split("."))) >= (7, 0, 0)
    assert client.info("replication") == {"role": "master", "connected_slaves": 0}


def test_databases_are_apart(pion_server: Any, client: redis.Redis) -> None:
    with redis.Redis(port=pion_server.port, db=15) as other:
        other.flushdb()
        other.set("a", "15")
        client.set("a", "0")
        client.flushdb()
        assert other.get("a") == b"15"
        other.flushall()
        assert other.dbsize() == 0


@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_py_decodes_responses(pion_server: Any, protocol: int) -> None:
    with redis.Redis(port=pion_server.port, protocol=protocol, decode_responses=True) as client:
        client.flushall()
        client.set("ключ", "значение")
        assert client.get("ключ") == "значение"
        assert client.keys() == ["ключ"]
        assert client.scan(0) == (0, ["ключ"])
        assert client.mget("ключ", "x") == ["значение", None]


@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_py_logs_in(locked_pion: Any, protocol: int) -> None:
    url = f"redis://default:s3cret-w0rd@127.0.0.1:{locked_pion.port}/3?protocol={protocol}"
    with redis.Redis.from_url(url) as client:
        assert client.ping() is True
        assert client.client_info()["db"] == 3
    with (
        redis.Redis(
            port=locked_pion.port, protocol=protocol, password="no", retry=None
        ) as stranger,
        pytest.raises(redis.AuthenticationError, match="invalid username-password pair"),
    ):
        stranger.ping()
    with (
        redis.Redis(port=locked_pion.port, protocol=2, retry=None) as stranger,
        pytest.raises(redis.AuthenticationError, match="Authentication required"),
    ):
        stranger.ping()


async def test_redis_py_asyncio(aclient: redis.asyncio.Redis) -> None:
    await aclient.set("a", LARGE)
    assert await aclient.get("a") == LARGE
    async with aclient.pipeline(transaction=False) as pipe:
        for number in range(500):
            pipe.set("b", number).get("b")
        replies = await pipe.execute()
    assert replies[1::2] == [b"%d" % number for number in range(500)]
    assert [key async for key in aclient.scan_iter(match="b")] == [b"b"]
    assert await aclient.mget("b", "none") == [b"499", None]


# -- Redis' own tools ---------------------------------------------------------------------------


def tool(name: str, port: int, *args: str, script: str = "") -> str:
    """All that the tool says, with `script` on its standard input."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name} on the PATH (Debian: apt install redis-tools)")
    command = [found, "-p", str(port), *args]
    done = subprocess.run(
        command, input=script, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout + done.stderr


def test_redis_cli(pion_server: Any) -> None:
    port = pion_server.port
    assert tool("redis-cli", port, "flushall") == "OK\n"
    assert tool("redis-cli", port, "set", "a", "b") == "OK\n"
    assert tool("redis-cli", port, "-3", "get", "a") == "b\n"
    assert tool("redis-cli", port, "--scan") == "a\n"
    assert "role:master" in tool("redis-cli", port, "info", "replication")
    assert "get" in tool("redis-cli", port, "command", "docs", "get")
    assert "unknown command" in tool("redis-cli", port, "NO.SUCH")


def test_redis_cli_reads_a_script(pion_server: Any) -> None:
    script = "flushall\nset a b\nget a\ndel a\n"
    assert tool("redis-cli", pion_server.port, script=script).split() == ["OK", "OK", "b", "1"]


def test_redis_benchmark(pion_server: Any) -> None:
    said = tool("redis-benchmark", pion_server.port, "-t", "set,get,mset", "-n", "2000", "-q")
    for name in ("SET: ", "GET: ", "MSET (10 keys): "):
        assert f"{name}" in said
    assert "requests per second" in said
    assert "rror" not in said


def test_redis_benchmark_pipelined(pion_server: Any) -> None:
    said = tool(
        "redis-benchmark", pion_server.port, "-t", "set,get", "-n", "5000", "-P", "50", "-q"
    )
    assert said.count("requests per second") >= 2
    assert "rror" not in said
