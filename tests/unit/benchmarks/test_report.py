"""The parts of the benchmarks that measure nothing: arithmetic, roles of processes, the tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import report, results
from benchmarks.__main__ import CASES, cases
from benchmarks.processes import role_of


def test_a_ratio_is_the_median_of_pairs() -> None:
    assert results.ratio([1.0, 9.0, 4.0], [2.0, 3.0, 4.0]) == 1.0


def test_percentiles_are_of_the_values_that_were_measured() -> None:
    assert results.percentile([float(n) for n in range(1, 101)], 99) == 100.0
    assert results.percentile([3.0], 50) == 3.0


@pytest.mark.parametrize(
    ("command_line", "role"),
    [
        ("ray::SlotReader.run", "reader"),
        ("ray::XidBuffer", "buffers"),
        ("/x/python -m xidstream.pipeline.spark.daemon", "spark"),
        ("java -cp /x/raydp/jars/raydp.jar org.apache.spark.Executor", "spark"),
        ("/x/ray/core/src/ray/gcs/gcs_server --port=1", "ray"),
        ("sleep 1", "other"),
    ],
)
def test_processes_are_counted_by_what_they_are(command_line: str, role: str) -> None:
    assert role_of(command_line) == role


def test_every_case_can_be_chosen() -> None:
    assert tuple(cases(1, 1, quick=True, with_debezium=False)) == CASES


def test_tables_stand_between_their_marks_and_the_prose_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    results.save(
        "startup", {n: {"median_s": 1.25} for n in ("first_row", "kernels_cached", "kernels_compiled")}
    )
    report.PAGE.parent.mkdir()
    report.PAGE.write_text(
        "# Page\n<!-- machine -->\n<!-- end -->\nbetween\n<!-- startup -->\nold\n<!-- end -->\n"
        "prose\n<!-- lag -->\nkept\n<!-- end -->\n"
    )
    monkeypatch.setattr(report, "_plots", lambda measured: None)  # matplotlib is an extra of the benchmarks
    report.write()
    page = report.PAGE.read_text()
    assert "| `xidstream run` to its first row in the handler | 1.2 |" in page
    assert "between" in page, "an empty place does not reach to the next one's end"
    assert "old" not in page and "prose" in page and "kept" in page, "what was not measured is left alone"
    assert json.loads(results.KEPT.read_text())["startup"]["first_row"]["median_s"] == 1.25


def test_the_case_of_many_tables_has_a_line_for_each_of_its_drains() -> None:
    drained = {"reader_growth_mb": 5.25, "buffer_growth_mb": 9.0, "reader_cpu_s": 1.5, "buffers_cpu_s": 20.0}
    measured = {"tables": 10_000, "dropped_tables": 100_000}
    lines = report._tables(measured | dict.fromkeys(("live", "live_again", "dropped"), drained))
    assert len(lines) == 2 + 3
    assert lines[-1] == "| 100,000 tables made, filled with one row, and dropped | 5.2 | 9.0 | 1.5 | 20.0 |"
    assert report._tables(None) == []


def test_the_lag_to_delta_stands_beside_its_cost() -> None:
    def case(lag_s: float) -> dict[str, dict[str, float]]:
        return {
            "lag_s": {"median": lag_s},
            "spark_cpu_s_per_million_rows": {"median": 0.04},
            "stored_bytes_per_row": {"median": 27.5},
        }

    lines = report._delta({"plain": {"10000": case(0.1)}, "savepoints": {"10000": case(0.15)}})
    assert lines[-1] == "| 10,000 | 0.10 | 0.15 | 0.04 | 28 |"
