"""What a worker process is given by its supervisor: one line of JSON on its standard input.

Passwords are in it, which is why they are on no command line. The pipe stays open behind the line;
its end tells the worker that the supervisor is gone. Descriptors have the numbers under which they
are inherited.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ByteSize, ConfigDict, SecretStr

from pion_server.config import DEFAULT_TENANT, OWN_PORTS, Config, TenantOptions


class Own(BaseModel):
    """Where one worker alone is reached; team.Member says what is what."""

    model_config = ConfigDict(frozen=True)

    port: int
    fast_port: int
    unixsocket: str


class Handover(BaseModel):
    """How a worker is to run. `config` is that of the whole server."""

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    index: int
    config: Config
    # Descriptors by what is spoken there: of the server's entrance, then the worker's own.
    resp: tuple[int, ...]
    fast: tuple[int, ...]
    unix: tuple[int, ...]
    own: tuple[Own, ...]  # those of all workers
    memory: int  # descriptor of the mapping (shared.py)
    key: str  # of the digests of names, in hex
    inner: Path  # Unix socket of worker 0, for the others
    inner_listener: int | None = None  # descriptor: worker 0 listens there

    def pack(self) -> bytes:
        """The line. It holds secrets. Only what was set: some options are refused where they are
        given for nothing."""
        return json.dumps(self.model_dump(exclude_unset=True), default=_plain).encode() + b"\n"

    @classmethod
    def unpack(cls, line: bytes) -> Handover:
        """What pack() was called on."""
        return cls.model_validate_json(line)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Those that the worker inherits."""
        inner = () if self.inner_listener is None else (self.inner_listener,)
        return *self.resp, *self.fast, *self.unix, self.memory, *inner


def _plain(value: object) -> str:
    match value:
        case SecretStr():
            return value.get_secret_value()
        case bytes():
            return value.decode()
        case Path():
            return str(value)
    raise TypeError(f"{type(value).__name__} cannot be handed down")


def tenant_names(config: Config) -> list[str]:
    """In the order that numbers their tables."""
    return [tenant.name for tenant in config.everyone] or [DEFAULT_TENANT]


def own_place(config: Config, worker: int) -> tuple[int, Path | None]:
    """The port and the Unix socket that lead to one worker alone; port 0: a free one."""
    path = config.unixsocket
    return (
        config.port and config.port + OWN_PORTS + 2 * worker,
        path and path.with_name(f"{path.name}.{worker}"),
    )


def share_of(config: Config, worker: int) -> Config:
    """The configuration that a worker runs with: its share of what is limited for the server as a
    whole, its folder, its port for metrics."""
    tenants = max(1, len(config.everyone))
    return config.model_copy(
        update={
            "max_memory": ByteSize(_share(config, config.max_memory)),
            "attend_memory": ByteSize(_share(config, config.attend_memory)),
            "max_sessions": _share(config, config.max_sessions),
            "maxclients": max(tenants, config.maxclients // config.workers),
            "tenants": tuple(_tenant_share(config, each) for each in config.tenants),
            "data_dir": config.data_dir and config.data_dir / f"worker-{worker}",
            "metrics_port": config.metrics_port and config.metrics_port + worker,
        }
    )


def _tenant_share(config: Config, tenant: TenantOptions) -> TenantOptions:
    if tenant.quota is None:
        return tenant
    return tenant.model_copy(update={"quota": ByteSize(_share(config, tenant.quota))})


def _share(config: Config, limit: int) -> int:
    """Never 0 of a limit, for that means none."""
    return max(1, limit // config.workers) if limit else 0
