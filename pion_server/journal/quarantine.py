"""Where bytes go that nobody can make sense of: kept for a person to look at, never read again."""

from __future__ import annotations

from pathlib import Path

from pion_server.journal.disk import Disk, write_all
from pion_server.journal.reading import WINDOW, LogFile

NAME = "quarantine"


class Quarantine:
    """A folder inside the data folder, made when it is first needed. Everything raises OSError."""

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._disk = disk
        self._folder = folder / NAME

    def copy(self, file: LogFile, start: int, end: int) -> Path:
        """Keep bytes [start, end) of a file; returns where."""
        path = self._free_path(f"{file.path.name}.{start}")
        fd = self._disk.create(path)
        try:
            for at in range(start, end, WINDOW):
                write_all(self._disk, fd, [file.bytes_at(at, min(WINDOW, end - at))])
            self._disk.sync(fd)
        finally:
            self._disk.close(fd)
        return path

    def keep(self, path: Path) -> None:
        """Keep a file when its name goes, or becomes that of another."""
        self._disk.link(path, self._free_path(path.name))

    def _free_path(self, name: str) -> Path:
        self._disk.make_folder(self._folder)
        taken = set(self._disk.names(self._folder))
        tries = (f"{name}.{i}" for i in range(len(taken) + 1))
        return self._folder / next(each for each in tries if each not in taken)
