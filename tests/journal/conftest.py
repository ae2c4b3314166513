"""A journal that does not take its time: the same code, with shorter pauses."""

from __future__ import annotations

import pytest

from pion_server.journal import wal


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wal, "RETRY_SECONDS", 0.002)
    monkeypatch.setattr(wal, "SYNC_SECONDS", 0.005)
