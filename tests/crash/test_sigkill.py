"""Invariant: what a killed process had acknowledged is there again, and nothing is different.

A child journals as fast as it can and prints what is acknowledged; it is killed at a random moment,
again and again in the same folder, snapshots being taken all the while. The ledger of what it
printed is kept out here.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import journal_child
import pytest
from driver import state_of

from pion_server.journal.disk import Disk
from pion_server.journal.recovery import recover
from pion_server.journal.wal import Policy
from pion_server.store.store import Store

POLICIES: list[Policy] = ["always", "everysec", "no"]


def kill_a_child(folder: Path, policy: Policy, seed: int) -> int:
    """Let a child run for a moment; returns what it had acknowledged last."""
    child = subprocess.Popen(
        [sys.executable, journal_child.__file__, str(folder), policy, str(seed)],
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(random.Random(seed).randint(1, 80))]
    child.kill()
    lines += child.stdout.read().splitlines(keepends=True)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    return max(int(line) for line in lines if line.endswith(b"\n"))


def kill_again_and_again(folder: Path, policy: Policy, rounds: int) -> None:
    oracle, there = Store(), 0
    for seed in range(rounds):
        acknowledged = kill_a_child(folder, policy, seed)
        found = recover(Disk(), folder)
        assert found.report.damage == []
        assert found.last >= acknowledged
        assert found.last >= there
        for i in range(there + 1, found.last + 1):
            oracle.apply(journal_child.mutation(i))
        there = found.last
        assert state_of(found.store) == state_of(oracle), seed
    assert there > 10 * rounds


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_acknowledged_is_lost_by_sigkill(tmp_path: Path, policy: Policy) -> None:
    kill_again_and_again(tmp_path, policy, rounds=3)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("policy", "rounds"), [("always", 400), ("everysec", 400), ("no", 200)])
def test_nothing_acknowledged_is_lost_by_a_thousand_sigkills(
    tmp_path: Path, policy: Policy, rounds: int
) -> None:
    kill_again_and_again(tmp_path, policy, rounds)
