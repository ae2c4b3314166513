"""Invariant: what an earlier version of Pion wrote stays readable.

`format_1` is a data folder with a snapshot and a segment, made by running this file when the format
was fixed. A change that makes this test fail needs a new number: of the record's kind
(records.py), or of the file format (frames.py).
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from driver import Driver, state_after, state_of

from pion_server.codecs import table
from pion_server.journal.disk import Disk
from pion_server.journal.recovery import recover
from pion_server.store import mutations as m
from pion_server.store.schema import LayerFormat, Schema

FORMAT_1 = Path(__file__).parent / "format_1"

UNIFORM = Schema.same(LayerFormat(table.by_name("fp16"), 4))
PER_LAYER = Schema.each(
    (LayerFormat(table.by_name("fp32"), 2), LayerFormat(table.by_name("bf16"), 3))
)
HASHES = np.array([0, 1, 2**64 - 1], np.uint64)


def rows(sid: bytes, layer: int, start: int, data: bytes, count: int) -> m.RowBlock:
    return m.RowBlock(sid, layer, start, count, memoryview(data))


IN_THE_SNAPSHOT: list[m.Mutation] = [
    m.RegisterPrefix(b"ns", UNIFORM, PER_LAYER, m.Declaration(1, 2), b"f", m.BlockTable(2, HASHES)),
    m.StoreRows((rows(b"ns_pk", 0, 0, b"0123456789abcdef", 2), rows(b"ns_pv", 1, 5, b"sixsix", 1))),
    m.RegisterPrefix(b"child", UNIFORM, UNIFORM, parent=b"ns"),
    m.CreateSession(b"session", PER_LAYER),
    m.StoreState(b"ns", 3, b"recurrent"),
    m.SetKey(15, b"key", b"value", 1 << 62),
]
IN_THE_SEGMENT: list[m.Mutation] = [
    m.RegisterPrefix(b"later", PER_LAYER, UNIFORM, None, None, None),
    m.StoreRows((rows(b"later_pv", 7, 1, bytes(range(8)), 1),)),
    m.DropPrefix(b"child"),
    m.DropSession(b"session"),
    m.CreateSession(b"session", UNIFORM),
    m.StoreState(b"alone", 0, b"x" * 20_000),
    m.DropState(b"ns", 3),
    m.DropState(b"nowhere"),
    m.SetKey(0, b"", b""),
    m.SetKey(1, b"flushed", b""),
    m.SetExpiry(15, b"key", None),
    m.DeleteKeys(0, (b"", b"never")),
    m.FlushDb(1),
    m.FlushDb(14),
    m.SetKey(2, b"last", b"y" * 20_000),
]


def make(folder: Path) -> None:
    driver = Driver(Disk(), folder=folder)
    driver.do(*IN_THE_SNAPSHOT)
    driver.save()
    driver.do(*IN_THE_SEGMENT)
    driver.journal.close()
    (folder / "lock").unlink()


@pytest.mark.parametrize("made", ["now", "then"])
def test_a_folder_of_format_1_is_read(tmp_path: Path, made: str) -> None:
    folder = tmp_path / "data"
    if made == "now":
        make(folder)
    else:
        shutil.copytree(FORMAT_1, folder)
    assert len(list(folder.iterdir())) == 2
    found = recover(Disk(), folder)
    assert found.report.damage == []
    assert found.last == len(IN_THE_SNAPSHOT + IN_THE_SEGMENT)
    assert state_of(found.store) == state_after(IN_THE_SNAPSHOT + IN_THE_SEGMENT)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
