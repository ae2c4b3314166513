"""Invariant: whatever happens to the bytes of a log or snapshot, no other value is served.

Attacked by cutting the files at every byte, flipping every byte, and wiping out stretches of them.
What is lost is whole units, and each loss is reported.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from driver import FOLDER, Driver, state_after, state_of
from memory_disk import MemoryDisk
from stories import WIDE, block, prefix_rows, register, story

from pion_server.errors import PionError
from pion_server.journal import frames, reading, snapshot
from pion_server.journal.frames import FILE_BYTES
from pion_server.journal.recovery import recover
from pion_server.store import mutations as m
from pion_server.store.units import CHUNK_KEYS

STORY = story()


def written(*, save_at: int | None = None, policy: Any = "always") -> MemoryDisk:
    """A disk with the whole story on it, each mutation acknowledged before the next."""
    driver = Driver(MemoryDisk(), policy=policy)
    for i, mutation in enumerate(STORY):
        if i == save_at:
            driver.save()
        driver.do(mutation)
    if save_at == len(STORY):
        driver.save()
    driver.journal.close()
    return driver.disk.after()


def record_ends(disk: MemoryDisk, name: str) -> list[int]:
    """Where each record of the story ends in its file, as a log without damage tells."""
    sizes = []
    for i in range(len(STORY) + 1):
        driver = Driver(MemoryDisk(), policy="no")
        driver.do(*STORY[:i])
        sizes.append(len(driver.disk.content(name)) if i else FILE_BYTES)
        driver.journal.close()
    assert sizes[-1] == len(disk.content(name))
    return sizes


def loses_only(found: dict[str, Any], whole: dict[str, Any]) -> bool:
    """Whether every unit that was found is the right one."""
    return all(whole["units"].get(unit) == value for unit, value in found["units"].items())


def test_a_log_cut_at_any_byte_is_a_prefix_of_what_was_acknowledged() -> None:
    disk = written()
    (name,) = disk.segments()
    ends = record_ends(disk, name)
    states = [state_after(STORY[:i]) for i in range(len(STORY) + 1)]
    for size in places(len(disk.content(name)), 11):
        cut = disk.after()
        del cut.content(name)[size:]
        found = recover(cut, FOLDER)
        whole = sum(end <= size for end in ends[1:])
        assert state_of(found.store) == states[whole], size
        assert found.last == whole
        assert found.report.damage == []
        if size >= FILE_BYTES:
            assert found.report.torn_bytes == size - ends[whole]


# (bits to flip, every how many bytes of the older part of a file)
PATTERNS = [
    (0xFF, 11),
    *(pytest.param(*each, marks=pytest.mark.long) for each in ((0xFF, 1), (0x01, 1), (0x80, 1))),
]


def places(size: int, stride: int) -> list[int]:
    """Every byte of the last 1200, half a dozen records, and some of those before."""
    return [*range(0, size - 1200, stride), *range(max(0, size - 1200), size)]


@pytest.mark.parametrize(("pattern", "stride"), PATTERNS)
def test_a_flipped_byte_of_the_log_costs_at_most_the_unit_it_was_about(
    pattern: int, stride: int
) -> None:
    disk = written()
    (name,) = disk.segments()
    whole = state_after(STORY)
    before_last = state_after(STORY[:-1])
    losses = 0
    for at in places(len(disk.content(name)), stride):
        flipped = disk.after()
        flipped.content(name)[at] ^= pattern
        found = recover(flipped, FOLDER)
        state = state_of(found.store)
        assert found.report.torn_bytes == 0
        if state == whole:
            continue
        losses += 1
        assert found.report.damage, at
        if found.last == len(STORY):
            assert loses_only(state, whole), at
        else:  # nothing says that the last record was synced before its bytes changed
            assert found.last == len(STORY) - 1
            assert state == before_last, at
    # Only payloads are there once; frames and metas are there twice.
    assert 0 < losses <= sum(map(len, payload_stretches(disk, name)))


def payload_stretches(disk: MemoryDisk, name: str) -> list[bytes]:
    content = bytes(disk.content(name))
    values = [bytes(b.data) for mu in STORY if isinstance(mu, m.StoreRows) for b in mu.blocks]
    values += [bytes(mu.value) for mu in STORY if isinstance(mu, m.SetKey)]
    values += [mu.blocks.hashes.tobytes() for mu in STORY if isinstance(mu, m.RegisterPrefix)]
    assert all(value in content for value in values)
    return values


@pytest.mark.parametrize(("pattern", "stride"), PATTERNS)
def test_a_flipped_byte_of_a_snapshot_costs_at_most_the_unit_it_was_about(
    pattern: int, stride: int
) -> None:
    disk = written(save_at=len(STORY))
    assert disk.segments() == []
    whole = state_after(STORY)
    losses = 0
    for at in places(len(disk.content("snapshot")), stride):
        flipped = disk.after()
        flipped.content("snapshot")[at] ^= pattern
        found = recover(flipped, FOLDER)
        state = state_of(found.store)
        assert found.last == len(STORY)
        if state != whole:
            losses += 1
            assert loses_only(state, whole), at
            assert found.report.damage, at
    assert losses > 0


def test_a_snapshot_cut_at_any_byte_loses_units_and_says_so() -> None:
    disk = written(save_at=len(STORY))
    whole = state_after(STORY)
    for size in places(len(disk.content("snapshot")), 11):
        cut = disk.after()
        del cut.content("snapshot")[size:]
        found = recover(cut, FOLDER)
        assert loses_only(state_of(found.store), whole), size
        assert found.report.damage, size


def test_after_any_damage_the_server_goes_on_and_keeps_what_it_then_acknowledges() -> None:
    """What was lost is written again by its client; the damage must not take it a second time."""
    disk = written(save_at=12)
    names = [*disk.segments(), "snapshot"]
    places = [(name, at) for name in names for at in range(0, len(disk.content(name)), 17)]
    again = [
        m.DropPrefix(b"a"),
        register(b"a", tokens=3),
        prefix_rows(b"a", 900),
        m.SetKey(0, b"first", b"new"),
    ]
    for name, at in places:
        flipped = disk.after()
        flipped.content(name)[at] ^= 0xFF
        driver = Driver(flipped, STORY)
        driver.do(*again)
        if b"s" not in driver.store.sessions:
            driver.do(m.CreateSession(b"s", WIDE))
        driver.do(m.StoreRows((block(b"s", 0, 9, 1, 12, 901),)))
        before = state_of(driver.store)
        reopened = Driver(driver.disk.after())
        assert reopened.report.damage == [], (name, at)
        assert state_of(reopened.store) == before, (name, at)
        driver.journal.close()
        reopened.journal.close()


def test_a_damaged_record_is_kept_for_a_person_to_look_at_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = written()
    (name,) = disk.segments()
    rows = bytes(STORY[9].blocks[0].data)  # type: ignore[union-attr]
    at = disk.content(name).find(rows)
    disk.content(name)[at] ^= 1
    driver = Driver(disk)
    (kept,) = [each for each in driver.disk.listing() if each.startswith(f"{name}.")]
    assert bytes(disk.content(kept)).count(bytes(rows[1:])) == 1
    assert kept in driver.report.damage[0]
    warnings = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert warnings == [f"{FOLDER}: {damage}" for damage in driver.report.damage]
    driver.journal.close()


def test_later_rows_of_a_lost_prefix_do_not_make_it_look_complete() -> None:
    log = [
        register(b"a", tokens=None),
        prefix_rows(b"a", 1),
        register(b"a", tokens=None),
        prefix_rows(b"a", 2, start=3),
        m.SetKey(0, b"k", b"v"),
    ]
    driver = Driver(MemoryDisk())
    driver.do(*log)
    driver.journal.close()
    (name,) = driver.disk.segments()
    lost = log[1].blocks[0].data  # type: ignore[union-attr]
    driver.disk.content(name)[driver.disk.content(name).find(lost)] ^= 1
    found = recover(driver.disk.after(), FOLDER)
    assert state_of(found.store)["units"] == {("key", 0, b"k"): (b"v", None)}


def test_a_unit_that_is_dropped_after_it_was_damaged_is_whole_again() -> None:
    log = [
        register(b"a"),
        prefix_rows(b"a", 1),
        m.DropPrefix(b"a"),
        register(b"a"),
        prefix_rows(b"a", 2),
    ]
    driver = Driver(MemoryDisk())
    driver.do(*log)
    driver.journal.close()
    (name,) = driver.disk.segments()
    lost = log[1].blocks[1].data  # type: ignore[union-attr]
    driver.disk.content(name)[driver.disk.content(name).find(lost)] ^= 1
    found = recover(driver.disk.after(), FOLDER)
    assert state_of(found.store) == state_after(log)
    assert len(found.report.damage) == 1


def wiped(disk: MemoryDisk, name: str, start: int, end: int) -> MemoryDisk:
    found = disk.after()
    found.content(name)[start:end] = bytes(end - start)
    return found


@pytest.mark.parametrize("length", [300, 700])
def test_where_records_vanish_that_were_on_the_disk_nothing_before_them_is_trusted(
    length: int,
) -> None:
    disk = written()
    (name,) = disk.segments()
    size = len(disk.content(name))
    whole = state_after(STORY)
    emptied = 0
    for start in range(FILE_BYTES, size - length - 400, 11):
        found = recover(wiped(disk, name, start, start + length), FOLDER)
        state = state_of(found.store)
        assert loses_only(state, whole), start
        assert found.report.damage, start
        emptied += not any(unit[0] != "key" for unit in state["units"])
        assert state["units"]["key", 0, b"last"] == (b"word", None)
    assert emptied > 0


def test_where_records_vanish_that_were_never_synced_the_log_ends() -> None:
    """As a power cut leaves it: pages of the end are there, and others before them are not."""
    disk = written(policy="no")
    (name,) = disk.segments()
    ends = record_ends(disk, name)
    states = [state_after(STORY[:i]) for i in range(len(STORY) + 1)]
    for i in range(1, len(STORY) - 1):
        found = recover(wiped(disk, name, ends[i], ends[i + 1]), FOLDER)
        assert state_of(found.store) == states[i], i
        assert found.last == i
        assert found.report.damage, i
        assert found.suspects == {FOLDER / name}


def test_a_file_that_is_missing_is_noticed() -> None:
    disk = written(save_at=12)
    del disk.files[FOLDER / "snapshot"]
    driver = Driver(disk)
    found = state_of(driver.store)
    assert driver.report.damage
    assert loses_only(found, state_after(STORY))
    assert not any(unit[0] == "session" for unit in found["units"])
    driver.journal.close()
    assert [each for each in disk.listing() if each.startswith("wal.")] == [
        "wal.00000000000000000013.0"  # only in quarantine
    ]


def test_segments_under_each_others_names_are_noticed() -> None:
    first = Driver(MemoryDisk())
    first.do(m.SetKey(0, b"one", b"1"))
    first.journal.close()
    second = Driver(first.disk.after(), first.log)
    second.do(m.SetKey(0, b"other", b"2"))
    second.journal.close()
    disk = second.disk.after()
    one, other = (FOLDER / name for name in disk.segments())
    disk.files[one], disk.files[other] = disk.files[other], disk.files[one]
    found = recover(disk, FOLDER)
    assert found.report.damage
    assert loses_only(state_of(found.store), state_after(second.log))


def test_bytes_inside_a_value_are_never_taken_for_a_record() -> None:
    """A client stores a piece of somebody's log, and then the record around it is damaged."""
    forged = written(policy="no")
    (name,) = forged.segments()
    disk = MemoryDisk()
    driver = Driver(disk)
    driver.do(m.SetKey(0, b"before", b"1"), m.SetKey(0, b"v", bytes(forged.content(name))))
    driver.do(m.SetKey(0, b"after", b"2"))
    driver.journal.close()
    (name,) = disk.segments()
    at = disk.content(name).find(b"\xcaPh\xfe", FILE_BYTES + 1)
    for i in range(60):
        flipped = disk.after()
        flipped.content(name)[at + i] ^= 0xFF
        found = recover(flipped, FOLDER)
        assert state_of(found.store) == state_after(driver.log), i


def boundaries(disk: MemoryDisk, name: str, kind: frames.FileKind) -> list[int]:
    """Where each record of a whole file starts, and where the last one ends."""
    with reading.LogFile(disk, FOLDER / name, kind) as file:
        spans = list(file.spans(1))
    assert all(isinstance(span, reading.Span) for span in spans)
    return [spans[0].start, *(span.end for span in spans)]


def test_where_records_vanish_from_a_snapshot_only_their_units_are_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when the log behind it goes on about them as if they were there."""
    monkeypatch.setattr(snapshot, "RECORD_BYTES", 10)  # many records for each unit
    driver = Driver(MemoryDisk())
    driver.do(*STORY, *(prefix_rows(b"a", 70 + i, start=i) for i in (40, 50, 60)))
    driver.save()
    edges = boundaries(driver.disk, "snapshot", frames.FileKind.SNAPSHOT)
    for namespace in (b"a", b"b", b"child"):
        driver.do(register(namespace, tokens=None), prefix_rows(namespace, 80, start=20))
    driver.do(m.CreateSession(b"s", WIDE), m.StoreRows((block(b"s", 0, 30, 1, 12, 81),)))
    driver.do(m.SetKey(2, b"chunk-metadata", b"shape"))
    driver.journal.close()
    whole = state_of(driver.store)
    assert len(edges) > 20
    for first in range(len(edges) - 1):
        for last in range(first + 1, min(first + 4, len(edges))):
            disk = driver.disk.after()
            disk.content("snapshot")[edges[first] : edges[last]] = bytes(edges[last] - edges[first])
            found = recover(disk, FOLDER)
            state = state_of(found.store)
            assert found.report.damage
            assert loses_only(state, whole), (first, last)
            assert len(state["units"]) >= 5, (first, last)
            halves = [("key", 2, b"chunk-" + half) in state["units"] for half in CHUNK_KEYS]
            assert halves[0] == halves[1], (first, last)


def test_a_power_cut_amid_a_write_does_not_cost_what_was_there_before() -> None:
    driver = Driver(MemoryDisk())
    driver.do(*STORY)
    (name,) = driver.disk.segments()
    start = len(driver.disk.content(name))
    last = prefix_rows(b"a", 90)
    driver.do(last, m.SetKey(0, b"in the same batch", b"1"))
    driver.journal.close()
    at = driver.disk.content(name).find(bytes(last.blocks[1].data), start)
    # As if both had been written at once, and the sync had not come to its end.
    without_evidence(driver.disk, name, len(STORY) + 1)
    driver.disk.content(name)[at : at + 8] = bytes(8)
    found = recover(driver.disk, FOLDER)
    assert found.last == len(STORY)
    assert state_of(found.store) == state_after(STORY)
    assert found.report.damage


def without_evidence(disk: MemoryDisk, name: str, sequence: int) -> None:
    """Make the frames behind a record those of one batch with it."""
    with reading.LogFile(disk, FOLDER / name, frames.FileKind.LOG) as file:
        header = file.header
        spans = [span for span in file.spans(1) if isinstance(span, reading.Span)]
    assert header is not None
    for span in spans[sequence:]:
        frame = replace(span.frame, synced=sequence - 1)
        head = frame.pack(frames.HEAD_MAGIC, header.salt)
        tail = frame.pack(frames.TAIL_MAGIC, header.salt)
        content = disk.content(name)
        content[span.start : span.start + len(head)] = head
        content[span.end - len(tail) : span.end] = tail


@pytest.mark.parametrize("window", [frames.FRAME_BYTES, 64, 100, 1 << 20])
def test_the_next_record_is_found_wherever_the_file_is_read_in_parts(
    monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(reading, "WINDOW", window)
    disk = written()
    (name,) = disk.segments()
    ends = record_ends(disk, name)
    for start in ends[:-1]:
        disk.content(name)[start + 10] ^= 1  # in every first frame
    found = recover(disk, FOLDER)
    assert state_of(found.store) == state_after(STORY)
    assert len(found.report.damage) == len(STORY)


def test_a_value_full_of_what_begins_a_record_costs_no_more_than_another() -> None:
    driver = Driver(MemoryDisk())
    driver.do(m.SetKey(0, b"k", frames.HEAD_MAGIC * 100_000), m.SetKey(0, b"l", b""))
    driver.journal.close()
    (name,) = driver.disk.segments()
    driver.disk.content(name)[FILE_BYTES + 10] ^= 1
    driver.disk.trace.clear()
    found = recover(driver.disk, FOLDER)
    assert state_of(found.store) == state_after(driver.log)
    assert driver.disk.trace.count("read") < 20


def test_a_file_of_a_newer_format_is_refused_and_left_alone() -> None:
    disk = written()
    (name,) = disk.segments()
    newer = bytearray(disk.content(name))
    header = frames.FileHeader(frames.FileKind.LOG, 1, 5)
    version, frames.VERSION = frames.VERSION, 2
    try:
        newer[:FILE_BYTES] = header.pack()
    finally:
        frames.VERSION = version
    disk.content(name)[:] = newer
    with pytest.raises(PionError, match="format 2 of the log is not known"):
        Driver(disk)
    assert disk.content(name) == newer


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_random_damage_of_any_size_never_serves_another_value() -> None:
    dice = random.Random(1)
    disks = [written(save_at=at) for at in (None, 5, 12, len(STORY))]
    states = [state_after(STORY[:i]) for i in range(len(STORY) + 1)]
    for _ in range(20_000):
        disk = dice.choice(disks).after()
        name = dice.choice(
            [*disk.segments(), *(["snapshot"] if "snapshot" in disk.listing() else [])]
        )
        content = disk.content(name)
        for _ in range(dice.randint(1, 3)):
            start = dice.randrange(len(content))
            end = min(len(content), start + dice.choice([1, 4, 64, 512]))
            content[start:end] = dice.randbytes(end - start)
        found = recover(disk, FOLDER)
        state = state_of(found.store)
        assert loses_only(state, states[found.last]), name
        assert state == states[found.last] or found.report.damage, name
