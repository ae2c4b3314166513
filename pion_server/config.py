"""The server's configuration: one frozen model, a reason per field.

Secrets are in no repr and no error message.
"""

from __future__ import annotations

import ipaddress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)

from pion_server import DEFAULT_PORT

DEFAULT_TENANT = "default"
# Longer than any password; a guess that is longer is wrong without being looked at.
MAX_SECRET = 1024
# Worker i of several also listens on port + OWN_PORTS + 2 * i. The binary lane of a port is on the
# next one.
OWN_PORTS = 10
FORM = "a tenant is name:secret[:quota], the quota a size such as 512mb"


def _usable(secret: SecretStr) -> SecretStr:
    """Refuse a password that locks nothing."""
    if not 1 <= len(secret.get_secret_value().encode()) <= MAX_SECRET:
        raise ValueError(f"a password has 1 to {MAX_SECRET} bytes; an empty one locks nothing")
    return secret


Secret = Annotated[SecretStr, AfterValidator(_usable)]


class TenantOptions(BaseModel):
    """One tenant. Its name is its user name, a word of CLIENT LIST, and names a folder."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    secret: Secret
    quota: Annotated[ByteSize, Field(gt=0)] | None = None  # bytes of payload to keep

    @classmethod
    def parse(cls, text: str) -> TenantOptions:
        """`name:secret[:quota]`. Raises ValueError, which quotes nothing: who mixes up the order
        would find a secret in the message."""
        words = dict(zip(("name", "secret", "quota"), text.split(":"), strict=False))
        if text.count(":") not in (1, 2):
            raise ValueError(f"{FORM}; neither name nor secret has a colon")
        try:
            return cls.model_validate(words)
        except ValidationError as error:
            wrong = " and ".join(str(item["loc"][0]) for item in error.errors())
            raise ValueError(f"the {wrong} cannot be used; {FORM}") from None


class Config(BaseModel):
    """Everything the server can be told. Field names are the long options with `_` for `-`.

    Raises pydantic's ValidationError, whose messages name the option, on a value that cannot work.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(DEFAULT_PORT, ge=0, le=65535, description="TCP port; 0 takes a free one")
    no_fast_lane: bool = Field(False, description="only RESP; no binary lane on the next port")
    # Absolute, since clients are told of it (PION.WORKERS).
    unixsocket: Annotated[Path, AfterValidator(Path.absolute)] | None = Field(
        None, description="Unix socket, for the server's user alone"
    )
    # Each has its own share of the memory and its own log: far fewer than this are of use.
    workers: int = Field(1, ge=1, le=64, description="worker processes behind the port")
    requirepass: Secret | None = Field(None, description="password of the tenant `default`")
    tenants: tuple[TenantOptions, ...] = Field((), description="who has a store of their own")
    ns_prefix: bytes = Field(
        b"", max_length=1024, description="how every name of a session, namespace or key begins"
    )
    tls_cert: Path | None = Field(None, description="PEM certificate chain: speak TLS only")
    tls_key: Path | None = Field(None, description="PEM private key of tls_cert")
    tls_ca: Path | None = Field(None, description="PEM: clients must show a certificate of it")
    max_memory: ByteSize = Field(
        ByteSize(0),
        ge=0,
        description="bytes of memory to keep, 0 = no limit; the least recently used goes first",
    )
    # The specification's server has 256 slots; memory is the limit that matters.
    max_sessions: int = Field(
        0, ge=0, description="sessions to keep, of which a prefix has two, 0 = no limit"
    )
    # 2 is the usual bargain: one-off prompts stay out, at the price of a second prefill.
    admission: int = Field(
        1, ge=1, le=100, description="keep a prefix, session or key when it is written so often"
    )
    # Stock LMCache sets its keys without an expiry, and never deletes one.
    default_ttl: int = Field(
        0,
        ge=0,
        le=10**9,
        description="seconds a key lives that is SET without saying, 0 = for ever",
    )
    attention: Literal["auto", "numpy", "mlx"] = Field(
        "auto", description="what computes ATTEND.*: auto is MLX on a GPU, else numpy"
    )
    metal_attention_fp16: bool = Field(
        False, description="keep attention state as fp16: half the memory, the precision of mlx-lm"
    )
    # The specification's figure: 16 layers of 16 prefixes.
    attend_slots: int = Field(
        256, ge=1, le=1 << 20, description="layers of attention state that a tenant keeps"
    )
    # It is a copy of what is stored, in fp32 often of twice the size.
    attend_memory: ByteSize = Field(
        ByteSize(0),
        ge=0,
        description="bytes of attention state to keep beside max_memory; 0: as much as that",
    )
    data_dir: Path | None = Field(
        None, description="folder of the journal, one in it for each tenant; None: memory only"
    )
    # What Redis has found to be the bargain most people want: at most a second is lost to a power
    # cut, nothing to a crash, and no write waits for the disk.
    wal_fsync: Literal["always", "everysec", "no"] = Field(
        "everysec", description="when the log is flushed to the disk itself"
    )
    # Redis' default. As each tenant has its share of them, nobody can take the last one.
    maxclients: int = Field(10_000, ge=1, le=1_000_000, description="clients that are logged in")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="HTTP port of the receipt and metrics, 0 = a free one"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="log level")
    # Redis' default is 512 MB; a layer of a long prefix may be larger, and receiving never
    # reserves more memory than has arrived (wire/receive.py), so the bound can be generous.
    max_bulk: int = Field(4 << 30, ge=1 << 20, description="largest single argument in bytes")

    @property
    def locked(self) -> bool:
        """Whether clients have to log in."""
        return self.requirepass is not None or bool(self.tenants)

    @property
    def everyone(self) -> tuple[TenantOptions, ...]:
        """The tenants with a secret: `default` first where --requirepass makes it one."""
        if self.requirepass is None:
            return self.tenants
        return TenantOptions(name=DEFAULT_TENANT, secret=self.requirepass), *self.tenants

    @model_validator(mode="after")
    def _refuse_an_open_door(self) -> Config:
        if not self.locked and not is_loopback(self.host):
            raise ValueError(
                f"refusing to listen on {self.host} without a password: anyone who can reach "
                "the port could read and replace every prefix; give --requirepass or --tenants, or "
                "bind to 127.0.0.1"
            )
        return self

    @model_validator(mode="after")
    def _refuse_tenants_that_meet(self) -> Config:
        # Not told apart by case, since the file systems of some machines do not either.
        names = [tenant.name.lower() for tenant in self.everyone]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"tenant {twice[0]} is given twice (--requirepass is that of the tenant default)"
            )
        if len(names) > self.maxclients:
            raise ValueError("--maxclients is shared evenly, and less than one for each tenant")
        return self

    @model_validator(mode="after")
    def _refuse_ports_beyond_the_last(self) -> Config:
        last = self.port + OWN_PORTS + 2 * self.workers - 1
        if self.workers > 1 and max(last, (self.metrics_port or 0) + self.workers - 1) > 65535:
            raise ValueError("the ports of the workers would lie beyond 65535; see --workers")
        return self

    @model_validator(mode="after")
    def _refuse_memory_promised_twice(self) -> Config:
        if not self.max_memory:
            return self
        left = self.max_memory - sum(tenant.quota or 0 for tenant in self.everyone)
        without = sum(tenant.quota is None for tenant in self.everyone)
        if left < without * self.workers:
            raise ValueError(
                f"the quotas of the tenants leave {left} bytes of --max-memory for the {without} "
                "without one"
            )
        return self

    @model_validator(mode="after")
    def _refuse_a_log_that_is_nowhere(self) -> Config:
        if "wal_fsync" in self.model_fields_set and self.data_dir is None:
            raise ValueError(
                "--wal-fsync is about the log in --data-dir, and none is given: nothing would be "
                "kept on disk"
            )
        return self

    @model_validator(mode="after")
    def _refuse_a_backend_that_is_not_there(self) -> Config:
        if self.attention == "mlx" and find_spec("mlx") is None:
            raise ValueError(
                "--attention mlx needs the package mlx: pip install mlx (on Linux 'mlx[cpu]')"
            )
        return self

    @model_validator(mode="after")
    def _refuse_half_a_certificate(self) -> Config:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together")
        if self.tls_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-ca goes with --tls-cert and --tls-key")
        return self


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
