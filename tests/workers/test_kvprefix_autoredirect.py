"""Invariant: a client finds what another worker holds in one reconnect and repeats only what was
refused; with auto_redirect off the refusal is what the caller sees.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest

from pion_server.client import AsyncClient, Call, Client, Elsewhere, PionError, calls

from .conftest import PREFIX, ROWS, SECONDS, store_prefix

Run: TypeAlias = Callable[..., list[Any]]


@pytest.fixture(params=["blocking", "awaited"])
def run(request: pytest.FixtureRequest) -> Run:
    """run(url, *steps): each step is a call, or a list of calls as a pipeline; one client."""

    def blocking(url: str, *steps: Any, **options: Any) -> list[Any]:
        with Client(url, timeout=SECONDS, **options) as client:
            return [_step(client, step) for step in steps]

    def awaited(url: str, *steps: Any, **options: Any) -> list[Any]:
        async def main() -> list[Any]:
            async with AsyncClient(url, timeout=SECONDS, **options) as client:
                return [await _step(client, step) for step in steps]

        return asyncio.run(main())

    return blocking if request.param == "blocking" else awaited


def _step(client: Any, step: Call[Any] | Sequence[Call[Any]]) -> Any:
    return client.execute(step) if isinstance(step, Call) else client.pipeline(step)


def url_of(crew: Any, worker: int) -> str:
    return f"pion://127.0.0.1:{crew.port_of(worker)}"


def connections(client: Client) -> int:
    """How many have come so far to the worker that this one leads to."""
    return int(client.info("stats")["total_connections_received"])


def test_everything_about_a_foreign_prefix(crew: Any, run: Run) -> None:
    name = f"foreign-{run.__name__}"
    hashes = np.arange(3, dtype=np.uint64)
    owner = crew.client(1)
    owner.prefix_register(name, **PREFIX, blocks=(64, hashes))
    before = connections(owner)
    into = np.zeros_like(ROWS)
    *_, found, table, members, _, state, dropped, after = run(
        url_of(crew, 0),
        calls.prefix_register(name, **PREFIX),
        calls.prefix_store(name, 0, 2, [(ROWS, ROWS)], fmt="FP32"),
        calls.v_fetch(f"{name}_pv", 0, 0, 2, into=into),
        calls.prefix_fetch(name),
        calls.prefix_blocks(name),
        calls.prefix_membership(name, hashes),
        calls.ssm_store(name, 0, b"state"),
        calls.ssm_fetch(name, 0),
        calls.prefix_drop(name),
        calls.prefix_lookup(name),
    )
    assert np.array_equal(into, ROWS)
    assert bytes(found.rows[0][0]) == ROWS.tobytes()
    assert table.block_size == 64
    assert members.all()
    assert (bytes(state), dropped, after) == (b"state", 1, False)
    assert connections(owner) - before == 1


@pytest.mark.parametrize("lane", ["fast", "unix"])
def test_the_way_stays_the_same(start_crew: Any, run: Run, lane: str) -> None:
    """Who came in by the binary lane or a Unix socket goes on there."""
    with tempfile.TemporaryDirectory(prefix="pion-") as folder:
        crew = start_crew(2, "--unixsocket", f"{folder}/socket")
        store_prefix(crew.client(1), "there")
        first = crew.workers[0]
        assert first.unixsocket == f"{folder}/socket.0"
        url = {
            "fast": f"pion+fast://127.0.0.1:{first.fast_port}",
            "unix": f"pion+unix://{first.unixsocket}",
        }[lane]
        before = connections(crew.client(1))
        for door in (url, crew.server.urls[lane]):
            (found,) = run(door, calls.prefix_fetch("there"))
            assert bytes(found.rows[0][0]) == ROWS.tobytes()
        assert connections(crew.client(1)) > before


def test_only_what_was_refused_is_repeated(crew: Any, run: Run) -> None:
    name = f"pipeline-{run.__name__}"
    for worker in range(3):
        crew.client(worker).prefix_register(f"{name}-{worker}", 4, "fp32")
    before = [crew.client(worker).pion_stats()["kvprefix_misses"] for worker in range(3)]
    (replies,) = run(
        url_of(crew, 0),
        [
            calls.prefix_lookup("never there"),
            *(calls.v_storebatch(f"{name}-{worker}_pk", 0, 0, 2, ROWS) for worker in (2, 0, 1)),
            calls.v_fetch(f"{name}-1_pk", 7, 0, 2),
            calls.prefix_lookup("never there"),
            *(calls.v_fetch(f"{name}-{worker}_pk", 0, 0, 2) for worker in (1, 2, 0)),
            calls.echo("the last"),
        ],
    )
    assert replies[0] is replies[5] is False
    assert replies[1:4] == [None] * 3
    assert "not stored" in str(replies[4])
    assert [bytes(rows) for rows in replies[6:9]] == [ROWS.tobytes()] * 3
    assert bytes(replies[9]) == b"the last"
    after = [crew.client(worker).pion_stats()["kvprefix_misses"] for worker in range(3)]
    assert [now - then for now, then in zip(after, before, strict=True)] == [2, 0, 0]


def test_off_is_off(crew: Any, run: Run) -> None:
    name = f"off-{run.__name__}"
    store_prefix(crew.client(2), name)
    step = [calls.prefix_fetch(name), calls.prefix_lookup(name), calls.ping()]
    ((refusal, *others),) = run(url_of(crew, 0), step, auto_redirect=False)
    assert isinstance(refusal, Elsewhere)
    assert refusal.worker == 2
    assert others == [True, "PONG"]
    with pytest.raises(Elsewhere, match=r"^KV\.PREFIX\.FETCH session lives on worker 2$"):
        run(url_of(crew, 0), calls.prefix_fetch(name), auto_redirect=False)


def test_what_is_on_two_workers_ends_in_a_refusal(crew: Any, run: Run) -> None:
    name = f"circle-{run.__name__}"
    for worker in (1, 2):
        store_prefix(crew.client(worker), f"{name}-{worker}")
    with pytest.raises(Elsewhere):
        run(url_of(crew, 0), calls.prefix_drop(f"{name}-1", f"{name}-2"))


def test_many_at_once_find_their_way(crew: Any) -> None:
    names = [f"many-{number}" for number in range(60)]
    for number, name in enumerate(names):
        crew.client(number % 3).prefix_register(name, 4, "fp32")

    async def main() -> list[bytes]:
        async with AsyncClient(url_of(crew, 0), timeout=SECONDS) as client:

            async def one(number: int) -> bytes:
                row = np.full(4, number, np.float32)
                await client.v_storebatch(f"{names[number]}_pk", 0, 0, 1, row)
                return bytes(await client.v_fetch(f"{names[number]}_pk", 0, 0, 1))

            return await asyncio.gather(*map(one, range(len(names))))

    witness = crew.client(1)
    before = connections(witness)
    rows = asyncio.run(main())
    assert rows == [np.full(4, number, np.float32).tobytes() for number in range(len(names))]
    assert connections(witness) - before == 1


def test_a_worker_without_an_address_is_an_error(crew: Any, run: Run, monkeypatch: Any) -> None:
    name = f"lost-{run.__name__}"
    store_prefix(crew.client(1), name)
    places = [each for each in crew.workers if each.worker != 1]
    monkeypatch.setattr(calls.prefix, "_worker", lambda fields: places[fields["worker"] // 2])
    with pytest.raises(PionError, match="no such worker"):
        run(url_of(crew, 0), calls.prefix_fetch(name))
