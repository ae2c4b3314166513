"""The metrics of a server: one table that says where each number is.

Nothing is counted here. take() reads a tenant in one turn of the event loop, so that its numbers
belong together; exposition() may then take its time on another thread. Names end in the unit, and
in _total where a number only grows (until PION.STATS RESET), as Prometheus wants it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from pion_server import __version__
from pion_server.commands.context import Server
from pion_server.errors import Misconf
from pion_server.tenants import Tenant

Value: TypeAlias = int | float


@dataclass(frozen=True, slots=True)
class Row:
    """One number of a tenant. `read` answers None where the tenant has no such thing. Rows that
    share a name differ in `kind`, and add up."""

    name: str
    help: str
    read: Callable[[Tenant], Value | None]
    kind: str = ""

    @property
    def key(self) -> str:
        """The row's name in a snapshot."""
        return f"{self.name}_{self.kind}" if self.kind else self.name


HITS = "pion_prefix_hits_total"
HITS_HELP = "KV.PREFIX.LOOKUPs that were hits, by whether the time they spared is known"
AVOIDED = "pion_prefill_seconds_avoided_total"
AVOIDED_HELP = (
    "Prefill time that hits spared: measured, as clients reported it, or estimated from the number "
    "of tokens where nobody did"
)

LAYERS = "pion_attention_layers"
LAYERS_HELP = "Layers of attention state: warm ones can be queried, cold ones brought back"

# Every read takes the same short time, however much is held: they are all done in one turn.
TABLE = (
    Row(HITS, HITS_HELP, lambda t: t.stats.prefix_hits_measured, "measured"),
    Row(
        HITS,
        HITS_HELP,
        lambda t: t.stats.prefix_hits - t.stats.prefix_hits_measured,
        "estimated",
    ),
    Row(
        "pion_prefix_misses_total",
        "KV.PREFIX.LOOKUPs that were no hits",
        lambda t: t.stats.prefix_misses,
    ),
    Row(
        "pion_prefix_tokens_served_total",
        "Tokens that hits spared the prefill of",
        lambda t: t.stats.prefix_tokens_served,
    ),
    Row(
        "pion_prefix_bytes_served_total",
        "Bytes of rows sent to clients",
        lambda t: t.stats.prefix_bytes_served,
    ),
    Row(
        "pion_prefix_fetches_total",
        "Runs of rows sent, one for each layer and side",
        lambda t: t.stats.prefix_fetches,
    ),
    Row(AVOIDED, AVOIDED_HELP, lambda t: t.stats.seconds_avoided_measured, "measured"),
    Row(AVOIDED, AVOIDED_HELP, lambda t: t.stats.seconds_avoided_estimated, "estimated"),
    Row("pion_key_hits_total", "Reads of plain keys that were there", lambda t: t.stats.key_hits),
    Row("pion_key_misses_total", "Reads of plain keys that were not", lambda t: t.stats.key_misses),
    Row(
        "pion_evictions_total",
        "Namespaces, sessions, states and keys that had to go for newer ones",
        lambda t: t.stats.evicted,
    ),
    Row(
        "pion_admission_rejections_total",
        "Writes of newcomers that --admission did not let in",
        lambda t: t.stats.turned_away,
    ),
    Row("pion_expired_keys_total", "Keys whose time was up", lambda t: t.stats.expired),
    Row("pion_commands_total", "Commands that clients sent", lambda t: t.stats.commands),
    Row("pion_connections_total", "Connections that logged in", lambda t: t.stats.connections),
    Row("pion_clients", "Connections that are logged in now", lambda t: len(t.clients)),
    Row(
        "pion_memory_used_bytes",
        "What is held, as --max-memory counts it",
        lambda t: t.store.bytes_used,
    ),
    Row("pion_memory_limit_bytes", "What may be held, 0 for no limit", lambda t: t.budget.memory),
    Row("pion_rows_bytes", "K/V rows that are held", lambda t: t.store.row_bytes),
    Row("pion_prefixes", "Namespaces that are held", lambda t: t.store.prefix_count),
    Row("pion_sessions", "Sessions that are held", lambda t: t.store.session_count),
    Row("pion_keys", "Plain keys that are held", lambda t: t.store.key_count),
    Row(
        "pion_attention_bytes",
        "Attention state that is held, as --attend-memory counts it",
        lambda t: t.attention.nbytes,
    ),
    Row(LAYERS, LAYERS_HELP, lambda t: t.attention.warm, "warm"),
    Row(LAYERS, LAYERS_HELP, lambda t: t.attention.cold, "cold"),
    Row(
        "pion_attention_demotions_total",
        "Layers of attention state that became cold",
        lambda t: t.attention.demotions,
    ),
    Row(
        "pion_attention_rehydrates_total",
        "Layers of attention state that were cold and became warm",
        lambda t: t.attention.rehydrates,
    ),
    Row(
        "pion_wal_bytes",
        "Log behind the snapshot, with --data-dir",
        lambda t: t.journal.wal_bytes if t.journal else None,
    ),
    Row(
        "pion_wal_backlog_bytes",
        "Memory that waits to be written to the log, with --data-dir",
        lambda t: t.journal.backlog_bytes if t.journal else None,
    ),
    Row(
        "pion_writes_refused",
        "1 while writes are refused since the log cannot keep them",
        lambda t: int(refusal(t) is not None),
    ),
)


def refusal(tenant: Tenant) -> Misconf | None:
    """Why a tenant's writes are refused, or None."""
    return tenant.journal.refusal() if tenant.journal is not None else None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The numbers of each tenant at one moment, by Row.key."""

    uptime_seconds: float
    tenants: Mapping[str, Mapping[str, Value]]


async def take(server: Server) -> Snapshot:
    """Read everything, on the event loop."""
    tenants = {}
    for tenant in server.tenants:
        tenants[tenant.name] = dict(_read(tenant))
        await asyncio.sleep(0)  # a thousand tenants are not one turn of the loop
    return Snapshot(time.time() - server.started, tenants)


def _read(tenant: Tenant) -> Iterator[tuple[str, Value]]:
    for row in TABLE:
        value = row.read(tenant)
        if value is not None:
            yield row.key, value


def exposition(snapshot: Snapshot, accept: str) -> tuple[bytes, str]:
    """The snapshot and the process' own figures in the form that the Accept header prefers, and
    its content type."""
    encode, content_type = choose_encoder(accept)
    return encode(_Scrape(snapshot)), content_type


class _Scrape(Collector):
    """One snapshot in prometheus_client's terms."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        yield InfoMetricFamily("pion_build", "The version", {"version": __version__})
        uptime = self._snapshot.uptime_seconds
        yield GaugeMetricFamily("pion_uptime_seconds", "Since the server started", uptime)
        for name, rows in groupby(TABLE, lambda row: row.name):
            yield self._family(name, list(rows))
        yield from ProcessCollector(registry=None).collect()

    def _family(self, name: str, rows: list[Row]) -> Metric:
        make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        labels = ["tenant", "kind"] if rows[0].kind else ["tenant"]
        family = make(name, rows[0].help, labels=labels)
        for tenant, values in self._snapshot.tenants.items():
            for row in rows:
                if row.key in values:
                    family.add_metric([tenant, row.kind][: len(labels)], values[row.key])
        return family
