"""Scenario *parked tables*: one table that cannot be delivered is left out, at the same commit whatever happens.

Both slots park, so the twin says where: it gets the same transactions in other cuts, and crashes at no place.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.differential.scenario import *  # noqa: F403
from tests.differential.scenario import EXTREMES, Scenario, Side
from xidstream.actors.cli.main import main
from xidstream.pipeline.errors import ExitStatus, PoisonedChange
from xidstream.pipeline.parked import ParkedTable
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import read_progress
from xidstream.pipeline.storage.resumes import request_resume
from xidstream.pipeline.storage.storage import Storage

pytestmark = pytest.mark.postgres
TABLE = "CREATE TABLE {} (id bigint PRIMARY KEY, v text)"
POISON = r"INSERT INTO bad VALUES ({}, E'caf\xe9 hunter2')"  # Latin-1, no UTF-8
BAD = frozenset({"public.bad"})


def both(first: int, last: int) -> tuple[str, str]:
    into = "INSERT INTO {} (id, v) SELECT i, repeat('x', 50) FROM generate_series(" + f"{first}, {last}) i"
    return into.format("good"), into.format("bad")


def stored(side: Side) -> tuple[Storage, Layout]:
    return Storage(str(side.folder)), side.pipeline.layout


def parked(side: Side) -> tuple[ParkedTable, ...]:
    record = read_progress(*stored(side))
    assert record is not None
    return record.parked


def command(
    side: Side, capsys: pytest.CaptureFixture[str], *arguments: str, status: ExitStatus = ExitStatus.DONE
) -> str:
    """What ``xidstream table`` prints."""
    where = ["--dsn", side.database.dsn(), "--slot", side.slot, "--storage", str(side.folder)]
    with pytest.raises(SystemExit) as ended:
        main(["table", *arguments, *where])
    assert int(ended.value.code or 0) == status
    return capsys.readouterr().out


@pytest.mark.parametrize("journal", [False, True], ids=["", "journal"])
def test_a_table_is_parked_at_one_commit_over_crashes_and_the_others_are_whole(
    scenario_in: Callable[..., Scenario], journal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = scenario_in("SQL_ASCII")
    scenario.run(TABLE.format("good"), TABLE.format("bad"))
    scenario.open(two_phase=True, on_poison="park", journal=journal, buffer_memory_bytes=20_000)
    scenario.run(*both(1, 3))
    long = scenario.session(*both(1000, 1400))
    scenario.read()
    rolled_back = ("SAVEPOINT a", POISON.format(13), "ROLLBACK TO a")
    scenario.session(*both(10, 12), *rolled_back, *both(13, 14)).execute("COMMIT")
    scenario.read()
    assert parked(scenario.streamed) == (), "what is rolled back parks nothing"
    scenario.session(POISON.format(21), *both(22, 23)).execute("COMMIT")
    scenario.run(*both(24, 25))
    scenario.streamed.pipeline.read_some(20)
    scenario.streamed.crash()
    scenario.read()
    scenario.streamed.crash()
    long.execute("COMMIT")
    scenario.read()
    scenario.session("TRUNCATE bad", *both(30, 130)).execute("PREPARE TRANSACTION 'p'")
    scenario.read()
    scenario.streamed.crash()
    scenario.run("COMMIT PREPARED 'p'", *both(200, 201))
    scenario.agree(parked=BAD)

    assert scenario.ids("public.bad") == [1, 2, 3, *range(10, 15)]
    good = [1, 2, 3, *range(10, 15), *range(22, 26), *range(1000, 1401), *range(30, 131), 200, 201]
    assert scenario.ids("public.good") == good
    (ours,), (theirs,) = (parked(side) for side in scenario.sides)
    assert ours == theirs, "the same place and the same counts"
    assert "public.bad column v" in ours.reason and "hunter2" not in ours.reason
    assert (ours.n_transactions, ours.n_changes) == (5, 3 + 2 + 401 + 102 + 2)
    first = next(t for t in scenario.transactions if t.commit_lsn == ours.since_lsn)
    assert (first.tables, first.n_rows) == (["public.bad", "public.good"], 5)

    assert f"parked: {ours}" in command(scenario.streamed, capsys, "parked")
    (told,) = json.loads(command(scenario.streamed, capsys, "parked", "--json"))
    assert ParkedTable.from_json(told) == ours
    command(scenario.streamed, capsys, "resume", "--table", "public.good", status=ExitStatus.USAGE)
    assert "from the next start" in command(scenario.streamed, capsys, "resume", "--table", "public.bad")
    assert f"parked, and resumed at the next start: {ours}" in command(scenario.streamed, capsys, "parked")
    request_resume(*stored(scenario.twin), ours.relid, ours.table)
    for side in scenario.sides:
        side.crash()
    scenario.run(*both(300, 301))
    scenario.agree(parked=BAD)
    assert scenario.ids("public.bad")[-2:] == [300, 301]
    (ended,) = parked(scenario.streamed)
    assert ended.until_lsn is not None and not ended.awaits_sink and ended.n_changes == ours.n_changes
    scenario.session(POISON.format(400)).execute("COMMIT")
    scenario.read()
    assert [each.is_parked for each in parked(scenario.streamed)] == [False, True]


@EXTREMES
@pytest.mark.parametrize("on_poison", ["stop", "park"])
def test_a_table_whose_columns_clash_is_parked_and_a_prepared_one_with_it(
    scenario: Scenario, on_poison: str
) -> None:
    """To stop the run for it would help nobody, and stop all other tables."""
    scenario.run(TABLE.format("good"), TABLE.format("bad"))
    two_phase = scenario.proto_version > 2
    scenario.open(two_phase=two_phase, on_poison=on_poison)
    clash = 'ALTER TABLE bad ADD COLUMN "_SEQ" int'
    with_clash = scenario.session(*both(1, 2), clash, *both(3, 4))
    with_clash.execute("PREPARE TRANSACTION 'p'" if two_phase else "COMMIT")
    scenario.read()
    scenario.streamed.crash()
    scenario.run("COMMIT PREPARED 'p'" if two_phase else "SELECT 1")
    scenario.run('ALTER TABLE bad RENAME "_SEQ" TO mended', *both(5, 6))
    scenario.agree(parked=BAD)
    assert scenario.ids("public.bad") == [] and scenario.ids("public.good") == [1, 2, 3, 4, 5, 6]
    (ours,), (theirs,) = (parked(side) for side in scenario.sides)
    assert ours == theirs and "_SEQ" in ours.reason and (ours.n_transactions, ours.n_changes) == (2, 6)


def test_a_run_that_is_to_stop_stops_at_a_value_that_another_run_would_park(
    scenario_in: Callable[..., Scenario],
) -> None:
    scenario = scenario_in("SQL_ASCII")
    scenario.run(TABLE.format("good"), TABLE.format("bad"))
    scenario.open()
    scenario.session(POISON.format(1), *both(2, 3)).execute("COMMIT")
    with pytest.raises(PoisonedChange):
        scenario.read()
    assert parked(scenario.streamed) == () and scenario.ids("public.good") == []
