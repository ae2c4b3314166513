"""Invariant: data flows one way. An import that is not in the table of arrows is a defect.

The table is that of the design: each room of pion_server, and what it may import of ours.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BASE = {"errors", "config", "version"}
CONSTANTS = {"__version__", "DEFAULT_PORT"}

ROOMS: dict[str, set[str]] = {
    "version": set(),
    "errors": set(),
    "config": {"version"},
    "stats": BASE,
    "wire": {"errors"},
    "codecs": {"errors"},
    "store": {"codecs", "errors"},
    "journal": {"store", "codecs", "errors"},
    "team": {"store"},
    "attention": {"store", "codecs", "errors"},
    "tenants": BASE | {"store", "stats", "journal", "team", "attention"},
    "commands": BASE | {"wire", "codecs", "store", "stats", "team", "tenants", "attention"},
    "net": BASE | {"wire", "commands", "team", "tenants"},
    # Workers are clients of each other where they pass plain keys on.
    "workers": BASE | {"wire", "store", "team", "tenants", "net", "client"},
    "client": {"wire", "codecs", "errors", "version"},
    "__main__": BASE | {"net", "workers"},
}
# Connectors stand on the client and its errors; nothing else of the server is theirs.
CONNECTORS = {
    "pion_vllm_mlx": ROOT / "integrations/mlx_lm/pion_vllm_mlx",
    "pion_lmcache": ROOT / "integrations/lmcache/pion_lmcache",
}
CONNECTOR_MAY = {"client", "errors", "version"}


def room_of(module: str) -> str:
    """`pion_server.wire.encode` -> `wire`; the package itself only holds CONSTANTS."""
    room = module.split(".")[1] if "." in module else "version"
    return "version" if room in CONSTANTS else room


def ours_imported(path: Path) -> set[str]:
    """The pion_server modules a file imports, wherever in the file that happens."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the arrow"
            module = node.module or ""
            names = {f"{module}.{alias.name}" for alias in node.names}
            found |= names if module == "pion_server" else {module}
    return {name for name in found if name == "pion_server" or name.startswith("pion_server.")}


def rooms_imported(path: Path) -> set[str]:
    return {room_of(name) for name in ours_imported(path)}


def files() -> list[tuple[str, Path]]:
    found = []
    for path in sorted((ROOT / "pion_server").rglob("*.py")):
        parts = path.relative_to(ROOT / "pion_server").parts
        if parts != ("__init__.py",):
            found.append((parts[0].removesuffix(".py"), path))
    return found


@pytest.mark.parametrize(
    ("room", "path"), files(), ids=lambda value: str(value).split("pion_server/")[-1]
)
def test_a_room_imports_only_along_the_arrows(room: str, path: Path) -> None:
    assert room in ROOMS, f"{room} is a new room: give it a line in the table and in the design"
    extra = rooms_imported(path) - ROOMS[room] - {room}
    assert not extra, f"{path.name} in {room} imports from {sorted(extra)}"


@pytest.mark.parametrize("package", CONNECTORS)
def test_a_connector_stands_on_the_client_alone(package: str) -> None:
    for path in CONNECTORS[package].rglob("*.py"):
        extra = rooms_imported(path) - CONNECTOR_MAY
        assert not extra, f"{path.name} in {package} imports from {sorted(extra)}"


def test_only_the_attention_backend_may_import_mlx() -> None:
    for _, path in files():
        if path == ROOT / "pion_server/attention/mlx_backend.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] in {"mlx", "mlx_lm"}], path


def test_the_table_itself_is_checked(tmp_path: Path) -> None:
    forbidden = tmp_path / "x.py"
    forbidden.write_text(
        "def f():\n    from pion_server.net.server import serve\n    import pion_server\n"
    )
    assert rooms_imported(forbidden) == {"net", "version"}
