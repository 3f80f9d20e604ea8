"""Random DDL and DML beside a run: what is read at once is what the source held, or is refused.

Longer runs, and whether every table is readable again in the end, are for ``python -m tests.truth``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.conftest import Pipeline
from tests.truth.run import Settings, run_steps
from tests.truth.source import Truth, row_of
from tests.truth.watching import truths_at
from xidstream.pipeline.pg import Lsn

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_random_ddl_and_dml_is_read_at_once_as_the_source_held_it_or_refused(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    settings = Settings(12, seed=1, refresh_every=6)
    database = pipeline.database
    result = run_steps(database.connect, database.dsn(), pipeline.spark, tmp_path, settings)
    print(result)
    assert not result.verdict.differences, str(result)
    assert result.verdict.n_equal["default"] and result.verdict.n_equal["base"]


def test_the_truth_at_an_lsn_is_one_but_where_a_commit_is_not_known_exactly() -> None:
    def truth(begin: int, end: int, n: int) -> Truth:
        return Truth(Lsn(begin), Lsn(end), {"public.k": Counter([row_of({"n": n})])}, (str(n),))

    truths = [truth(100, 110, 0), truth(120, 130, 1), truth(140, 150, 2)]
    found = {lsn: [t.story for t in truths_at(truths, Lsn(lsn))] for lsn in (90, 115, 125, 130, 139, 200)}
    assert found == {
        90: [("0",)],
        115: [("0",)],
        125: [("0",), ("1",)],
        130: [("1",)],
        139: [("1",)],
        200: [("2",)],
    }
