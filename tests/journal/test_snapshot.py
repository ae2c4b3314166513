"""Invariant: a snapshot is the state of one moment, whatever happens while it is written, and at
any time one whole snapshot is there.

(That no operation of SAVE may fail or be the last one in a harmful way is in test_faults.py.)
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from driver import FOLDER, Driver, state_after, state_of
from memory_disk import MemoryDisk
from stories import NARROW, WIDE, block, prefix_rows, register, story
from test_wal import Gate, key, reopened

from pion_server.errors import PionError
from pion_server.journal import journal, snapshot
from pion_server.journal.recovery import recover
from pion_server.journal.snapshot import capture
from pion_server.store import mutations as m
from pion_server.store.store import Store
