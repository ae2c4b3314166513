"""Invariant: a promise names a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("page", ["GUARANTEES.md", "SECURITY.md"])
def test_every_test_that_a_promise_names_exists(page: str) -> None:
    named = set(
        re.findall(
            r"`((?:tests|integrations)/[\w/]+(?:\.py)?/?)`", (ROOT / "docs" / page).read_text()
        )
    )
    assert len(named) >= 5
    missing = sorted(name for name in named if not (ROOT / name).exists())
    assert not missing
