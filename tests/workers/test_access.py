"""Invariant: with workers as without, tenants share nothing, everyone has to log in everywhere, TLS
is spoken at every port, and all limits together are those that were asked for.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import redis
import trustme
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from pion_server.client import (
    AsyncClient,
    Client,
    ConnectionFailed,
    NoAuth,
    OutOfMemory,
    WrongPass,
)
from pion_server.config import OWN_PORTS, Config, TenantOptions
from pion_server.tenants import limits_of
from pion_server.workers.handover import Handover, Own, share_of

from .conftest import ROWS, SECONDS, holds_prefix, store_prefix

TENANTS = {"alice": "alices-s3cret", "bob": "bobs-s3cret"}


@pytest.fixture
def locked_crew(start_crew: Any, tmp_path: Path) -> Any:
    """Two workers, TLS, two tenants; `crew.url(tenant, worker)`."""
    authority = trustme.CA()
    leaf = authority.issue_cert("127.0.0.1", "localhost")
    ca, cert, key = (tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(ca)
    leaf.private_key_pem.write_to_path(key)
    for blob in leaf.cert_chain_pems:
        blob.write_to_path(cert, append=True)
    crew = start_crew(
        2,
        *("--tls-cert", str(cert), "--tls-key", str(key), "--max-memory", "64mib"),
        *("--tenant", f"alice:{TENANTS['alice']}:16mib", "--tenant", f"bob:{TENANTS['bob']}"),
    )
    with Client(f"pions://alice:{TENANTS['alice']}@127.0.0.1:{crew.port}?ca={ca}") as client:
        ports = {each.worker: each.port for each in client.pion_workers()}

    def url(tenant: str, worker: int | None = None) -> str:
        port = crew.port if worker is None else ports[worker]
        return f"pions://{tenant}:{TENANTS[tenant]}@127.0.0.1:{port}?ca={ca}"

    crew.url, crew.ca, crew.ports = url, ca, ports
    return crew


def test_the_same_names_are_different_things(locked_crew: Any) -> None:
    url = locked_crew.url
    with Client(url("alice", 0)) as alice, Client(url("bob", 1)) as bob:
        store_prefix(alice, "same")
        assert not bob.prefix_lookup("same")
        bob.prefix_register("same", 8, "fp16")
        assert bob.prefix_lookup("same")
        alice.set("key", "hers")
        assert bob.get("key") is None
        bob.set("key", "his")
        assert bob.dbsize() == 1
        bob.flushdb()
    with Client(url("alice", 1)) as alice, Client(url("bob", 0)) as bob:
        assert alice.prefix_lookup("same")
        assert holds_prefix(alice, "same")
        assert bytes(alice.get("key") or b"") == b"hers"
        assert bob.prefix_drop("same") == 1
        assert not bob.prefix_lookup("same")
        assert holds_prefix(alice, "same")


def test_a_redirect_speaks_tls_and_logs_in(locked_crew: Any) -> None:
    with Client(locked_crew.url("alice", 0)) as client:
        store_prefix(client, "kept")

    async def main() -> bytes:
        async with AsyncClient(locked_crew.url("alice", 1), timeout=SECONDS) as client:
            found = await client.prefix_fetch("kept", fmt="NATIVE")
            assert found is not None
            return bytes(found.rows[0][1])

    assert asyncio.run(main()) == ROWS.tobytes()


def test_every_port_is_locked_and_encrypted(locked_crew: Any) -> None:
    for port in (locked_crew.port, *locked_crew.ports.values()):
        with pytest.raises(ConnectionFailed), Client(f"pion://127.0.0.1:{port}") as plain:
            plain.ping()
        where = f"127.0.0.1:{port}?ca={locked_crew.ca}"
        with pytest.raises(NoAuth), Client(f"pions://{where}") as stranger:
            stranger.pion_workers()
        wrong = f"pions://alice:{TENANTS['bob']}@{where}"
        with pytest.raises(WrongPass), Client(wrong) as impostor:
            impostor.ping()


def test_the_others_are_in_no_list_of_clients(locked_crew: Any) -> None:
    """Worker 1 is a client of worker 0 for each tenant, and takes nobody's place."""
    with Client(locked_crew.url("alice", 1)) as passed_on:
        passed_on.set("key", "value")
        options = {"ssl": True, "ssl_ca_certs": str(locked_crew.ca)}
        with redis.Redis(
            port=locked_crew.ports[0], username="alice", password=TENANTS["alice"], **options
        ) as client:
            assert [each["user"] for each in client.client_list()] == ["alice"]
            assert client.config_get("maxmemory") == {"maxmemory": str(8 << 20)}


# -- limits, divided ------------------------------------------------------------------------------

sizes = st.integers(1 << 10, 1 << 44)
secrets = st.text(max_size=40).map(lambda text: SecretStr(f"s3cret{text}"))


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Any that a server would start with."""
    tenants = tuple(
        TenantOptions(name=f"t{number}", secret=draw(secrets), quota=draw(st.none() | sizes))
        for number in range(draw(st.integers(0, 3)))
    )
    promised = sum(tenant.quota or 0 for tenant in tenants)
    return Config(
        workers=draw(st.integers(2, 64)),
        tenants=tenants,
        requirepass=draw(st.none() | secrets),
        ns_prefix=draw(st.text(max_size=20)).encode(),
        max_memory=draw(st.just(0) | sizes.map(lambda size: size + promised + 4)),
        max_sessions=draw(st.integers(0, 1000)),
        maxclients=draw(st.integers(4, 100_000)),
        metrics_port=draw(st.none() | st.just(0) | st.integers(1024, 60_000)),
        data_dir=draw(st.none() | st.just(Path("data"))),
    )


@given(configs())
def test_what_is_limited_stays_so(config: Config) -> None:
    shares = [share_of(config, worker) for worker in range(config.workers)]
    for name in ("max_memory", "max_sessions", "maxclients"):
        total, parts = getattr(config, name), [getattr(share, name) for share in shares]
        assert all(bool(part) == bool(total) for part in parts), name
        least = max(1, len(config.everyone)) * config.workers
        assert sum(parts) <= max(total, least), name
    for share in shares:
        assert all(limit > 0 for limit in limits_of(share)) or not config.max_memory
        assert sum(limits_of(share)) <= share.max_memory or not config.max_memory
    for whole, *parts in zip(config.tenants, *(share.tenants for share in shares), strict=True):
        assert whole.quota is None or sum(part.quota for part in parts) <= whole.quota
    folders = [share.data_dir for share in shares]
    assert len(set(folders)) == (config.workers if config.data_dir else 1)
    if config.metrics_port:
        assert len({share.metrics_port for share in shares}) == config.workers


@given(configs())
def test_a_worker_is_given_the_whole_configuration(config: Config) -> None:
    own = Own(port=1, fast_port=2, unixsocket="")
    given_ = Handover(
        index=1, config=config, resp=(3, 4), fast=(), unix=(5,), own=(own, own), memory=6,
        key="00", inner=Path("/x/y"),
    )  # fmt: skip
    line = given_.pack()
    assert line.count(b"\n") == 1
    assert Handover.unpack(line) == given_
    assert "s3cret" not in repr(given_)


def test_ports_that_do_not_exist_are_refused() -> None:
    for port, metrics, workers in ((65535 - OWN_PORTS, None, 3), (1974, 65534, 4)):
        with pytest.raises(ValidationError, match="65535"):
            Config(port=port, metrics_port=metrics, workers=workers)
    assert Config(port=65535, metrics_port=65535).workers == 1


def test_a_prefix_has_to_fit_into_one_workers_share(start_crew: Any) -> None:
    crew = start_crew(2, "--max-memory", "2mib")
    for worker in range(2):
        client = crew.client(worker)
        for size in (700_000, 1_200_000):
            client.v_create(f"w{worker}-{size}", size // 4, "fp32")
        client.v_storebatch(f"w{worker}-700000", 0, 0, 1, bytes(700_000))
        with pytest.raises(OutOfMemory):
            client.v_storebatch(f"w{worker}-1200000", 0, 0, 1, bytes(1_200_000))
        assert client.prefix_info()["memory_limit"] == 1 << 20
