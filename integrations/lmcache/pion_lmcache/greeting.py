"""What is said at start about the server, for every kind of adapter."""

from __future__ import annotations

import logging

from pion_lmcache.engine import Engine
from pion_lmcache.remote import Unavailable
from pion_server.client import PionError, calls

logger = logging.getLogger(__name__)


def greet(engine: Engine, prefix: str, codec: str | None, dim: int) -> None:
    """One line that says whether the server is there. Raises ValueError where it is, but cannot
    keep rows of `dim` values by the `codec`."""
    remote = engine.remote
    try:
        remote.ping()
        if codec is not None:
            probe = prefix + "probe"
            opened, _ = remote.ask(
                [calls.prefix_register(probe, dim, codec), calls.prefix_drop(probe)]
            )
            if isinstance(opened, PionError):
                raise ValueError(f"vquant '{codec}': {opened}")
    except Unavailable as failure:
        logger.error(
            "%s is NOT in use until it answers (%s): start pion-server there, or correct `url`",
            remote,
            failure.__cause__,
        )
        return
    logger.info("%s is in use; keys start with %s", remote, prefix)
