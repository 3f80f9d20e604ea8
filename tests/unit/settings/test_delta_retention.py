"""For how long replaced files stay, by what a table says alone."""

from __future__ import annotations

from xidstream.pipeline.settings.delta_retention import REMOVED_FILES, DeltaRetention, kept_files_s


def test_a_table_tells_the_runs_setting_or_a_persons_time() -> None:
    told = DeltaRetention(files_h=48).missing({})
    assert kept_files_s(told) == 48 * 3600
    assert kept_files_s({**told, REMOVED_FILES: "interval 3 days"}) == 72 * 3600, "set by a person"
    assert kept_files_s({}) == 12 * 3600 and kept_files_s({REMOVED_FILES: "soon"}) is None


def test_a_table_without_retention_remembers_removed_files_until_somebody_has_removed_them() -> None:
    assert DeltaRetention(log_h=0, files_h=0).properties[REMOVED_FILES] == "interval 1 hours"
    assert DeltaRetention(files_h=12).properties[REMOVED_FILES] == "interval 24 hours"
