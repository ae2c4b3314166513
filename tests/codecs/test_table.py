"""Invariant: a codec's name and number mean one format for ever, and wrong ones are told why."""

from __future__ import annotations

import pytest

from pion_server.codecs.table import by_name, by_number, names
from pion_server.errors import PionError

# What is on disks already. Rows may be added here; a row that changes breaks stored data.
NUMBERS = {"fp32": 1, "fp16": 2, "bf16": 3}


def test_the_numbers_on_disk_are_pinned() -> None:
    assert {name: by_name(name).number for name in names()} == NUMBERS


@pytest.mark.parametrize("name", NUMBERS)
def test_a_codec_is_found_by_its_name_in_any_case_and_by_its_number(name: str) -> None:
    codec = by_name(name)
    assert codec.name == name
    assert by_name(name.upper()) is codec
    assert by_number(codec.number) is codec


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(PionError, match=r"unknown codec 'int5'.*fp32, fp16, bf16"):
        by_name("int5")
    with pytest.raises(PionError) as caught:
        by_name("x" * 100_000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("number", [0, 4, -1, 1 << 40])
def test_an_unknown_number_is_refused(number: int) -> None:
    with pytest.raises(PionError, match=str(number)):
        by_number(number)
