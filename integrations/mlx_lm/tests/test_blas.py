"""A fast BLAS is in the process before mlx is, or the user is told once what to do."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys

import pytest
from pion_vllm_mlx import blas


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if nothing had been tried in this process, where mlx is the Linux CPU build."""
    monkeypatch.setattr(blas, "_state", {})
    monkeypatch.setattr(blas, "_profits", lambda: True)
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    return monkeypatch


def test_the_command_agrees_with_the_function() -> None:
    command = run("-m", "pion_vllm_mlx.blas")
    call = run("-c", "import pion_vllm_mlx; print(pion_vllm_mlx.load_fast_blas())")
    missing = command.returncode == 1
    assert missing == ("pip install mkl" in command.stderr or "apt install" in command.stderr)
    if not missing and not command.stdout.startswith("no BLAS needed"):
        assert command.stdout == call.stdout


def test_importing_the_package_leaves_mlx_alone() -> None:
    program = (
        "import sys, pion_vllm_mlx, pion_vllm_mlx.blas; assert 'mlx.core' not in sys.modules; "
        "pion_vllm_mlx.PionPromptCache; assert 'mlx.core' in sys.modules"
    )
    result = run("-c", program)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_first_library_that_loads_is_taken_once(fresh: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def load(name: str, mode: int) -> None:
        asked.append((name, mode))
        if name == "missing":
            raise OSError(name)

    fresh.setattr(blas.ctypes, "CDLL", load)
    fresh.setattr(blas, "_candidates", lambda: ["missing", "good", "better"])
    assert [blas.load_fast_blas(), blas.load_fast_blas()] == ["good", "good"]
    assert asked == [("missing", ctypes.RTLD_GLOBAL), ("good", ctypes.RTLD_GLOBAL)]


def test_one_hint_where_there_is_none(
    fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.setattr(blas, "_candidates", lambda: ["libno-such.so"])
    assert blas.load_fast_blas() is None
    assert blas.load_fast_blas() is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "apt install libopenblas0-pthread" in record.getMessage()
    assert blas.main() == 1


def test_too_late_is_said(fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fresh.setitem(sys.modules, "mlx.core", blas)
    assert blas.load_fast_blas() is None
    (record,) = caplog.records
    assert "mlx is imported already" in record.getMessage()


def test_nothing_to_do_elsewhere(
    fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.setattr(blas, "_profits", lambda: False)
    assert blas.load_fast_blas() is None
    assert blas.main() == 0
    assert not caplog.records
