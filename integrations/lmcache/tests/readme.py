"""What the README tells people to copy, as data."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

TEXT = (Path(__file__).parent.parent / "README.md").read_text()
PORT = "1974"
# Of a configuration: what says where chunks go. The rest is about memory and the model.
WHERE = ("remote_url", "remote_storage_plugins", "extra_config")


def blocks(language: str, containing: str = "", port: int | None = None) -> list[str]:
    """The code blocks of a language, with the server's port for the documented one."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return [b.replace(PORT, str(port or PORT)) for b in found if containing in b]


def settings(kind: str, port: int) -> dict[str, Any]:
    """The configuration of LMCache for `pion`, `redis`, `resp` or `valkey`; the second level of its
    multiprocess mode for `mp-pion`, `mp-resp` or `mp-valkey`."""
    scheme = kind.removeprefix("mp-")
    if kind.startswith("mp-"):
        return second_levels(port)["plugin" if scheme == "pion" else scheme]
    mark = "remote_storage_plugins" if scheme == "pion" else f"{scheme}://"
    (block,) = blocks("yaml", mark, port)
    return {key: value for key, value in yaml.safe_load(block).items() if key in WHERE}


def second_levels(port: int) -> dict[str, Any]:
    """By type, what stands behind --l2-adapter."""
    commands = [shlex.split(block) for block in blocks("sh", "--l2-adapter", port)]
    adapters = [json.loads(words[words.index("--l2-adapter") + 1]) for words in commands]
    return {adapter["type"]: adapter for adapter in adapters}
