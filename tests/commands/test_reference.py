"""Invariant: docs/PROTOCOL.md says what the command table says, and the table is complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pion_server.commands import reference
from pion_server.commands.registry import SUBCOMMANDS, TABLE, Command

PAGE = Path(__file__).resolve().parents[2] / "docs" / "PROTOCOL.md"
reference.load_families()
ROWS = [*TABLE.values(), *SUBCOMMANDS.values()]


def test_the_file_is_up_to_date() -> None:
    assert PAGE.read_text() == reference.page(), (
        "run: python -m pion_server.commands.reference > docs/PROTOCOL.md"
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_command_is_on_the_page_with_all_its_parts(row: Command) -> None:
    page = reference.page()
    name = row.name.replace("|", " ")
    assert page.count(f"\n### {name}\n") == 1
    assert all(form.split(" ")[: name.count(" ") + 1] == name.split() for form in forms(row))
    assert row.summary
    assert row.reply
    assert all(error.startswith("-") for error in row.errors)


def forms(row: Command) -> list[str]:
    return reference.forms(row).splitlines()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_wire_form_has_at_least_the_words_of_the_arity(row: Command) -> None:
    for form in forms(row):
        assert len(required(form)) >= abs(row.arity)


def required(form: str) -> list[str]:
    """The words of a wire form without its options, repeats and choices."""
    depth, kept = 0, ""
    for character in form:
        depth += (character == "[") - (character == "]")
        kept += character if depth == 0 and character != "]" else ""
    return re.sub(r"\S+ \| |\.\.\.", "", kept).split()


def test_every_group_has_a_title() -> None:
    assert {row.group for row in ROWS} == set(reference.GROUPS)
