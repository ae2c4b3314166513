"""The options of the connector and of the L2 adapter, under the same names.

A wrong name or value is one sentence that says what to write instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pion_server.client import DEFAULT_URL


class Options(BaseModel):
    """Where the server is and how chunks are kept. Values may be strings, as in the environment."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: str = Field(DEFAULT_URL, description="pion://[user:password@]host[:port]")
    timeout: float = Field(
        3.0, gt=0, description="seconds that one answer may take; a batch is many answers"
    )
    connections: int = Field(
        2, ge=1, le=64, description="connections for payloads; one more is for questions"
    )
    prefix: str = Field(
        "lmcache/",
        min_length=1,
        max_length=512,
        description="what every key starts with; deployments that must not share need two",
    )
    vquant: str | None = Field(
        None, description="a storage codec of the server; without it chunks are kept bit for bit"
    )
    retry_after: float = Field(
        3.0, ge=0, description="seconds that a server which failed is left alone"
    )


def parse(given: Mapping[str, Any], where: str) -> Options:
    """The options in `given`, named `where` in errors. Raises ValueError; nothing of a value is in
    its message, since a URL may hold a password."""
    for name in given:
        if name not in Options.model_fields:
            raise ValueError(f"{where}: unknown option '{name}'; {_suggestion(name)}")
    try:
        return Options(**given)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{where}: option '{first['loc'][0]}': {first['msg']}") from None


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name, Options.model_fields, n=1)
    return (
        f"did you mean '{close[0]}'?" if close else f"known are {', '.join(Options.model_fields)}"
    )
