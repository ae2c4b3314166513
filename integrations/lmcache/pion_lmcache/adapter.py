"""`PionConnectorAdapter`: what `remote_storage_plugins: ["pion"]` loads, and its configuration.

LMCache logs a plugin's errors and goes on without it, with look-ups that quietly find nothing. So
everything that can be wrong is checked here, at start, and is one line in the log that says what
to write instead. A server that cannot be reached is such a line too, but no error: it is used as
soon as it is there.
"""

from __future__ import annotations

import os
from typing import Any

from lmcache.logging import init_logger
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext

from pion_lmcache.connector import PionConnector
from pion_lmcache.greeting import greet
from pion_lmcache.options import Options, parse
from pion_server.client import PionError

logger = init_logger("pion_lmcache")

PLUGIN = "remote_storage_plugin"
LOADER = ("module_path", "class_name")


class PionConnectorAdapter(ConnectorAdapter):
    """Makes connectors for the plugins `pion` and `pion.<anything>`."""

    def __init__(self) -> None:
        super().__init__("plugin://pion")

    def create_connector(self, context: ConnectorContext) -> PionConnector:
        """A connector with the options of the plugin that LMCache names. Raises ValueError on a
        configuration that cannot work, after a line in the log."""
        try:
            return _checked(context)
        except (ValueError, PionError) as error:
            logger.error("Pion is NOT in use: %s", error)
            raise ValueError(str(error)) from None


def _checked(context: ConnectorContext) -> PionConnector:
    config, backend = context.config, context.local_cpu_backend
    if config is None or backend is None:
        raise ValueError("needs max_local_cpu_size above 0: chunks are received into it")
    check_engine(config)
    options = options_of(context.plugin_name or "pion", config.extra_config or {})
    connector = PionConnector(options, config, backend)
    try:
        greet(connector.engine, connector.prefix, options.vquant, connector.layout.dim)
    except ValueError:
        connector.shut()
        raise
    return connector


def options_of(plugin: str, extra_config: dict[str, Any]) -> Options:
    """The options among `extra_config`'s flat keys. Raises ValueError on keys that were meant for
    the plugin and say nothing to it."""
    own = f"{PLUGIN}.{plugin}."
    given = {}
    for key, value in extra_config.items():
        name = key.rpartition(".")[2]
        if key == own + name and name not in LOADER:
            given[name] = value
        elif f".{plugin}." in key and not key.startswith(f"{PLUGIN}."):
            raise ValueError(f"extra_config key '{key}' is not read; write '{own}{name}'")
    return parse(given, f"{own}*")


def check_engine(config: LMCacheEngineConfig) -> None:
    """Raises ValueError on settings of LMCache that we cannot serve; warns of one that leaves
    processes with nothing to share."""
    if config.remote_serde not in (None, "naive"):
        raise ValueError(
            f"remote_serde '{config.remote_serde}' is not supported; leave it out, and name a "
            f"codec of the server with {PLUGIN}.pion.vquant"
        )
    if config.use_layerwise:
        raise ValueError("use_layerwise is not supported; set it to false")
    if os.environ.get("PYTHONHASHSEED", "random") == "random":
        logger.warning(
            "PYTHONHASHSEED is not set: vLLM then names the same chunk differently in each process "
            "and nothing is shared; start every process with PYTHONHASHSEED=0"
        )
