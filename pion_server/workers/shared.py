"""The memory that all workers of a server map: who is there, and a table of names for each worker
and tenant.

    roster   16 bytes for each worker: its process id, and 1 while it serves; the supervisor's
    headers  of all tables (table.py), 64 bytes each
    tables   each written by its worker alone; what nobody has written to takes no memory

It is a file without a name. Its descriptor is handed down, and carries the locks as well.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_UN, lockf
from mmap import mmap
from struct import Struct

from pion_server.workers.table import AREA, HEADER, OwnTable, Table

PAGE = 4096
_SEAT = Struct("@QQ")


class Shared:
    """The mapping for `workers` times `tenants` tables."""

    def __init__(self, fd: int, workers: int, tenants: int) -> None:
        self._file = os.fdopen(fd, "r+b", buffering=0)  # to be closed with the last reference
        self._workers = workers
        self._tenants = tenants
        self._memory = mmap(fd, _size(workers, tenants))

    @property
    def fd(self) -> int:
        """The descriptor to hand down."""
        return self._file.fileno()

    @classmethod
    def create(cls, workers: int, tenants: int) -> Shared:
        """New memory, all tables empty. Raises OSError."""
        fd = _nameless_file()
        os.ftruncate(fd, _size(workers, tenants))
        return cls(fd, workers, tenants)

    def table(self, worker: int, tenant: int) -> Table:
        """To read."""
        return Table(self._memory, *self._places(worker, tenant), worker)

    def own_table(self, worker: int, tenant: int) -> OwnTable:
        """To write, for the worker whose table it is."""
        return OwnTable(self._memory, *self._places(worker, tenant), worker)

    def _places(self, worker: int, tenant: int) -> tuple[int, int]:
        number = worker * self._tenants + tenant
        return PAGE + HEADER * number, _tables_at(self._workers * self._tenants) + 2 * AREA * number

    def seat(self, worker: int, pid: int, up: bool) -> None:
        """Tell all that a worker runs as `pid`, and whether it serves."""
        at = _SEAT.size * worker
        self._memory[at : at + _SEAT.size] = _SEAT.pack(pid, up)

    def seated(self, worker: int) -> tuple[int, bool]:
        """The last process id of a worker (0: none yet), and whether it serves."""
        pid, up = _SEAT.unpack_from(self._memory, _SEAT.size * worker)
        return pid, bool(up)

    @contextmanager
    def lock(self, number: int) -> Iterator[None]:
        """A lock among all processes, one of 2**62; the system takes it back from one that dies."""
        lockf(self.fd, LOCK_EX, 1, number)
        try:
            yield
        finally:
            lockf(self.fd, LOCK_UN, 1, number)


def _size(workers: int, tenants: int) -> int:
    return _tables_at(workers * tenants) + workers * tenants * 2 * AREA


def _tables_at(tables: int) -> int:
    return PAGE * (2 + HEADER * tables // PAGE)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("pion-directory")
    with tempfile.TemporaryFile(prefix="pion-directory-") as file:
        return os.dup(file.fileno())
