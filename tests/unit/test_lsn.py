"""Where the last record before an insert position ends."""

from __future__ import annotations

import pytest

from xidstream.pipeline.pg import Lsn


@pytest.mark.parametrize(
    ("insert_lsn", "record_end"),
    [
        ("0/2002018", "0/2002000"),  # behind another page's header
        ("0/2000028", "0/2000000"),  # behind a segment's first one
        ("0/2002028", "0/2002028"),  # 16 bytes of a record from the page before
        ("0/2002078", "0/2002078"),
        ("0/0", "0/0"),
    ],
)
def test_an_insert_position_behind_a_page_header_is_no_end_of_a_record(
    insert_lsn: str, record_end: str
) -> None:
    assert Lsn.parse(insert_lsn).record_end == Lsn.parse(record_end)
