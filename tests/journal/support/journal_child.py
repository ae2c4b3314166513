"""A process that journals and says what is acknowledged, until somebody kills it.

    journal_child.py <folder> <policy> <seed>

Mutation number i is the same in every process, so whoever finds the folder can tell what has to be
in it. Each line of output is the number up to which everything is acknowledged.
"""

from __future__ import annotations

import os
import random
import sys
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from driver import Driver

from pion_server.codecs import table
from pion_server.journal.disk import Disk
from pion_server.store import mutations as m
from pion_server.store.schema import LayerFormat, Schema

ROWS = Schema.same(LayerFormat(table.by_name("fp16"), 64))
PREFIXES = 5


def mutation(i: int) -> m.Mutation:
    """Number i: namespaces that are made, filled, dropped and made anew, and keys among them."""
    dice = np.random.default_rng(i)
    turn, step = divmod(i - 1, 8)
    namespace = b"prefix %d" % (turn % PREFIXES)
    match step:
        case 0:
            return m.DropPrefix(namespace)
        case 1:
            return m.RegisterPrefix(namespace, ROWS, ROWS, m.Declaration(1, 96), b"%d" % turn)
        case 2 | 3 | 4:
            start, count = 32 * (step - 2), 32
            blocks = [
                m.RowBlock(namespace + side, 0, start, count, memoryview(dice.bytes(count * 128)))
                for side in (b"_pk", b"_pv")
            ]
            return m.StoreRows(tuple(blocks))
        case 5:
            return m.StoreState(namespace, 0, memoryview(dice.bytes(40_000)))
        case 6:
            return m.SetKey(0, b"key %d" % (turn % 50), dice.bytes(100))
    return m.DeleteKeys(0, (b"key %d" % (turn % 70),))


def tell(acknowledged: int) -> None:
    """In one piece: several threads do this."""
    os.write(sys.stdout.fileno(), b"%d\n" % acknowledged)


def main(folder: str, policy: str, seed: str) -> None:
    dice = random.Random(int(seed))
    driver = Driver(Disk(), policy=policy, folder=Path(folder))  # type: ignore[arg-type]
    done = driver.journal.committed
    driver.log = [mutation(1)] * done  # only its length counts
    driver.journal.watch(lambda: tell(driver.journal.committed))
    tell(done)
    saving: Future[None] | None = None
    while True:
        for _ in range(dice.randint(1, 6)):
            driver.send(mutation(len(driver.log) + 1))
        if dice.random() < 0.02 and (saving is None or saving.done()):
            saving = driver.journal.save()
        if driver.journal.backlog_bytes > 1 << 20:
            driver.settle()


if __name__ == "__main__":
    main(*sys.argv[1:])
