"""mlx-lm 0.31.3, whose caches have another `state`, is served as the current one is."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

VERSION = "0.31.3"
TESTS = [
    "caches",
    "rows",
    "failures",
    "prompt_cache",
    "prefix_store",
    "serve",
    "serve_parts",
    "survey",
    "mlx_lm_patch",
    "held_prefixes",
    "wire_sparse_consumer",
    "stage2_server",
]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_oldest_version_that_is_supported(tmp_path: Path) -> None:
    """In an environment of its own, laid over this one; pip fetches one small wheel."""
    venv.create(tmp_path, with_pip=True)
    python = str(tmp_path / "bin" / "python")
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--no-deps", f"mlx-lm=={VERSION}"], check=True
    )
    (site,) = tmp_path.glob("lib/python*/site-packages")
    below = sysconfig.get_path("purelib")
    (site / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    program = "import mlx_lm; print(mlx_lm.__version__)"
    found = subprocess.run([python, "-c", program], check=True, text=True, stdout=subprocess.PIPE)
    assert found.stdout.strip() == VERSION
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in TESTS]
    # The page on the model families is about the newest version.
    command = [python, "-m", "pytest", "-q", "-m", "not long", "-k", "not page", *files]
    done = subprocess.run(command)
    assert done.returncode == 0, f"see the output above; {sys.executable} is the other version"
