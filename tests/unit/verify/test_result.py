"""What a verification found, told and kept: the JSON goes back, and no value is shown that was not asked for."""

from __future__ import annotations

import dataclasses
import json

import pytest

from xidstream.actors.cli.verify import status_of
from xidstream.pipeline.errors import ConfigError, ExitStatus, UsageError
from xidstream.pipeline.verify.result import (
    DifferenceKind,
    Differences,
    DifferingRange,
    DifferingRow,
    TableVerification,
    Verdict,
    Verification,
)
from xidstream.pipeline.verify.settings import VerifySettings
from xidstream.pipeline.verify.verifying import Record

EQUAL = TableVerification("public.a", Verdict.EQUAL, "0/10", 0, 7, 7, 1)
UNKNOWN = TableVerification("public.b", Verdict.NOT_VERIFIED, reason="it has no snapshot")
RANGE = DifferingRange(("id", "day"), ("5", "2026-01-01"), None, 4, 3)
ROWS = (
    DifferingRow(
        DifferenceKind.CHANGED, {"id": "5", "day": None}, ("note",), 1, {"note": "x"}, {"note": None}
    ),
    DifferingRow(DifferenceKind.MISSING, {"id": "6", "day": "2026-01-01"}),
    DifferingRow(DifferenceKind.EXTRA, None, n=3),
)
DIFFERS = TableVerification(
    "public.c",
    Verdict.DIFFERS,
    "0/20",
    2,
    4,
    3,
    9,
    ("new",),
    None,
    1.5,
    Differences(2, 3, 1, {"note": 1}, (RANGE,), ROWS, ("id >= 5 and day > '2026-01-01'", "id < 3")),
)


@pytest.mark.parametrize("one", [EQUAL, UNKNOWN, DIFFERS])
def test_a_tables_result_goes_through_json_and_back(one: TableVerification) -> None:
    assert TableVerification.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_the_status_says_equal_only_of_all_tables_and_differs_before_unknown() -> None:
    assert status_of(Verification([EQUAL])) is ExitStatus.DONE
    assert status_of(Verification([EQUAL, UNKNOWN])) is ExitStatus.PRECONDITION
    assert status_of(Verification([EQUAL, UNKNOWN, DIFFERS])) is ExitStatus.FAILED
    assert status_of(Verification([])) is ExitStatus.PRECONDITION
    assert not Verification([]).is_equal and not Verification([EQUAL, UNKNOWN]).is_equal


def test_the_text_names_range_key_and_column() -> None:
    text = str(Verification([EQUAL, UNKNOWN, DIFFERS]))
    for part in (
        "public.a: equal at 0/10: 7 rows",
        "public.b: not verified: it has no snapshot",
        "id, day from (5, 2026-01-01): 4 rows in the source, 3 in the log",
        "id=5, day=null: differs in note",
        "id=6, day=2026-01-01: missing in the log",
        "… and 1 more",
        "what mends it, one when the one before is done:",
        """xidstream snapshot request --table public.c --where 'id >= 5 and day > '"'"'2026-01-01'"'"''""",
        "xidstream snapshot request --table public.c --where 'id < 3'",
        "1 table equal, 1 different, 1 not verified",
    ):
        assert part in text


def test_what_no_filter_can_name_is_mended_by_the_whole_table_and_many_ranges_are_counted() -> None:
    whole = dataclasses.replace(DIFFERS, differences=Differences(0, 1, 0, {}, (RANGE,), ()))
    assert str(whole).endswith("  what mends it:\n    xidstream snapshot request --table public.c")
    repairs = tuple(f"id = {i}" for i in range(30))
    many = dataclasses.replace(DIFFERS, differences=Differences(0, 1, 0, {}, (RANGE,), (), repairs))
    assert "id = 9'" in str(many) and "id = 10" not in str(many) and "… and 20 more ranges" in str(many)
    older = DIFFERS.to_json()
    del older["differences"]["repairs"]
    found = TableVerification.from_json(older).differences
    assert found is not None and found.repairs == ()


def test_a_record_gives_back_what_was_finished_of_the_same_log_and_nothing_of_one_that_ended(
    tmp_path,
) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "verify.json"
    Record(path, "log").write(Verification([EQUAL, DIFFERS]), finished=False)
    assert Record(path, "log").tables == {"public.a": EQUAL, "public.c": DIFFERS}
    assert Record(path, "another").tables == {}
    Record(path, "log").write(Verification([EQUAL, DIFFERS]), finished=True)
    assert Record(path, "log").tables == {}
    path.write_text("{}")
    with pytest.raises(UsageError):
        Record(path, "log")


def test_a_setting_out_of_range_is_refused_with_its_name() -> None:
    with pytest.raises(ConfigError, match="rows_per_range"):
        VerifySettings(rows_per_range=0)
