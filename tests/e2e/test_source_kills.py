"""A copy by ``format("xidstream")`` beside a run, killed some times; ``python -m tests.source_kills`` has more."""

from __future__ import annotations

from pathlib import Path

import pyspark
import pytest

from tests.postgres_fixtures import Database
from tests.source_kills import kill_it, set_up

pytestmark = [pytest.mark.e2e]


@pytest.mark.skipif(pyspark.__version__ < "4", reason="Spark 3.5 has no Python data sources")
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
@pytest.mark.timeout(900)
def test_a_copy_that_is_killed_beside_a_run_has_each_change_once_and_no_transaction_in_part(
    database: Database, tmp_path: Path
) -> None:
    set_up(database)
    print(kill_it(database, tmp_path, 2, seed=1))
