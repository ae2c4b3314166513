"""A fast BLAS for mlx on a Linux CPU, loaded into the process before mlx is.

The CPU wheel of mlx brings the reference BLAS, a few GFLOP/s. The dynamic linker takes the first
definition of a symbol that it meets, so an optimised BLAS opened with RTLD_GLOBAL before
`mlx.core` replaces it: fp32 matrix products run about 40 times faster. On macOS, with a GPU
build, or once `mlx.core` is imported there is nothing to do. This module never imports mlx.

`python -m pion_vllm_mlx.blas` prints what would be used, and exits 1 where a fast BLAS is missing.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import platform
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

# Debian and Ubuntu; Fedora's name for the threaded build.
_SYSTEM_LIBRARIES = ("libopenblas.so.0", "libopenblasp.so.0")

_state: dict[str, str | None] = {}  # "loaded", once load_fast_blas() has had its turn


def load_fast_blas() -> str | None:
    """Load a fast BLAS where mlx will profit; the library's name, or None where nothing was loaded.

    Only the first call of a process acts, and later ones repeat its answer. Where a fast BLAS is
    missing, or comes too late, that first call logs one warning that says what to do.
    """
    if "loaded" not in _state:
        _state["loaded"] = _load() if _profits() else None
    return _state["loaded"]


def _load() -> str | None:
    if "mlx.core" in sys.modules:
        logger.warning(
            "mlx is imported already, so it keeps its slow BLAS: call "
            "pion_vllm_mlx.load_fast_blas() before the first import of mlx or mlx_lm"
        )
        return None
    for library in _candidates():
        try:
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return library
    logger.warning("%s", _hint())
    return None


def _profits() -> bool:
    """Whether mlx here is the Linux CPU build."""
    if sys.platform != "linux":
        return False
    try:
        importlib.metadata.version("mlx-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _candidates() -> list[str]:
    """Libraries to try, best first; the PyPI wheel `mkl` puts its own below sys.prefix."""
    wheel = sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so*"))
    return [*_SYSTEM_LIBRARIES, *(str(path) for path in wheel)]


def _hint() -> str:
    install = "apt install libopenblas0-pthread"
    if platform.machine() == "x86_64":
        install += ", or pip install mkl"
    return f"mlx will be about 40 times slower than it could be on this CPU: {install}"


def main() -> int:
    """Print what would be used; the exit code is 1 where a fast BLAS is missing."""
    logging.basicConfig(format="%(message)s")
    if not _profits():
        print("no BLAS needed: mlx here is not the Linux CPU build")
        return 0
    library = load_fast_blas()
    if library:
        print(library)
    return 0 if library else 1


if __name__ == "__main__":
    raise SystemExit(main())
