"""The server's configuration: one frozen model, a reason per field."""

from __future__ import annotations

import ipaddress
from typing import Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

from pion_server import DEFAULT_PORT


class Config(BaseModel):
    """Everything the server can be told. Field names are the long options with `_` for `-`.

    Raises pydantic's ValidationError, whose messages name the option, on a value that cannot work.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(DEFAULT_PORT, ge=0, le=65535, description="TCP port; 0 takes a free one")
    workers: int = Field(1, ge=1, le=1, description="worker processes (only 1 for now)")
    requirepass: str | None = Field(None, description="password every client must AUTH with")
    max_memory: ByteSize = Field(
        ByteSize(0),
        ge=0,
        description="bytes of payload to keep, 0 = no limit; the least recently used goes first",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="log level")
    # Redis' default is 512 MB; a layer of a long prefix may be larger, and receiving never
    # reserves more memory than has arrived (wire/receive.py), so the bound can be generous.
    max_bulk: int = Field(4 << 30, ge=1 << 20, description="largest single argument in bytes")

    @model_validator(mode="after")
    def _refuse_an_open_door(self) -> Config:
        if self.requirepass is None and not is_loopback(self.host):
            raise ValueError(
                f"refusing to listen on {self.host} without a password: anyone who can reach "
                "the port could read and replace every prefix; give --requirepass, or bind to "
                "127.0.0.1"
            )
        return self


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
