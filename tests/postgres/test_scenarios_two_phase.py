"""Scenario *two-phase*: durable before the PREPARE is confirmed, released at COMMIT PREPARED."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from tests.differential.local_pipeline import LocalPipeline, Options, Sink
from tests.differential.scenario import *  # noqa: F403
from tests.differential.scenario import MODES, TWO_PHASE, Scenario
from tests.postgres_fixtures import Database
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.errors import SlotLost
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.admin import create_slot, describe_slot

pytestmark = pytest.mark.postgres
TABLE = "CREATE TABLE t (id bigint PRIMARY KEY, v text)"


def rows(first: int, last: int) -> str:
    return f"INSERT INTO t SELECT i, repeat('x', 50) FROM generate_series({first}, {last}) i"


def prepare(scenario: Scenario, gid: str, *statements: str) -> None:
    session = scenario.session(*statements)
    session.execute(f"PREPARE TRANSACTION {quoted(gid)}".encode())
    session.close()


def quoted(gid: str) -> str:
    return "'" + gid.replace("'", "''") + "'"


def manifests(folder: Path) -> list[Path]:
    return list(folder.rglob("prepared/*"))


@TWO_PHASE
def test_021_prepare_then_commit_prepared_is_visible_only_then(scenario: Scenario) -> None:
    scenario.run(TABLE)
    scenario.open(two_phase=True)
    prepare(scenario, "g", rows(1, 20))
    scenario.read()
    assert scenario.transactions == [] and scenario.streamed.kinds().endswith("p")
    scenario.run("COMMIT PREPARED 'g'")
    scenario.agree()
    assert scenario.ids() == list(range(1, 21))
    (transaction,) = scenario.transactions
    assert transaction.gid == "g" and transaction.streamed
    assert manifests(scenario._folder) == []


@TWO_PHASE
def test_021_prepare_then_rollback_prepared_leaves_nothing(scenario: Scenario) -> None:
    scenario.run(TABLE)
    scenario.open(two_phase=True)
    prepare(scenario, "g", rows(1, 20), "SELECT pg_logical_emit_message(true, 'p', 'gone')")
    scenario.read()
    assert scenario.left_in_storage() and manifests(scenario._folder)
    scenario.run("ROLLBACK PREPARED 'g'", "INSERT INTO t VALUES (1, 'after')")
    scenario.agree()
    assert scenario.ids() == [1] and scenario.sink.messages == []
    assert manifests(scenario._folder) == []


@TWO_PHASE
def test_a_plain_commit_between_prepare_and_commit_prepared_comes_first(scenario: Scenario) -> None:
    scenario.run(TABLE)
    scenario.open(two_phase=True)
    prepare(scenario, "g", rows(1, 3))
    scenario.run("INSERT INTO t VALUES (10, 'between')")
    scenario.read()
    assert scenario.ids() == [10]
    scenario.run("COMMIT PREPARED 'g'", "INSERT INTO t VALUES (11, 'after')")
    scenario.agree()
    assert scenario.ids() == [10, 1, 2, 3, 11]


@TWO_PHASE
def test_empty_prepares_leave_no_rows_and_hold_nothing_back(scenario: Scenario) -> None:
    scenario.run(TABLE, "CREATE TABLE unpublished (id int)")
    scenario.open(two_phase=True, publication="FOR TABLE t")
    prepare(scenario, "nothing")
    prepare(scenario, "unpublished", "INSERT INTO unpublished VALUES (1)")
    prepare(
        scenario, "undone", "SAVEPOINT s", rows(1, 3), "ROLLBACK TO s", "INSERT INTO unpublished VALUES (1)"
    )
    prepare(scenario, "rolled back", "INSERT INTO unpublished VALUES (2)")
    scenario.read()
    for gid in ("undone", "unpublished"):
        scenario.run(f"COMMIT PREPARED '{gid}'")
    scenario.run("ROLLBACK PREPARED 'rolled back'", "COMMIT PREPARED 'nothing'")
    prepare(scenario, "one", rows(5, 5))
    scenario.run("COMMIT PREPARED 'one'")
    scenario.agree()
    assert scenario.ids() == [5] and len(scenario.transactions) == 1
    assert manifests(scenario._folder) == []


@TWO_PHASE
@pytest.mark.parametrize("postgres_server", [16], indirect=True, ids=["pg16"])
def test_fact_7_a_prepare_that_only_locked_rows_is_a_commit_prepared_alone(scenario: Scenario) -> None:
    """Such a transaction has no base snapshot: before 18 the server sends neither b nor P for it, but K (or r)."""
    only_locked_rows(scenario)
    kinds = scenario.streamed.kinds()
    assert kinds.startswith("KrK") and "P" not in kinds[:3]


@TWO_PHASE
@pytest.mark.parametrize("postgres_server", [18], indirect=True, ids=["pg18"])
def test_fact_7_a_prepare_that_only_locked_rows_is_a_prepare_without_its_begin(scenario: Scenario) -> None:
    """PostgreSQL 18 sends P without b, then K (or r)."""
    only_locked_rows(scenario)
    assert scenario.streamed.kinds().startswith("PKPrPK")


def only_locked_rows(scenario: Scenario) -> None:
    scenario.run(TABLE, "INSERT INTO t VALUES (1, 'x')")
    scenario.open(two_phase=True)
    scenario.read()  # a storage that is new covers only what is prepared from here on
    for gid, end in (("a", "COMMIT"), ("b", "ROLLBACK"), ("c", "COMMIT")):
        prepare(scenario, gid, "SELECT FROM t FOR UPDATE")
        scenario.read()
        scenario.run(f"{end} PREPARED '{gid}'")
        scenario.read()
    prepare(scenario, "one", rows(5, 5))
    scenario.run("COMMIT PREPARED 'one'")
    scenario.agree()
    assert scenario.ids() == [5] and manifests(scenario._folder) == []


@pytest.mark.parametrize("postgres_server", [16, 18], indirect=True)
def test_a_prepare_that_another_consumer_was_given_is_a_terminal_error_at_its_commit(
    database: Database, tmp_path: Path
) -> None:
    """With a storage that is new: it covers only what was prepared from then on."""
    database.execute("SET synchronous_commit = on")
    database.execute(TABLE)
    database.execute("CREATE PUBLICATION p FOR ALL TABLES")
    slot = f"s_{database.name}"
    create_slot(database.dsn(), slot, two_phase=True)
    options = Options(two_phase=True, proto_version=3)

    def read(folder: Path, epoch: str) -> Sink:
        target = Lsn.parse(database.execute("SELECT pg_current_wal_flush_lsn()::text")[0][0])
        sink = Sink()
        with LocalPipeline(
            database.dsn(), slot, ("p",), tmp_path / folder, sink, options, epoch=epoch
        ) as pipeline:
            pipeline.read_until(target)
            pipeline.stop()
        return sink

    def prepare_rows(gid: str, first: int) -> None:
        for statement in ("BEGIN", rows(first, first + 2), f"PREPARE TRANSACTION '{gid}'"):
            database.execute(statement)

    prepare_rows("theirs", 1)
    read(tmp_path / "another", "1")
    prepare_rows("ours", 11)
    database.execute("COMMIT PREPARED 'ours'")
    assert [t.gid for t in read(tmp_path / "new", "1").transactions] == ["ours"]
    database.execute("COMMIT PREPARED 'theirs'")
    for epoch in ("2", "3"):  # it is not forgotten
        with pytest.raises(SlotLost, match="the rows that came with its PREPARE are neither in the storage"):
            read(tmp_path / "new", epoch)


@TWO_PHASE
def test_10_open_prepares_committed_in_another_order_are_released_in_that(scenario: Scenario) -> None:
    scenario.run(TABLE)
    scenario.open(two_phase=True)
    for i in range(10):
        prepare(scenario, f"g{i}", rows(10 * i, 10 * i + 1))
        if i == 5:
            scenario.read()
    scenario.read()
    assert (
        scenario.transactions == [] and scenario.streamed.pipeline.stages.report().sequencer.n_prepared == 10
    )
    order = [7, 0, 9, 3, 1, 8, 2, 6, 4, 5]
    for i in order:
        scenario.run(f"COMMIT PREPARED 'g{i}'")
    scenario.agree()
    assert scenario.ids() == [n for i in order for n in (10 * i, 10 * i + 1)]


@TWO_PHASE
def test_subtransactions_and_messages_of_a_streamed_prepare(scenario: Scenario) -> None:
    scenario.run(TABLE)
    scenario.open(two_phase=True)
    session = scenario.session(rows(1, 3), "SELECT pg_logical_emit_message(true, 'p', 'kept')", "SAVEPOINT s")
    session.execute(rows(11, 13).encode())
    scenario.read()
    session.execute("ROLLBACK TO s")
    session.execute(rows(21, 23).encode())
    scenario.read()
    session.execute("PREPARE TRANSACTION 'g'")
    scenario.read()
    scenario.streamed.crash()
    scenario.run("COMMIT PREPARED 'g'")
    scenario.agree()
    assert scenario.ids() == [1, 2, 3, 21, 22, 23]
    assert [r["_seq"] for r in scenario.sink.rows()] == list(range(6))
    assert [m.content for m in scenario.sink.messages] == [b"kept"]


@TWO_PHASE
def test_fact_22_after_a_confirmed_prepare_the_server_sends_only_its_end(scenario: Scenario) -> None:
    scenario.run(TABLE)
    scenario.open(two_phase=True)
    prepare(scenario, "commits", rows(1, 5))
    prepare(scenario, "rolls back", rows(11, 15))
    scenario.read()
    assert len(manifests(scenario._folder / "s")) == 2, "durable before the position is confirmed"
    scenario.streamed.stop()
    scenario.streamed.wire.clear()
    scenario.run("ROLLBACK PREPARED 'rolls back'", "COMMIT PREPARED 'commits'")
    scenario.agree()
    kinds = scenario.streamed.kinds()
    assert kinds.replace("S", "").replace("E", "") in ("rK", "RIIIIIrK") or "p" not in kinds
    assert kinds.count("K") == kinds.count("r") == 1 and "p" not in kinds and "P" not in kinds
    assert scenario.ids() == [1, 2, 3, 4, 5]


@TWO_PHASE
def test_a_prepare_that_was_not_confirmed_is_sent_again_and_replaces_its_record(scenario: Scenario) -> None:
    scenario.run(TABLE)
    scenario.open(two_phase=True)
    prepare(scenario, "g", rows(1, 5))
    target = scenario.flush()
    pipeline = scenario.streamed.pipeline
    while "p" not in scenario.streamed.kinds():  # taken, made durable, but not confirmed
        pipeline.read_some(100)
        pipeline.slot.connection.wait_readable(0.01)
    assert len(manifests(scenario._folder / "s")) == 1 and pipeline.confirmed_lsn < target
    scenario.streamed.crash()
    scenario.read()
    # Each epoch has a manifest of its own, of the same transaction; the older one's segments are gone.
    assert [p.name.split(".")[1] for p in sorted(manifests(scenario._folder / "s"))] == ["0001", "0002"]
    assert all("/0002/" in path for path in scenario.left_in_storage())
    scenario.run("COMMIT PREPARED 'g'")
    scenario.agree()
    assert scenario.ids() == [1, 2, 3, 4, 5] and manifests(scenario._folder) == []


@TWO_PHASE
def test_commit_prepared_that_the_sink_already_holds_is_repeated_without_harm(scenario: Scenario) -> None:
    scenario.run(TABLE)
    scenario.open(two_phase=True)
    prepare(scenario, "g", rows(1, 5))
    scenario.read()
    scenario.run("COMMIT PREPARED 'g'")
    scenario.read()
    assert scenario.ids() == [1, 2, 3, 4, 5]
    # As if the crash had come before the server heard of it: the record says confirmed, the slot does not.
    scenario.streamed.crash()
    scenario.agree()
    assert scenario.ids() == [1, 2, 3, 4, 5]


@TWO_PHASE
def test_fact_21_hostile_and_reused_gids(scenario: Scenario) -> None:
    scenario.run(TABLE)
    scenario.open(two_phase=True)
    gids = ["../../etc/'\"; drop|é", "g" * 199, " ", "a/b\\c%s{0}", "g1", "g1", "g1"]
    expected = []
    for i, gid in enumerate(gids):
        prepare(scenario, gid, rows(10 * i, 10 * i + 1))
        if i % 2:
            scenario.read()
        if i % 3 == 1:
            scenario.run(f"ROLLBACK PREPARED {quoted(gid)}")
        else:
            scenario.run(f"COMMIT PREPARED {quoted(gid)}")
            expected.append(gid)
    scenario.agree()
    assert [t.gid for t in scenario.transactions] == expected
    outside = [p for p in scenario._folder.rglob("*") if "etc" in p.name or "drop" in p.name]
    assert outside == []


@TWO_PHASE
def test_fact_21_rollback_of_a_prepare_that_was_never_sent_is_nothing(scenario: Scenario) -> None:
    """Both PREPARE and ROLLBACK PREPARED are in the WAL before the reader decodes the first."""
    scenario.run(TABLE)
    prepare(scenario, "before the slot", rows(1, 3))
    # The creation of a slot waits for it (fact 28), so it is ended from here while the slot is made.
    scenario.run("ROLLBACK PREPARED 'before the slot'")
    scenario.open(two_phase=True)
    prepare(scenario, "g", rows(1, 3))
    scenario.run("ROLLBACK PREPARED 'g'", "INSERT INTO t VALUES (1, 'after')")
    scenario.agree(twin=False)
    assert scenario.ids() == [1]


@pytest.mark.parametrize("postgres_server", [16, 18], indirect=True)
@pytest.mark.parametrize("proto_version", [1, 4])
def test_fact_19_a_slots_two_phase_flag_holds_without_the_option_too(
    database: Database, proto_version: int, tmp_path: Path
) -> None:
    database.execute("SET synchronous_commit = on")
    database.execute(TABLE)
    database.execute("CREATE PUBLICATION p FOR ALL TABLES")
    slot = f"s_{database.name}"
    create_slot(database.dsn(), slot, two_phase=True)
    streaming = "off" if proto_version == 1 else "on"
    sink, wire = Sink(), []
    options = Options(streaming=streaming, proto_version=proto_version, two_phase=False)
    with LocalPipeline(database.dsn(), slot, ("p",), tmp_path, sink, options, peek=wire.append) as pipeline:
        assert pipeline.slot.two_phase, "the catalog is asked, not the settings"
        for statement in ("BEGIN", rows(1, 3), "PREPARE TRANSACTION 'g'"):
            database.execute(statement)
        target = Lsn.parse(database.execute("SELECT pg_current_wal_flush_lsn()::text")[0][0])
        pipeline.read_until(target)
        assert "".join(chr(d[25]) for d in wire) == "bRIIIP" and sink.transactions == []
        database.execute("COMMIT PREPARED 'g'")
        target = Lsn.parse(database.execute("SELECT pg_current_wal_flush_lsn()::text")[0][0])
        pipeline.read_until(target)
    assert [(t.gid, t.n_rows) for t in sink.transactions] == [("g", 3)]


@TWO_PHASE
def test_fact_20_prepared_before_two_phase_was_turned_on_arrives_whole_at_its_commit(
    scenario: Scenario,
) -> None:
    """The slot is read without two_phase, confirmed beyond the PREPARE, and then with it."""
    scenario.run(TABLE)
    scenario.open(two_phase=False)
    prepare(scenario, "early", rows(1, 3))
    scenario.run("INSERT INTO t VALUES (10, 'x')")
    scenario.read()
    scenario.streamed.stop()
    confirmed = scenario.streamed.confirmed_flush()
    for side in (scenario.streamed, scenario.twin):
        side.options = Options(
            streaming=side.options.streaming,
            proto_version=max(3, side.options.proto_version or 0),
            two_phase=True,
        )
    scenario.run("INSERT INTO t VALUES (11, 'x')")
    scenario.read()
    assert describe_slot(scenario.database.dsn(), scenario.streamed.slot).two_phase
    scenario.streamed.wire.clear()
    scenario.run("COMMIT PREPARED 'early'")
    scenario.read()
    kinds = scenario.streamed.kinds()
    assert kinds.endswith("K")
    prepares = scenario.streamed.bodies("P") + scenario.streamed.bodies("p")
    assert prepares, "it arrives only now"
    prepare_lsn = int.from_bytes(prepares[-1][1:9], "big")
    assert prepare_lsn < confirmed, "below what was confirmed, and needed all the same"
    scenario.session(rows(21, 22)).execute("COMMIT")
    scenario.agree(twin=False)
    assert scenario.ids() == [10, 11, 1, 2, 3, 21, 22]


@pytest.mark.parametrize(("proto_version", "streaming"), MODES[1:])
@pytest.mark.parametrize("version", [16, 18])
def test_023_streamed_prepare_then_server_and_pipeline_crash_then_commit_prepared(
    version: int,
    proto_version: int,
    streaming: str,
    own_postgres: Callable[..., EmbeddedPostgres],
    tmp_path: Path,
) -> None:
    server = own_postgres(version=version, settings={"synchronous_commit": "on"})
    options = Options(streaming=streaming, proto_version=proto_version, two_phase=True)

    def run(*statements: str) -> Lsn:
        with psycopg.connect(server.conninfo(), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())
            (row,) = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchall()
            return Lsn.parse(row[0])

    run(TABLE, "CREATE PUBLICATION p FOR ALL TABLES")
    create_slot(server.conninfo(), "s", two_phase=True)
    sink = Sink()
    wire: list[bytes] = []
    target = run("BEGIN", rows(1, 800), "PREPARE TRANSACTION 'g'")
    with LocalPipeline(server.conninfo(), "s", ("p",), tmp_path, sink, options, peek=wire.append) as pipeline:
        pipeline.read_until(target)
    assert "S" in [chr(d[25]) for d in wire] and sink.transactions == []
    server.restart("immediate")
    target = run("COMMIT PREPARED 'g'", "INSERT INTO t VALUES (5000, 'x')")
    with LocalPipeline(server.conninfo(), "s", ("p",), tmp_path, sink, options, epoch="2") as pipeline:
        pipeline.read_until(target)
    assert [(t.gid, t.n_rows) for t in sink.transactions] == [("g", 800), (None, 1)]
    assert [r["id"] for r in sink.rows()] == [*range(1, 801), 5000]
    assert manifests(tmp_path) == [] and list(tmp_path.rglob("epochs/*/*/*")) == []
