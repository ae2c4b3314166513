"""Invariant: a test that docs/SECURITY.md names is in one of the files that its line names."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_promise_names_a_test() -> None:
    promises = re.findall(r"^\| [^|]+ \| (`.+) \|$", (ROOT / "docs/SECURITY.md").read_text(), re.M)
    assert len(promises) > 10
    for line in promises:
        files = re.findall(r"`(tests/[\w/]+\.py)`", line)
        there = "".join((ROOT / file).read_text() for file in files)
        for name in re.findall(r"`(test_\w+)`", line):
            assert f"def {name}(" in there, name
