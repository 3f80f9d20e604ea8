"""What a person sees of an error in Python: the remedy, wherever the error comes out."""

from __future__ import annotations

import copy
import pickle
import resource
import sys
import traceback
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from xidstream.pipeline import errors
from xidstream.pipeline.errors import POLICY, ConfigError, SlotInUse, XidstreamError, known_reason
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.spark_errors import fault_of

needs_notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes there")


def shown(error: BaseException) -> list[str]:
    """The end of a traceback, as the interpreter prints it."""
    return "".join(traceback.format_exception(error)).splitlines()


def test_an_unknown_setting_shows_the_one_that_was_meant_in_the_traceback() -> None:
    """It was in an attribute alone: ``ConfigError: unknown setting 'slto'``."""
    with pytest.raises(ConfigError) as caught:
        Config.of({"slto": "shop"})
    assert shown(caught.value)[-2:] == [
        "xidstream.pipeline.errors.ConfigError: unknown setting 'slto'",
        "  remedy: did you mean slot?",
    ]


@needs_notes
def test_the_text_stays_one_sentence_where_there_are_notes() -> None:
    assert str(SlotInUse("slot s is in use")) == "slot s is in use"


def test_the_remedy_is_in_the_text_where_there_are_no_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.10."""
    monkeypatch.setattr(errors, "HAS_NOTES", False)
    error = SlotInUse("slot s is in use", remedy="end the other")
    assert str(error) == "slot s is in use\n  remedy: end the other"
    assert shown(error)[-2:] == [
        "xidstream.pipeline.errors.SlotInUse: slot s is in use",
        "  remedy: end the other",
    ]
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@needs_notes
@pytest.mark.parametrize("error", [SlotInUse("in use"), SlotInUse("in use", remedy="end the other")])
def test_an_error_that_has_crossed_processes_shows_its_remedy_once(error: XidstreamError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(again), again.message, again.remedy) == (SlotInUse, "in use", error.remedy)
        assert shown(again) == shown(error)
        assert shown(again)[-1] == f"  remedy: {error.remedy}"
        assert "".join(shown(again)).count("remedy:") == 1


@pytest.mark.parametrize("cls", POLICY)
def test_every_class_shows_a_remedy(cls: type[XidstreamError]) -> None:
    assert shown(cls("it failed"))[-1] == f"  remedy: {POLICY[cls].remedy}"


def test_no_remedy_of_a_class_has_anybody_delete_what_may_be_the_only_copy() -> None:
    """That of a lost slot was to drop it together with its storage, and with the journal that no sink held."""
    for policy in POLICY.values():
        for word in ("slot drop --storage", "discard", "remove", "rm "):
            assert word not in policy.remedy


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device", "/rows/4711"), "No space left on device"),
        (
            Exception(
                "Failed to parse parquet: External: Generic LocalFileSystem error: Unable to copy data to file: No "
                "space left on device (os error 28)"
            ),
            "No space left on device",
        ),
        (
            OSError(
                "Generic S3 error\n\x1b[31m↳\x1b[0m Server returned non-2xx status 403 Forbidden: key 4711"
            ),
            "status 403 Forbidden",
        ),
        (ValueError("row 4711 is wrong"), None),
    ],
)
def test_a_foreign_error_tells_why_it_was_refused_and_nothing_else(
    error: Exception, reason: str | None
) -> None:
    assert known_reason(error) == reason


def test_deltas_own_error_tells_what_the_system_said(tmp_path: Path) -> None:
    table = pa.table({"n": range(10_000)})
    write_deltalake(tmp_path / "t", table)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))  # it fails as a full disk does
    try:
        with pytest.raises(Exception, match="os error") as raised:
            write_deltalake(tmp_path / "t", table, mode="append")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert known_reason(raised.value) == "File too large"
    assert (
        fault_of(raised.value, "writing table public.t").message == "writing table public.t: File too large"
    )
