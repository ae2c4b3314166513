"""Invariant: whichever worker a connection lands on, what is a hit is a hit, and what only another
worker can do is refused in a way that names it, with nothing done.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pion_server.client import Elsewhere, Mismatch
from pion_server.commands import load_families
from pion_server.commands.dispatcher import NAMES
from pion_server.commands.registry import TABLE, Home

from .conftest import ROWS, holds_prefix, store_prefix

BLOB = ROWS.tobytes()
ROW = BLOB[:16]
HASHES = bytes(range(8))
SCHEMA = "fmt=fp32,dim=4"
# A request for each command that goes by a name; `home` and `another` live elsewhere.
REQUESTS: dict[str, list[Any]] = {
    "V.CREATE": ["home_pk", 4, "VQUANT", "fp32"],
    "V.STOREBATCH": ["home_pv", 0, 0, 2, BLOB],
    "V.FETCH": ["home_pk", 0, 0, 1],
    "KV.PREFIX.REGISTER": ["home", 4, "fp32"],
    "KV.PREFIX.REGISTER.SCHEMA": ["another", "K", 1, SCHEMA, "V", 1, SCHEMA],
    "KV.PREFIX.STORE": ["home", 0, 2, "DATA", BLOB, BLOB],
    "KV.PREFIX.FETCH": ["home"],
    "KV.PREFIX.BLOCKS": ["home"],
    "KV.PREFIX.MEMBERSHIP": ["home", 1, HASHES],
    "KV.PREFIX.WARM": ["home", 1, 4, "home_attn"],
    "ATTEND.PREFIX.LOOKUP": ["home_attn", 0],
    "ATTEND.PREFIX.QUERY": ["home_attn", 0, 1, 4, 0, ROW],
    "ATTEND.PREFIX.QUERY_FUSED": ["home_attn", 0, 1, 4, 1, 1, ROW, ROW, ROW, b"\0"],
    "ATTEND.PREFIX.QUERY_SPARSE": ["home_attn", 0, 1, 4, 0, ROW, b"", bytes(4)],
    "ATTEND.PREFIX.QUERY_SPARSE_AUTO": ["home_attn", 0, 1, 4, 1, 1, 1, ROW, b"\0"],
    "ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED": [
        *["home_attn", 0, 1, 4, 1, 1, 1, 1, ROW, ROW, ROW, b"\0"],
    ],
    "ATTEND.PREFIX.STORE": ["home", 0, 1, 2, 4, BLOB, BLOB],
    "KV.STORE": ["home", 0, 0, 2, BLOB, BLOB],
    "KV.FETCH": ["home", 0, 0, 2],
    "KV.INFO": ["home"],
    "ATTEND.STORE": ["home", 0, 1, 2, 4, BLOB, BLOB],
    "ATTEND.QUERY": ["home", 0, 1, 4, 0, ROW],
    "KV.PREFIX.DROP": ["nowhere", "home"],
    "SSM.PREFIX.STORE": ["home", 0, "state"],
    "SSM.PREFIX.FETCH": ["home", 0],
    "SSM.PREFIX.DROP": ["home"],
}


def test_twelve_fresh_connections_hit(crew: Any) -> None:
    store_prefix(crew.client(), "twelve")
    for _ in range(12):
        assert crew.raw().ask("KV.PREFIX.LOOKUP", "twelve") == b"+HIT\r\n"


def test_a_lookup_is_right_everywhere_at_any_time(crew: Any) -> None:
    owner, *others = (crew.raw(worker) for worker in (1, 0, 2))
    declared = ["LAYERS", 1, "TOKENS", 2, "FINGERPRINT", "aabb"]

    def everywhere(reply: bytes, *options: Any) -> None:
        for raw in (owner, *others):
            assert raw.ask("KV.PREFIX.LOOKUP", "life", *options).startswith(reply)

    everywhere(b"+MISS\r\n")
    assert owner.ask("KV.PREFIX.REGISTER", "life", 4, "fp32", *declared) == b"+OK\r\n"
    everywhere(b"+MISS\r\n")
    everywhere(b"-MISMATCH ", "FINGERPRINT", "cc")
    assert owner.ask("V.STOREBATCH", "life_pk", 0, 0, 2, BLOB) == b"+OK\r\n"
    everywhere(b"+MISS\r\n")
    assert owner.ask("V.STOREBATCH", "life_pv", 0, 0, 2, BLOB) == b"+OK\r\n"
    everywhere(b"+HIT\r\n")
    everywhere(b"+HIT\r\n", "FINGERPRINT", "aabb")
    everywhere(b"-MISMATCH ", "FINGERPRINT", "aa")
    assert owner.ask("KV.PREFIX.DROP", "life") == b":1\r\n"
    everywhere(b"+MISS\r\n")


def test_a_hit_is_credited_where_it_was_answered(crew: Any) -> None:
    owner, other = crew.client(0), crew.client(2)
    owner.prefix_register("credit", 4, "fp32", layers=1, tokens=1000, prefill_ms=250.0)
    row = bytes(16 * 1000)
    owner.prefix_store("credit", 0, 1000, [(row, row)], fmt="FP32")
    before, elsewhere = other.pion_stats(), owner.pion_stats()
    assert before["worker"] == 2
    assert other.prefix_lookup("credit")
    assert other.prefix_lookup("credit", tokens=500)  # a part: what was registered says nothing
    after = other.pion_stats()
    grown = {name: after[name] - before[name] for name in after}
    assert grown["kvprefix_hits"] == 2
    assert grown["kvprefix_tokens_served"] == 1500
    assert grown["prefill_seconds_avoided_measured"] == pytest.approx(0.25)
    assert grown["kvprefix_hits_estimated"] == 1
    assert owner.pion_stats()["kvprefix_hits"] == elsewhere["kvprefix_hits"]


def test_a_chain_may_lie_on_several_workers(crew: Any) -> None:
    names = [f"chain-{number}" for number in range(9)]
    for number, name in enumerate(names):
        store_prefix(crew.client(number % 3), name)
    crew.client(1).prefix_register("chain-open", 4, "fp32", layers=1, tokens=2)
    for worker in range(3):
        client = crew.client(worker)
        assert client.prefix_match(names) == 9
        assert client.prefix_match([*names[:4], "chain-open", *names[4:]]) == 4
        assert client.prefix_match([*names[:5], "chain-none", *names[5:]]) == 5
        assert client.prefix_match(names, fingerprint="aa") == 0


def test_what_another_worker_holds_is_refused_by_every_command(crew: Any) -> None:
    load_families()
    by_name = {name for name, row in TABLE.items() if row.home in NAMES}
    assert by_name == REQUESTS.keys(), "give each command that goes by a name a line in REQUESTS"
    owner, *others = (crew.raw(worker) for worker in (1, 0, 2))
    assert owner.ask("KV.PREFIX.REGISTER", "home", 4, "fp32", "BLOCKS", 64, 1, HASHES) == b"+OK\r\n"
    assert owner.ask("KV.PREFIX.STORE", "home", 0, 2, "DATA", BLOB, BLOB) == b"+OK\r\n"
    assert owner.ask("SSM.PREFIX.STORE", "home", 0, "state") == b"+OK\r\n"
    command, words = "KV.PREFIX.REGISTER.SCHEMA", REQUESTS["KV.PREFIX.REGISTER.SCHEMA"]
    assert owner.ask(command, *words) == b"+OK\r\n"
    for command, words in REQUESTS.items():
        refusal = f"-ERR {command} session lives on worker 1\r\n".encode()
        for raw in others:
            assert raw.ask(command, *words) == refusal
            assert raw.ask(command.lower(), *words) == refusal
    for command, words in REQUESTS.items():  # and nothing was done
        assert not owner.ask(command, *words).startswith(b"-"), command


def test_no_command_that_takes_a_name_was_forgotten(crew: Any) -> None:
    load_families()
    takes_a_name = {
        name for name, row in TABLE.items() if {"<ns>", "<sid>"} & set(row.syntax.split())
    }
    answered_anywhere = {name for name in takes_a_name if TABLE[name].home is Home.ANYWHERE}
    assert answered_anywhere == {"KV.PREFIX.LOOKUP", "KV.PREFIX.MATCH"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["V.CREATE", "{}_pk", 4], ["KV.PREFIX.REGISTER", "{}", 4, "fp16"]),
        (["V.CREATE", "{}_pv", 4], ["SSM.PREFIX.STORE", "{}", 0, "x"]),
        (["SSM.PREFIX.STORE", "{}", 0, "x"], ["KV.PREFIX.REGISTER", "{}", 4, "fp16"]),
        (["KV.PREFIX.REGISTER", "{}", 4, "fp16"], ["V.CREATE", "{}_pv", 4]),
    ],
)
def test_what_belongs_together_lives_together(crew: Any, first: Any, second: Any) -> None:
    name = f"together-{first[0]}-{second[0]}"

    def filled(words: Any) -> list[Any]:
        return [word.format(name) if isinstance(word, str) else word for word in words]

    assert crew.raw(2).ask(*filled(first)) == b"+OK\r\n"
    refusal = f"-ERR {second[0]} session lives on worker 2\r\n".encode()
    assert crew.raw(0).ask(*filled(second)) == refusal
    assert crew.raw(2).ask(*filled(second)) == b"+OK\r\n"


def test_a_name_that_nobody_holds_is_nobodys(crew: Any) -> None:
    for worker in range(3):
        raw = crew.raw(worker)
        assert raw.ask("KV.PREFIX.BLOCKS", "nobody") == b"+UNKNOWN\r\n"
        assert raw.ask("KV.PREFIX.FETCH", "nobody") == b"$-1\r\n"
        assert raw.ask("KV.PREFIX.DROP", "nobody") == b":0\r\n"
        assert raw.ask("V.FETCH", "nobody", 0, 0).startswith(b"-ERR unknown session")


def test_names_of_several_workers_are_dropped_by_none(crew: Any) -> None:
    for worker in range(3):
        store_prefix(crew.client(worker), f"drop-{worker}")
    words = ["KV.PREFIX.DROP", "drop-0", "drop-1", "drop-2"]
    assert crew.raw(0).ask(*words) == b"-ERR KV.PREFIX.DROP session lives on worker 1\r\n"
    assert crew.raw(1).ask(*words) == b"-ERR KV.PREFIX.DROP session lives on worker 0\r\n"
    assert crew.client().prefix_match(["drop-0", "drop-1", "drop-2"]) == 3


def test_two_workers_never_come_to_hold_the_same(crew: Any) -> None:
    """All workers are asked for the same new names at once, in opposite orders."""
    names = [f"race-{number}" for number in range(600)]
    replies: dict[int, dict[str, bytes]] = {}
    start = threading.Barrier(3)

    def register(worker: int) -> None:
        raw, order = crew.raw(worker), names[:: 1 if worker % 2 else -1]
        start.wait()
        for name in order:
            raw.send("KV.PREFIX.REGISTER", name, 4, "fp16")
        replies[worker] = {name: raw.reply() for name in order}

    threads = [threading.Thread(target=register, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    owners = set()
    for name in names:
        (owner,) = (worker for worker in range(3) if replies[worker][name] == b"+OK\r\n")
        refusal = f"-ERR KV.PREFIX.REGISTER session lives on worker {owner}\r\n".encode()
        assert all(replies[worker][name] == refusal for worker in range(3) if worker != owner)
        owners.add(owner)
    assert len(owners) > 1, "they did not run at the same time"


def test_evicted_prefixes_are_gone_everywhere(start_crew: Any) -> None:
    crew = start_crew(2, "--max-sessions", "20")
    first, second = crew.client(0), crew.client(1)
    for number in range(30):
        store_prefix(first, f"n{number}")
    here = [first.prefix_lookup(f"n{number}") for number in range(30)]
    assert 0 < sum(here) <= 5, "each worker has its share of the limit"
    assert [second.prefix_lookup(f"n{number}") for number in range(30)] == here
    gone = f"n{here.index(False)}"
    store_prefix(second, gone)
    assert holds_prefix(first, gone)


def test_errors_of_the_wire_are_errors_of_the_client(crew: Any) -> None:
    crew.client(0).prefix_register("typed", 4, "fp32", fingerprint="aa")
    with pytest.raises(Elsewhere) as caught:
        crew.client(1, auto_redirect=False).prefix_blocks("typed")
    assert caught.value.worker == 0
    assert str(caught.value) == "KV.PREFIX.BLOCKS session lives on worker 0"
    with pytest.raises(Mismatch):
        crew.client(1).prefix_lookup("typed", fingerprint="bb")
