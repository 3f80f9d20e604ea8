"""What a refresh does with a table: decided from facts, one answer each."""

from __future__ import annotations

import pyarrow as pa
import pytest

from xidstream.pipeline.mirror.base_table import TEXT_FIELD
from xidstream.pipeline.mirror.refresh import Answer, new_columns, what_to_do

USUAL = {
    "is_built": True,
    "is_same_generation": True,
    "has_changes": True,
    "has_truncate": False,
    "columns_fit": True,
    "has_ranges": True,
}


@pytest.mark.parametrize(
    ("facts", "answer"),
    [
        ({}, Answer.SWAP),
        ({"has_changes": False}, Answer.KEEP),
        ({"has_changes": False, "has_ranges": False}, Answer.KEEP),
        ({"has_ranges": False}, Answer.REWRITE),
        ({"has_truncate": True}, Answer.REWRITE),
        ({"columns_fit": False}, Answer.REWRITE),
        ({"columns_fit": False, "has_changes": False}, Answer.REWRITE),
        ({"is_same_generation": False, "has_changes": False}, Answer.BUILD),
        ({"is_built": False, "is_same_generation": False}, Answer.BUILD),
    ],
)
def test_each_table_gets_the_cheapest_answer_that_is_right(facts: dict[str, bool], answer: Answer) -> None:
    assert what_to_do(**{**USUAL, **facts}) is answer


ID, NAME = pa.field("id", pa.int64()), pa.field("name", pa.string())


def test_columns_behind_the_others_are_added_and_any_other_difference_has_the_table_written_anew() -> None:
    more = pa.field("more", pa.date32())
    assert new_columns([ID, NAME], [ID, NAME]) == []
    assert new_columns([ID, NAME, TEXT_FIELD], [ID, NAME, more]) == [more]
    assert new_columns([ID, NAME], [ID]) is None, "a dropped column"
    assert new_columns([ID, NAME], [ID, pa.field("name", pa.int64())]) is None, "another type"
    assert new_columns([ID], [ID, pa.field("ID", pa.int64())]) is None, "Delta ignores the case of names"
