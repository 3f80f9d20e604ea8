"""A run shortens its own log by ``log_retention``, and what is left is the source's history, or refused."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.e2e.conftest import Pipeline
from tests.e2e.test_snapshots import Row, can_read, start, until, wait_until_taken
from xidstream import ChangeLog
from xidstream.actors.snapshots import coordinator
from xidstream.pipeline.delta import upkeep
from xidstream.pipeline.delta.upkeep import UpkeepPace, UpkeepStep
from xidstream.pipeline.errors import PreconditionMissing
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.sinks import log_shortening

pytestmark = pytest.mark.e2e


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_a_run_folds_and_cuts_its_log_and_what_is_left_is_the_history_of_the_source(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "_LOOK_S", 0.5)
    # The test cannot wait for an hour, nor for a thousand commits.
    monkeypatch.setattr(log_shortening, "LEAST_AGE_S", 0.5)
    monkeypatch.setitem(upkeep.PACES, UpkeepStep.FILES, UpkeepPace(10, 0.5))
    database, dice = pipeline.database, random.Random(36)
    database.execute("create table t (id int primary key, n int)")
    database.execute("insert into t select i, i from generate_series(1, 50) i")
    database.execute("create publication p for all tables")
    start(pipeline, log_retention="1")
    wait_until_taken(pipeline, 1)
    log = ChangeLog(str(pipeline.delta))
    history: dict[Lsn, Counter[Row]] = {}

    def change(n_commits: int) -> None:
        for _ in range(n_commits):
            database.execute(f"update t set n = n + 1 where id = {dice.randint(1, 50)}")
            lsn = until(database).before
            history[lsn] = Counter(database.execute("select id, n from t"))
            pipeline.wait_until(lambda lsn=lsn: log.last_commit_lsn >= lsn)  # type: ignore[misc]

    # Without it the log would be cut again and again, also while it is read below.
    reader = log.consumer("reader")
    reader.commit(1)
    change(12)
    assert log.cut_lsn("public.t") == 0, "the reader needs all"
    reader.commit(sorted(history)[5])
    n_rounds = 0
    while not log.cut_lsn("public.t"):  # each round is due once more
        n_rounds += 1
        assert n_rounds <= 10, "the run has cut nothing"
        change(10)
    pipeline.wait_until(lambda: can_read(pipeline, log, "public.t"))
    log.wait()
    oldest = log.oldest_lsn("public.t")
    assert oldest is not None and min(history) < oldest < max(history)
    above = [lsn for lsn in history if lsn >= oldest]
    for lsn in [min(above), max(above), *dice.sample(above, 4)]:
        found = log.as_of(pipeline.spark, lsn=lsn)["public.t"].select("id", "n").collect()
        assert Counter(tuple(row) for row in found) == history[lsn], str(lsn)
    for lsn in dice.sample([lsn for lsn in history if lsn < oldest], 3):
        with pytest.raises(PreconditionMissing, match=f"shortened up to .*oldest state.*{oldest}"):
            log.as_of(pipeline.spark, lsn=lsn)["public.t"]
    with pytest.raises(PreconditionMissing, match="its change log was shortened"):
        log.changes(pipeline.spark, "public.t", since=log.cut_lsn("public.t") - 1)
    assert pipeline.query.isActive
    pipeline.query.stop()
