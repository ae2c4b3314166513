"""The command table: one registry, one dispatcher, one file a family."""

from __future__ import annotations

from importlib import import_module

FAMILIES = (
    "connection",
    "introspection",
    "keys",
    "strings",
    "vectors",
    "prefix",
    "prefix_rows",
    "blocks",
    "states",
    "attend",
    "attend_sparse",
    "attend_warm",
    "attend_index",
    "durability",
    "receipt",
    "workers",
)


def load_families() -> None:
    """Import every family, which enters its commands into registry.TABLE."""
    for family in FAMILIES:
        import_module(f"{__name__}.{family}")
