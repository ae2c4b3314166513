"""Invariant: what is watched is what is so: every number of /metrics is the server's own at one
moment, measured and estimated apart, each tenant's apart, and /health is 200 only while writes are
kept.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from pion_server.net.metrics import TABLE

OPERATIONS = Path(__file__).resolve().parents[3] / "docs" / "OPERATIONS.md"
TOKENS = 1000

# PION.STATS' fields, and the samples that say the same.
RECEIPT = {
    "kvprefix_hits_measured": ("pion_prefix_hits_total", "measured"),
    "kvprefix_hits_estimated": ("pion_prefix_hits_total", "estimated"),
    "kvprefix_misses": ("pion_prefix_misses_total", ""),
    "kvprefix_tokens_served": ("pion_prefix_tokens_served_total", ""),
    "kvprefix_bytes_served": ("pion_prefix_bytes_served_total", ""),
    "prefill_seconds_avoided_measured": ("pion_prefill_seconds_avoided_total", "measured"),
    "prefill_seconds_avoided_estimated": ("pion_prefill_seconds_avoided_total", "estimated"),
}
# KV.PREFIX.INFO's.
HELD = {
    "registered_prefixes": "pion_prefixes",
    "vstore_sessions": "pion_sessions",
    "vstore_total_fetches": "pion_prefix_fetches_total",
    "vstore_bytes": "pion_rows_bytes",
    "memory_used": "pion_memory_used_bytes",
    "memory_limit": "pion_memory_limit_bytes",
    "evictions": "pion_evictions_total",
    "admission_rejections": "pion_admission_rejections_total",
}
Samples = dict[tuple[str, str], float]


def scrape(watched: Any, tenant: str = "default") -> Samples:
    """One tenant's samples by name and kind."""
    return {
        (sample.name, sample.labels.get("kind", "")): sample.value
        for family in plain(watched.get("/metrics").text)
        for sample in family.samples
        if sample.labels.get("tenant", tenant) == tenant
    }


def receipt(client: Any) -> dict[str, float]:
    return {k.decode(): float(v) for k, v in client.execute_command("PION.STATS").items()}


def info(client: Any) -> dict[str, float]:
    text = client.execute_command("KV.PREFIX.INFO").decode()
    return {name: float(value) for name, value in re.findall(r"(\w+):(\d+)", text)}


def check_against_the_commands(watched: Any, client: Any, tenant: str = "default") -> Samples:
    samples = scrape(watched, tenant)
    stats, held = receipt(client), info(client)
    said = {name: stats[name] for name in RECEIPT}
    assert {name: samples[key] for name, key in RECEIPT.items()} == pytest.approx(said)
    said = {name: held[name] for name in HELD}
    assert {name: samples[key, ""] for name, key in HELD.items()} == said
    hits = samples["pion_prefix_hits_total", "measured"]
    assert hits + samples["pion_prefix_hits_total", "estimated"] == stats["kvprefix_hits"]
    return samples


def play(client: Any, stored: Any, times: int = 1) -> None:
    """`times` timed hits, and for each an untimed one, a miss and a fetch."""
    stored(client, "timed", TOKENS, "PREFILL_MS", 2500)
    stored(client, "untimed", TOKENS)
    for _ in range(times):
        assert client.execute_command("KV.PREFIX.LOOKUP", "timed") == b"HIT"
        assert client.execute_command("KV.PREFIX.LOOKUP", "untimed", "TOKENS", 400) == b"HIT"
        assert client.execute_command("KV.PREFIX.LOOKUP", "nobody") == b"MISS"
        client.execute_command("KV.PREFIX.FETCH", "timed")


def test_a_scrape_says_what_the_commands_say(watch: Any, stored: Any) -> None:
    watched = watch("--max-memory", "10mb", "--admission", "1")
    client = watched.client()
    play(client, stored)
    client.set("key", "value")
    client.get("key")
    client.get("none")
    samples = check_against_the_commands(watched, client)
    expected = {
        ("pion_prefix_hits_total", "measured"): 1,
        ("pion_prefix_hits_total", "estimated"): 1,
        ("pion_prefix_misses_total", ""): 1,
        ("pion_prefix_tokens_served_total", ""): TOKENS + 400,
        ("pion_prefix_bytes_served_total", ""): 8 * TOKENS,
        ("pion_prefix_fetches_total", ""): 2,
        ("pion_prefill_seconds_avoided_total", "measured"): 2.5,
        ("pion_prefill_seconds_avoided_total", "estimated"): pytest.approx(400 * 555e-6),
        ("pion_key_hits_total", ""): 1,
        ("pion_key_misses_total", ""): 1,
        ("pion_connections_total", ""): 1,
        ("pion_clients", ""): 1,
        ("pion_memory_limit_bytes", ""): 10_000_000,
        ("pion_rows_bytes", ""): 2 * 8 * TOKENS,
        ("pion_prefixes", ""): 2,
        ("pion_sessions", ""): 4,
        ("pion_keys", ""): 1,
        ("pion_evictions_total", ""): 0,
        ("pion_expired_keys_total", ""): 0,
        ("pion_writes_refused", ""): 0,
    }
    assert {key: samples[key] for key in expected} == expected


def test_gauges_go_down_and_a_reset_starts_anew(watch: Any, stored: Any) -> None:
    watched = watch()
    client = watched.client()
    play(client, stored, times=3)
    client.execute_command("KV.PREFIX.DROP", "timed", "untimed")
    samples = check_against_the_commands(watched, client)
    assert samples["pion_prefix_hits_total", "measured"] == 3
    assert samples["pion_memory_used_bytes", ""] == samples["pion_rows_bytes", ""] == 0
    client.execute_command("PION.STATS", "RESET")
    samples = check_against_the_commands(watched, client)
    assert samples["pion_prefix_hits_total", "measured"] == 0
    assert samples["pion_uptime_seconds", ""] > 0


def test_eviction_expiry_and_admission_are_counted(watch: Any, stored: Any) -> None:
    watched = watch("--max-memory", "1mb", "--admission", "2")
    client = watched.client()
    for name in ("a", "b"):
        stored(client, name, 100_000)
        stored(client, name, 100_000)
    client.set("k", "1", px=1)
    client.set("k", "1", px=1)
    while client.dbsize():
        pass
    samples = check_against_the_commands(watched, client)
    assert samples["pion_evictions_total", ""] == 1
    assert samples["pion_admission_rejections_total", ""] == 3
    assert samples["pion_expired_keys_total", ""] == 1


def test_tenants_are_told_apart(watch: Any, stored: Any) -> None:
    watched = watch("--tenant", "ann:a-secret:1mb", "--tenant", "bob:b-secret")
    ann, bob = watched.client("ann", "a-secret"), watched.client("bob", "b-secret")
    play(ann, stored, times=2)
    bob.execute_command("KV.PREFIX.LOOKUP", "timed")
    assert check_against_the_commands(watched, ann, "ann")["pion_prefix_misses_total", ""] == 2
    assert check_against_the_commands(watched, bob, "bob")["pion_prefix_misses_total", ""] == 1


def test_what_is_on_disk(watch: Any, stored: Any, tmp_path: Path) -> None:
    assert ("pion_wal_bytes", "") not in scrape(watch())
    watched = watch("--data-dir", str(tmp_path / "data"))
    client = watched.client()
    stored(client, "ns", TOKENS)
    assert client.config_get("appendonly") == {"appendonly": "yes"}
    samples = scrape(watched)
    on_disk = sum(path.stat().st_size for path in (tmp_path / "data/default").glob("wal.*"))
    assert samples["pion_wal_bytes", ""] == info(client)["wal_bytes"] == on_disk > 8 * TOKENS


def test_watching_changes_nothing(watch: Any) -> None:
    watched = watch()
    first = scrape(watched)
    for path in ("/", "/stats.json", "/health", "/metrics"):
        watched.get(path)
    last = scrape(watched)
    moving = {("pion_uptime_seconds", "")}
    moving |= {key for key in last if key[0].startswith(("process_", "python_"))}
    assert {k: v for k, v in last.items() if k not in moving} == {
        k: v for k, v in first.items() if k not in moving
    }


def test_the_numbers_of_a_scrape_are_of_one_moment(watched: Any, stored: Any) -> None:
    """While hits come in, tokens and seconds belong to just those hits that are counted."""
    client, stop = watched.client(), threading.Event()
    client.execute_command("PION.STATS", "RESET")
    stored(client, "ns", 7)

    def hit() -> None:
        while not stop.is_set():
            pipeline = client.pipeline(transaction=False)
            for _ in range(50):
                pipeline.execute_command("KV.PREFIX.LOOKUP", "ns", "PREFILL_MS", 500)
            pipeline.execute()

    thread = threading.Thread(target=hit)
    thread.start()
    seen = set()
    try:
        while len(seen) < 50:
            samples = scrape(watched)
            hits = samples["pion_prefix_hits_total", "measured"]
            assert samples["pion_prefix_tokens_served_total", ""] == 7 * hits
            assert samples["pion_prefill_seconds_avoided_total", "measured"] == hits / 2
            seen.add(hits)
    finally:
        stop.set()
        thread.join()


def families() -> Iterator[str]:
    yield from dict.fromkeys(row.name for row in TABLE)


def test_both_formats_are_well_formed(watched: Any) -> None:
    reply = watched.get("/metrics")
    assert reply.headers["Content-Type"].startswith("text/plain; version=")
    seen = {sample.name for family in plain(reply.text) for sample in family.samples}
    assert seen >= {"pion_build_info", "pion_uptime_seconds", "pion_prefix_hits_total"}
    asked = watched.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert asked.headers["Content-Type"].startswith("application/openmetrics-text")
    strict = {sample.name for family in openmetrics(asked.text) for sample in family.samples}
    assert strict == seen


def test_every_metric_is_documented() -> None:
    page = OPERATIONS.read_text()
    undocumented = [name for name in families() if f"`{name}" not in page]
    assert undocumented == []
    known = {*families(), "pion_uptime_seconds", "pion_build_info"}
    assert set(re.findall(r"`(pion_\w+)", page)) <= known


def test_rows_of_one_metric_stand_together_and_say_the_same() -> None:
    """Or a scrape would have the same family twice."""
    assert len({row.key for row in TABLE}) == len(TABLE)
    names = [row.name for row in TABLE]
    runs = [name for i, name in enumerate(names) if names[i - 1 : i] != [name]]
    assert len(runs) == len(set(runs)) == len({(row.name, row.help) for row in TABLE})


def test_health_follows_the_log(
    watch: Any, full_disk: Any, eventually: Any, tmp_path: Path
) -> None:
    watched = watch("--data-dir", str(tmp_path / "data"))
    client = watched.client()
    client.set("key", "before")
    assert watched.get("/health").status == 200
    with full_disk(watched):
        eventually(lambda: watched.get("/health").status == 503)
        told = watched.json("/health")
        assert told["status"] == "refusing writes"
        assert "the log cannot be written" in told["tenants"]["default"]
        assert scrape(watched)["pion_writes_refused", ""] == 1
        assert scrape(watched)["pion_wal_backlog_bytes", ""] > 2 << 20
        assert client.get("key") == b"before"
    assert watched.json("/health") == {"status": "ok"}
    assert scrape(watched)["pion_writes_refused", ""] == 0


def test_health_without_a_log(watched: Any) -> None:
    assert watched.json("/health") == {"status": "ok"}
