"""Where records of the WAL begin and end around a position."""

from __future__ import annotations

import pytest

from xidstream.pipeline.pg import Lsn


@pytest.mark.parametrize(
    ("insert_lsn", "record_end"),
    [
        ("0/2002018", "0/2002000"),  # after another page's header
        ("0/2000028", "0/2000000"),  # after a segment's first one
        ("0/2002028", "0/2002028"),  # 16 bytes of a record from the page before
        ("0/2002078", "0/2002078"),
        ("0/0", "0/0"),
    ],
)
def test_an_insert_position_behind_a_page_header_is_no_end_of_a_record(
    insert_lsn: str, record_end: str
) -> None:
    assert Lsn.parse(insert_lsn).record_end == Lsn.parse(record_end)


@pytest.mark.parametrize(
    ("lsn", "next_record"),
    [("0/2000078", "0/2000078"), ("0/2000077", "0/2000078"), ("0/2000071", "0/2000078"), ("0/0", "0/0")],
)
def test_a_record_begins_at_the_next_multiple_of_8(lsn: str, next_record: str) -> None:
    assert Lsn.parse(lsn).next_record == Lsn.parse(next_record)


def test_bytes_before_an_lsn_end_at_its_beginning() -> None:
    assert (Lsn(0x100).minus(2), Lsn(1).minus(2), Lsn(0).before) == (0xFE, 0, 0)
    assert Lsn(0x100).before == Lsn(0x100).minus(1) == 0xFF
