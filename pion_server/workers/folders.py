"""Whose a data folder is.

    one process       <folder>/<tenant>
    several workers   <folder>/worker-<i>/<tenant>, and in <folder>/.workers how many they are

What is in it belongs to so many workers, and only so many can serve all of it.
"""

from __future__ import annotations

from pathlib import Path

from pion_server.config import Config
from pion_server.errors import PionError

_MARK = ".workers"


def refuse_folder_of_others(config: Config) -> None:
    """Raise PionError where the data folder was made by another number of workers."""
    if config.data_dir is None:
        return
    try:
        made_by = _made_by(config.data_dir)
    except (OSError, ValueError) as error:
        raise PionError(f"cannot use the data folder {config.data_dir}: {error}") from error
    if made_by not in (None, config.workers):
        raise PionError(
            f"the data folder {config.data_dir} is that of a server with {made_by} workers: start "
            f"it with -w {made_by}, or take another --data-dir"
        )


def _made_by(folder: Path) -> int | None:
    """How many workers a folder is of; None where there is nothing in it."""
    mark = folder / _MARK
    if mark.exists():
        return int(mark.read_text())
    return 1 if folder.is_dir() and any(each.is_dir() for each in folder.iterdir()) else None


def prepare_folder(config: Config) -> None:
    """Make the folders of all workers, and let it be known how many they are. Raises PionError."""
    if config.data_dir is None:
        return
    try:
        _make(config.data_dir)
        for worker in range(config.workers):
            _make(config.data_dir / f"worker-{worker}")
        unfinished = config.data_dir / f"{_MARK}.tmp"
        unfinished.write_text(f"{config.workers}\n")
        unfinished.replace(config.data_dir / _MARK)
    except OSError as error:
        raise PionError(f"cannot use the data folder {config.data_dir}: {error}") from error


def _make(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
