"""Which snapshot of a table counts at an LSN, and what is said where none does."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from xidstream.pipeline.changelog.generations import StoredGenerations, generation_at, generations_of
from xidstream.pipeline.errors import PreconditionMissing
from xidstream.pipeline.pg import Lsn


def line(
    number: int, snapshot_lsn: int, valid_from: int, reason: str | None = None, until: int | None = None
) -> dict[str, Any]:
    return {
        "table": "public.t",
        "relid": 16384,
        "generation": number,
        "place": snapshot_lsn,
        "valid_from": valid_from,
        "xmin": 700,
        "xmax": 710,
        "xip": [705],
        "key": ["id"],
        "state": "finished" if reason is None else "ended",
        "reason": reason,
        "until": until,
    }


def at(lsn: int, *lines: dict[str, Any]) -> int:
    return generation_at("public.t", generations_of(lines).get("public.t", []), Lsn(lsn)).number


def refusal(lsn: int, *lines: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(PreconditionMissing) as raised:
        at(lsn, *lines)
    return raised.value.message, raised.value.remedy


def test_a_generation_stands_from_its_lsn_on_and_not_before() -> None:
    assert at(120, line(1, 99, 120)) == at(10_000, line(1, 99, 120)) == 1
    message, remedy = refusal(119, line(1, 99, 120))
    assert message == "table public.t is not known at 0/77: its snapshot is valid from 0/78"
    assert "a run of the slot brings it" in remedy


def test_a_newer_generation_leaves_older_lsns_to_the_former() -> None:
    lines = [line(2, 199, 220), line(1, 99, 120)]
    assert [at(lsn, *lines) for lsn in (120, 219, 220, 500)] == [1, 1, 2, 2]


def test_an_ended_generation_stands_up_to_what_was_proven_by_then_and_no_further() -> None:
    lines = [line(1, 99, 120, "the table was rewritten", until=140), line(1, 99, 120)]
    assert [at(lsn, *lines) for lsn in (120, 140)] == [1, 1]
    message, remedy = refusal(141, *lines)
    assert "the snapshot of 0/78 is valid up to 0/8C (the table was rewritten)" in message
    assert "xidstream snapshot request --table public.t" in remedy
    lines.append(line(2, 199, 220))
    assert [at(lsn, *lines) for lsn in (140, 220)] == [1, 2], "an ALTER does not take history away"
    message, remedy = refusal(150, *lines)
    assert message.endswith("; it is known again from 0/DC")


def test_a_generation_of_which_nothing_was_proven_stands_at_no_lsn() -> None:
    assert (
        "is valid up to 0/0"
        in refusal(120, line(1, 99, 120, "the table was rewritten", until=0), line(1, 99, 120))[0]
    )


def test_a_table_without_a_snapshot_is_not_known_and_the_message_says_how_to_ask_for_one() -> None:
    message, remedy = refusal(120)
    assert message == "table public.t has no snapshot, so what it held before its changes is not known"
    assert "xidstream snapshot request --table public.t" in remedy


def test_lines_of_a_table_are_looked_at_when_it_is_asked_for() -> None:
    """As ``generations_of`` has all of them, whatever the order of the lines."""
    lines = [
        {**line(number, 100 * number, 100 * number + 10), "table": f"public.t{i}"}
        for number in (2, 1, 3)
        for i in (7, 3, 5, 1)
    ]
    spoiled = {**line(1, 100, 110), "table": "public.spoiled", "xip": None}
    found = StoredGenerations(pa.Table.from_pylist([*lines, spoiled]))
    expected = generations_of(lines)
    assert {table: found[table] for table in expected} == expected
    assert sorted(found) == sorted([*expected, "public.spoiled"]) and len(found) == 5
    assert found.get("public.other", []) == []
    with pytest.raises(TypeError):
        found["public.spoiled"]
    schema = pa.Table.from_pylist(lines).schema
    assert dict(StoredGenerations(schema.empty_table())) == {}
