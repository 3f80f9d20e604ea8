"""A table's snapshot, taken and held on a real server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.postgres_fixtures import VERSIONS, Database
from tests.slot_changes import Transaction, make_slot, slot_changes
from tests.waiting import wait_until
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.errors import PreconditionMissing, SnapshotInterrupted, SnapshotLost, Unsupported
from xidstream.pipeline.initial_copy.copy_schedule import SMALL_BYTES
from xidstream.pipeline.initial_copy.snapshot_book import SnapshotBook
from xidstream.pipeline.parked import ParkedTable
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.postgres import table_holder, table_snapshot
from xidstream.pipeline.postgres.admin import Blocker, create_slot
from xidstream.pipeline.postgres.connection import ReplicationConnection
from xidstream.pipeline.postgres.opening import slot_settings
from xidstream.pipeline.postgres.snapshot_sources import survey
from xidstream.pipeline.postgres.stream_options import PG15
from xidstream.pipeline.postgres.table_holder import TableHolder
from xidstream.pipeline.postgres.table_snapshot import HeldSnapshot, take
from xidstream.pipeline.preflight.snapshot_decision import decide_snapshots, with_slot_xmax
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.snapshot.decision import Decision
from xidstream.pipeline.snapshot.tables import PublishedSource
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import write_progress
from xidstream.pipeline.storage.snapshot_record import read_decision
from xidstream.pipeline.storage.storage import Storage

pytestmark = pytest.mark.postgres

on_18 = pytest.mark.parametrize("postgres_server", [18], indirect=True)


@pytest.fixture
def holder(database: Database) -> Iterator[TableHolder]:
    database.execute("SET synchronous_commit = on")
    holder = TableHolder(database.dsn(), ["p"])
    yield holder
    holder.close()


@pytest.fixture
def table(database: Database) -> Database:
    """With table t of 1000 rows, published before the slot was made."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    database.execute("CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)")
    database.execute("INSERT INTO t SELECT i, 'x' FROM generate_series(1, 1000) i")
    make_slot(database)
    return database


def source_of(database: Database, name: str = "public.t") -> PublishedSource:
    (found,) = (source for source in survey(database.connection, ["p"]) if source.name == name)
    return found


def rows_in(database: Database, held: HeldSnapshot, columns: str = "*") -> list[tuple[Any, ...]]:
    """What a reader sees that imports the snapshot, over all leaves."""
    found: list[tuple[Any, ...]] = []
    with database.connect() as reader:
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        reader.execute(f"SET TRANSACTION SNAPSHOT '{held.snapshot_name}'".encode())
        for leaf in held.source.leaves:
            query = f'SELECT {columns} FROM ONLY "{leaf.schema}"."{leaf.table}"'
            found += reader.execute(query.encode()).fetchall()
    return sorted(found)


def xid_of(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("SELECT txid_current()").fetchone()
    assert row is not None
    return int(row[0])


class Holding:
    """A call of ``hold`` on a thread of its own."""

    def __init__(self, holder: TableHolder, source: PublishedSource, **options: Any) -> None:
        self.told: list[tuple[Blocker, ...]] = []
        self.held: HeldSnapshot | None = None
        self.error: BaseException | None = None

        def hold() -> None:
            try:
                self.held = holder.hold(source, on_wait=self.told.append, **options)
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=hold)
        self._thread.start()

    def result(self) -> HeldSnapshot:
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        assert self.held is not None
        return self.held


def test_a_reader_sees_what_was_there_and_nothing_that_came_later(
    table: Database, holder: TableHolder
) -> None:
    held = holder.hold(source_of(table), wait_for_writers=False)
    table.execute("INSERT INTO t VALUES (2000, 'later')")
    assert len(rows_in(table, held)) == 1000
    assert held.by_range and held.source.leaves[0].n_pages > 0
    assert held.bounds.snapshot_lsn < held.bounds.valid_from
    wait_until(lambda: holder.flushed_past(held.bounds.valid_from))
    holder.release(held.source.relation.relid)

    def is_gone() -> bool:
        try:
            rows_in(table, held)
        except psycopg.Error:
            return True
        return False

    wait_until(is_gone)  # the server ends the session some time after it was told


# -- transactions that are open ------------------------------------------------------------------------


def test_a_prepared_transaction_is_waited_for_where_it_wrote_before(
    table: Database, holder: TableHolder
) -> None:
    with table.connect() as writer:
        writer.execute("BEGIN")
        writer.execute("INSERT INTO t VALUES (2000, 'x')")
        xid = xid_of(writer)
        writer.execute("PREPARE TRANSACTION 'old one'")
    holding = Holding(holder, source_of(table), wait_for_writers=True)
    wait_until(lambda: holding.told)
    ((blocker,),) = holding.told[:1]
    assert (blocker.gid, blocker.xid, blocker.pid) == ("old one", xid % 2**32, None)
    table.execute("COMMIT PREPARED 'old one'")
    assert len(rows_in(table, holding.result())) == 1001


def test_a_transaction_that_is_prepared_while_it_is_waited_for_is_waited_for_still(
    table: Database, holder: TableHolder
) -> None:
    with table.connect() as writer:
        writer.execute("BEGIN")
        writer.execute("INSERT INTO t VALUES (2000, 'x')")
        holding = Holding(holder, source_of(table), wait_for_writers=True)
        wait_until(lambda: holding.told)
        writer.execute("PREPARE TRANSACTION 'later'")
    wait_until(lambda: any(blocker.gid == "later" for told in holding.told for blocker in told))
    assert holding.held is None
    table.execute("ROLLBACK PREPARED 'later'")
    assert len(rows_in(table, holding.result())) == 1000


def transactions_by_row(table: Database) -> dict[str, Transaction]:
    """What the slot has of table t, by the id of the first row that each transaction inserted."""
    return {str(each.inserted[0]): each for each in slot_changes(table).transactions if each.inserted}


def contained(held: HeldSnapshot, transaction: Transaction) -> bool:
    return held.bounds.contains(transaction.xid, transaction.commit_lsn)


def test_what_is_prepared_when_a_snapshot_is_taken_comes_behind_it(
    table: Database, holder: TableHolder
) -> None:
    with table.connect() as writer:
        for row in (2001, 2002):
            writer.execute("BEGIN")
            writer.execute(f"INSERT INTO t VALUES ({row}, 'x')".encode())
            writer.execute(f"PREPARE TRANSACTION 'p{row}'".encode())
    table.execute("COMMIT PREPARED 'p2001'")
    held = holder.hold(source_of(table), wait_for_writers=False)
    table.execute("COMMIT PREPARED 'p2002'")
    assert [row for row, _ in rows_in(table, held)] == [*range(1, 1001), 2001]
    stream = transactions_by_row(table)
    assert contained(held, stream["2001"]) and not contained(held, stream["2002"])


@pytest.mark.parametrize("ends", ["COMMIT", "PREPARE TRANSACTION 'p'"])
def test_a_checkpoint_tells_up_to_which_lsn_all_is_contained_if_nobody_is_open_from_before_it(
    table: Database, holder: TableHolder, ends: str
) -> None:
    table.execute("INSERT INTO t VALUES (2001, 'x')")
    with table.connect() as writer:
        writer.execute("BEGIN")
        writer.execute("INSERT INTO t VALUES (2002, 'x')")
        if "PREPARE" in ends:
            writer.execute(ends.encode())
        table.execute("CHECKPOINT")
        assert holder.hold(source_of(table), wait_for_writers=False).bounds.contained_upto == 0
        writer.execute(b"COMMIT" if ends == "COMMIT" else b"COMMIT PREPARED 'p'")
        table.execute("CHECKPOINT")
        writer.execute("BEGIN")
        writer.execute("INSERT INTO t VALUES (2003, 'x')")
        held = holder.hold(source_of(table), wait_for_writers=False)
        writer.execute("COMMIT")
    stream = transactions_by_row(table)
    commits = [stream[row].commit_lsn for row in ("2001", "2002", "2003")]
    assert commits[0] < commits[1] <= held.bounds.contained_upto < commits[2]


def test_a_snapshot_that_waited_for_its_tables_writers_has_all_of_the_table_from_before_it_began_to_wait(
    table: Database, holder: TableHolder
) -> None:
    """Though a transaction of another table is open since before the last checkpoint, and stays so."""
    table.execute("CREATE TABLE other (id int)")
    with table.connect() as elsewhere, table.connect() as writer:
        elsewhere.execute("BEGIN")
        elsewhere.execute("INSERT INTO other VALUES (1)")
        table.execute("CHECKPOINT")
        table.execute("INSERT INTO t VALUES (2001, 'before')")
        writer.execute("BEGIN")
        writer.execute("INSERT INTO t VALUES (2002, 'open')")
        holding = Holding(holder, source_of(table), wait_for_writers=True)
        wait_until(lambda: bool(holder.waiting_for()))
        writer.execute("COMMIT")
        held = holding.result()
        elsewhere.execute("ROLLBACK")
    stream = transactions_by_row(table)
    assert held.bounds.contained_upto == 0
    assert stream["2001"].commit_lsn < held.bounds.whole_upto < stream["2002"].commit_lsn
    assert {("2001",), ("2002",)} <= {(str(row[0]),) for row in rows_in(table, held)}


def test_a_transaction_with_400_open_subtransactions_comes_behind_the_snapshot_whole(
    table: Database, holder: TableHolder
) -> None:
    """More than a session's 64 that others can see (PGPROC_MAX_CACHED_SUBXIDS), some ended and some open."""

    def write(writer: psycopg.Connection[Any], first: int) -> None:
        writer.execute("BEGIN")
        for i in range(400):
            writer.execute(f"SAVEPOINT s{i}".encode())
            writer.execute(f"INSERT INTO t VALUES ({first + i}, 'x')".encode())
            if i % 4 == 3:
                writer.execute(f"RELEASE s{i}".encode())

    with table.connect() as writer, table.connect() as earlier:
        write(earlier, 2001)
        earlier.execute("COMMIT")
        write(writer, 3001)
        held = holder.hold(source_of(table), wait_for_writers=False)
        writer.execute("SAVEPOINT later")
        writer.execute("INSERT INTO t VALUES (3401, 'x')")
        writer.execute("COMMIT")
    assert [row for row, _ in rows_in(table, held)] == [*range(1, 1001), *range(2001, 2401)]
    stream = transactions_by_row(table)
    assert len(stream["3001"].inserted) == 401
    assert contained(held, stream["2001"]) and not contained(held, stream["3001"])


def test_of_the_transactions_that_begin_while_a_snapshot_waits_it_contains_those_that_ended(
    table: Database, holder: TableHolder
) -> None:
    with table.connect() as old, table.connect() as new, table.connect() as later:
        old.execute("BEGIN")
        old.execute("INSERT INTO t VALUES (2001, 'it waits for this one')")
        holding = Holding(holder, source_of(table), wait_for_writers=True)
        wait_until(lambda: holding.told)
        new.execute("INSERT INTO t VALUES (2002, 'began and ended meanwhile')")
        new.execute("BEGIN")
        new.execute("INSERT INTO t VALUES (2003, 'began meanwhile, and nobody waits for it')")
        old.execute("COMMIT")
        held = holding.result()
        later.execute("BEGIN")
        later.execute("INSERT INTO t VALUES (2004, 'began behind it')")
        later.execute("COMMIT")
        new.execute("COMMIT")
    assert [row for row, _ in rows_in(table, held)] == [*range(1, 1001), 2001, 2002]
    stream = transactions_by_row(table)
    assert {row: contained(held, stream[row]) for row in ("2001", "2002", "2003", "2004")} == {
        "2001": True,
        "2002": True,
        "2003": False,
        "2004": False,
    }
    assert held.bounds.snapshot_lsn < stream["2002"].commit_lsn <= held.bounds.valid_from


def test_a_writer_of_a_partition_that_never_touched_the_root_is_waited_for(
    database: Database, holder: TableHolder
) -> None:
    for statement in (
        "CREATE TABLE t (id int, day int) PARTITION BY RANGE (day)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE u (id int PRIMARY KEY)",
        "CREATE PUBLICATION p FOR TABLE u WITH (publish_via_partition_root = true)",
    ):
        database.execute(statement)
    make_slot(database)
    with database.connect() as writer:
        writer.execute("BEGIN")
        writer.execute("INSERT INTO t1 VALUES (1, 1)")
        database.execute("ALTER PUBLICATION p ADD TABLE t")
        source = source_of(database)
        hasty = TableHolder(database.dsn(), ["p"])
        early = hasty.hold(source, wait_for_writers=False)
        assert rows_in(database, early) == []
        holding = Holding(holder, source, wait_for_writers=True)
        wait_until(lambda: holding.told)
        assert holding.told[0][0].pid == writer.info.backend_pid and holding.held is None
        writer.execute("INSERT INTO t1 VALUES (2, 1)")
        writer.execute("COMMIT")
    held = holding.result()
    hasty.close()
    assert rows_in(database, held) == [(1, 1), (2, 1)]
    (stream,) = slot_changes(database).transactions
    assert stream.inserted == ["2"], "the stream lacks the row from before, so the snapshot must have it"
    assert contained(held, stream) and not contained(early, stream)


def test_a_transaction_that_was_prepared_before_the_table_was_published_is_waited_for(
    database: Database, holder: TableHolder
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    database.execute("CREATE TABLE u (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION p FOR TABLE u")
    make_slot(database)
    with database.connect() as writer:
        for row in (1, 2):
            writer.execute("BEGIN")
            writer.execute(f"INSERT INTO t VALUES ({row}, 'x')".encode())
            writer.execute(f"INSERT INTO u VALUES ({row})".encode())
            writer.execute(f"PREPARE TRANSACTION 'p{row}'".encode())
    database.execute("ALTER PUBLICATION p ADD TABLE t")
    holding = Holding(holder, source_of(database), wait_for_writers=True)
    wait_until(lambda: len(holding.told) > 0)
    assert sorted(str(blocker.gid) for blocker in holding.told[0]) == ["p1", "p2"]
    database.execute("COMMIT PREPARED 'p1'")
    wait_until(lambda: [blocker.gid for blocker in holding.told[-1]] == ["p2"])
    database.execute("ROLLBACK PREPARED 'p2'")
    held = holding.result()
    assert rows_in(database, held) == [(1, "x")]
    (stream,) = slot_changes(database).transactions
    relid = held.source.relation.relid
    assert stream.inserted == ["1"] and stream.inserted_into(relid) == [], "the stream has only the row of u"
    assert contained(held, stream)


def test_a_transaction_that_commits_right_behind_a_snapshot_does_so_behind_where_it_is_valid_from(
    table: Database, holder: TableHolder
) -> None:
    """On a quiet server its COMMIT begins where the WAL ended: who said that all up to there is known lost it."""
    with table.connect() as writer:
        writer.execute("BEGIN")
        writer.execute("INSERT INTO t VALUES (2001, 'x')")
        held = holder.hold(source_of(table), wait_for_writers=False)
        ((ended,),) = table.execute("SELECT pg_current_wal_insert_lsn()::text")
        writer.execute("COMMIT")
    stream = transactions_by_row(table)
    assert not contained(held, stream["2001"])
    assert held.bounds.snapshot_lsn < held.bounds.valid_from < stream["2001"].commit_lsn
    assert held.bounds.valid_from.next_record <= Lsn.parse(ended) <= stream["2001"].commit_lsn


# -- commits that are not flushed, or not visible ---------------------------------------------------------


@contextmanager
def own_database(server: EmbeddedPostgres) -> Iterator[Database]:
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        database = Database(server, "postgres", connection)
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        database.execute("CREATE PUBLICATION p FOR TABLE t")
        yield database


@pytest.mark.slow
def test_an_asynchronous_commit_that_a_snapshot_saw_survives_a_crash_once_it_is_confirmed(
    own_postgres: Callable[..., EmbeddedPostgres],
) -> None:
    # The WAL writer flushes such commits by itself, some delays later.
    server = own_postgres(settings={"wal_writer_delay": "10s"})
    with own_database(server) as database:
        make_slot(database)
        relid = source_of(database).relation.relid
        holder = TableHolder(database.dsn(), ["p"])
        with database.connect() as writer:
            writer.execute("SET synchronous_commit = off")
            writer.execute("INSERT INTO t VALUES (1, 'seen before it is flushed')")
        held = holder.hold(source_of(database), wait_for_writers=False)
        assert rows_in(database, held) == [(1, "seen before it is flushed")]
        ((flushed,),) = database.execute("SELECT pg_current_wal_flush_lsn()::text")
        assert Lsn.parse(flushed) < held.bounds.valid_from, "a crash would lose the row now"
        assert not holder.confirm([relid], held.bounds.valid_from)
        server.restart("immediate")
        holder.close()
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        database = Database(server, "postgres", connection)
        assert database.execute("SELECT id FROM t") == [(1,)]
        assert contained(held, transactions_by_row(database)["1"])


def test_a_commit_that_waits_for_a_synchronous_standby_is_in_the_wal_and_not_in_the_snapshot(
    own_postgres: Callable[..., EmbeddedPostgres],
) -> None:
    """LSNs do not tell what a snapshot contains: this commit's is below the snapshot's place."""
    server = own_postgres()
    with own_database(server) as database:
        make_slot(database)
        database.execute("SET synchronous_commit = local")
        set_standby(database, "nobody")
        waiting = threading.Thread(target=insert, args=(database, 1))
        waiting.start()
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        wait_until(lambda: database.execute(waits) == [(1,)])
        database.execute("INSERT INTO t VALUES (2, 'waits for nobody')")
        database.execute("CHECKPOINT")
        holder = TableHolder(database.dsn(), ["p"])
        held = holder.hold(source_of(database), wait_for_writers=False)
        assert rows_in(database, held) == [(2, "waits for nobody")]
        set_standby(database, "")
        waiting.join(60)
        assert rows_in(database, held) == [(2, "waits for nobody")]
        assert database.execute("SELECT id FROM t ORDER BY id") == [(1,), (2,)]
        stream = transactions_by_row(database)
        assert stream["1"].commit_lsn < stream["2"].commit_lsn <= held.bounds.valid_from
        assert contained(held, stream["2"]) and not contained(held, stream["1"])
        assert held.bounds.contained_upto < stream["1"].commit_lsn, "no LSN behind it tells what is contained"
        holder.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_first_snapshot_waits_for_a_commit_from_before_the_slot_that_waits_for_its_standby(
    own_postgres: Callable[..., EmbeddedPostgres], tmp_path: Path, version: int
) -> None:
    """Its record lies between the place from which the new slot decodes and the one from which it sends. So the stream
    has not got it, and a snapshot that does not see it would lack it for ever."""
    server = own_postgres(version=version)
    with own_database(server) as database, ExitStack() as sessions:
        database.execute("SET synchronous_commit = local")
        database.execute("CREATE TABLE other (id int)")
        set_standby(database, "nobody")
        config = Config(
            dsn=database.dsn(),
            slot="s_postgres",
            publication=("p",),
            storage=str(tmp_path),
            create_slot=True,
            snapshot="initial",
        )
        connection = sessions.enter_context(ReplicationConnection(slot_settings(config)))
        decision = decide_snapshots(config, connection)
        assert decision.published and decision.slot_xmax is None
        early, late = (sessions.enter_context(database.connect()) for _ in range(2))
        early.execute("BEGIN")
        early.execute("INSERT INTO other VALUES (1)")
        creating = threading.Thread(
            target=create_slot,
            args=(database.dsn(), "s_postgres"),
            kwargs={"two_phase": False, "failover": False},
        )
        creating.start()
        waits_for = (
            "SELECT 1 FROM pg_locks WHERE NOT granted AND locktype = 'transactionid' AND transactionid = '{}'"
        )
        wait_until(lambda: database.execute(waits_for.format(xid_of(early))))
        late.execute("BEGIN")
        late.execute("INSERT INTO other VALUES (2)")
        early.execute("ROLLBACK")
        wait_until(lambda: database.execute(waits_for.format(xid_of(late))))
        waiting = threading.Thread(target=insert, args=(database, 1))
        waiting.start()
        waits = "SELECT pid::int FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        wait_until(lambda: database.execute(waits))
        late.execute("ROLLBACK")
        creating.join(60)
        decision = with_slot_xmax(config, connection, decision)
        layout = Layout(int(connection.identify_system().system_identifier), "s_postgres", "snapshots")
        assert read_decision(Storage(str(tmp_path)), layout) == decision and decision.slot_xmax is not None
        book = SnapshotBook(Storage(str(tmp_path)), layout, decision)
        (wanted,) = book.needs([source_of(database)], [], Lsn(0)).wanted
        holder = TableHolder(database.dsn(), ["p"])
        held = holder.hold(wanted.source, wait_for_writers=wanted.wait_for_writers)
        assert rows_in(database, held) == [] and book.may_lack(held.bounds)
        holding = Holding(holder, wanted.source, wait_for_writers=True)
        wait_until(lambda: holding.told)
        set_standby(database, "")
        waiting.join(60)
        held = holding.result()
        assert rows_in(database, held) == [(1, "waits")] and not book.may_lack(held.bounds)
        assert transactions_by_row(database) == {}, "the stream has not got it"
        holder.close()


def test_the_snapshot_behind_a_park_waits_for_a_commit_that_waits_for_a_synchronous_standby(
    own_postgres: Callable[..., EmbeddedPostgres], tmp_path: Path
) -> None:
    """The commit's row was left out of the stream, so whoever does not see it in the snapshot lacks it for ever."""
    server = own_postgres()
    with own_database(server) as database:
        database.execute("SET synchronous_commit = local")
        set_standby(database, "nobody")
        waiting = threading.Thread(target=insert, args=(database, 1))
        waiting.start()
        waits = "SELECT pid::int FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        wait_until(lambda: database.execute(waits))
        ((pid,),) = database.execute(waits)
        source = source_of(database)
        ((text,),) = database.execute("SELECT pg_current_wal_insert_lsn()::text")
        relid, until_lsn = source.relation.relid, Lsn.parse(text)
        storage, layout = Storage(str(tmp_path)), Layout(7, "s", "e")
        park = ParkedTable(relid, "public.t", Lsn(8), Xid(9), "why", until_lsn=until_lsn)
        write_progress(storage, layout, until_lsn, parked=[park])
        decision = Decision(takes_snapshots=True, published={relid: source.published_as})
        (wanted,) = SnapshotBook(storage, layout, decision).needs([source], [], Lsn(0)).wanted
        holder = TableHolder(database.dsn(), ["p"])
        holding = Holding(holder, wanted.source, wait_for_writers=wanted.wait_for_writers)
        wait_until(lambda: holding.told or holding.held)
        assert holding.held is None and [blocker.pid for blocker in holding.told[0]] == [pid]
        set_standby(database, "")
        waiting.join(60)
        held = holding.result()
        assert rows_in(database, held) == [(1, "waits")] and not park.spoils(held.bounds.snapshot_lsn)
        holder.close()


def set_standby(database: Database, name: str) -> None:
    """Commits wait for the standby of this name, or for none."""
    database.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
    database.execute("SELECT pg_reload_conf()")
    wait_until(lambda: database.execute("SHOW synchronous_standby_names") == [(name,)])


def insert(database: Database, row: int) -> None:
    with database.connect() as writer:
        writer.execute(f"INSERT INTO t VALUES ({row}, 'waits')".encode())


# -- tables that change ---------------------------------------------------------------------------------


def test_a_snapshot_behind_another_has_a_higher_place_though_nothing_was_written_in_between(
    table: Database, holder: TableHolder
) -> None:
    """Two had one place in an idle database, and the sink took the rows of the later for those of the earlier."""
    source = source_of(table)
    place = Lsn(0)
    for _ in range(5):
        held = holder.hold(source, wait_for_writers=False, behind=place)
        holder.release(source.relation.relid)
        assert held.bounds.snapshot_lsn > place
        place = held.bounds.snapshot_lsn


def test_a_snapshot_that_is_older_than_a_rewrite_reads_no_rows_and_is_refused(table: Database) -> None:
    """Step 1: the lock comes before the snapshot. The other way round ALTER TYPE slips in between."""
    source = source_of(table)
    with table.connect() as session:
        session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        session.execute("SELECT 1")
        table.execute("ALTER TABLE t ALTER id TYPE bigint")
        session.execute("LOCK TABLE ONLY t IN ACCESS SHARE MODE")
        assert session.execute("SELECT count(*) FROM t").fetchone() == (0,), "1000 rows were there"
        _, _, rewritten = take(session, [source.relation.relid], Lsn(1))
        assert rewritten == {source.relation.relid}
    changed = [each for each in slot_changes(table).transactions if each.changes]
    assert changed == [], "and the stream has none of them either"


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("ALTER TABLE t ALTER id TYPE bigint", "the type of column id changed"),
        ("ALTER TABLE t ADD c int", "its definition changed"),
        ("ALTER TABLE t RENAME TO u", "was dropped or renamed"),
        ("DROP TABLE t", "was dropped or renamed"),
        ("ALTER PUBLICATION p DROP TABLE t", "is not published any more"),
        ("ALTER PUBLICATION p SET TABLE t WHERE (id > 5)", "the row filter of its publication changed"),
    ],
)
@on_18
def test_a_table_that_changed_since_it_was_surveyed_is_not_held(
    table: Database, holder: TableHolder, statement: str, reason: str
) -> None:
    source = source_of(table)
    table.execute(statement)
    with pytest.raises(SnapshotInterrupted, match=reason):
        holder.hold(source, wait_for_writers=False)
    locks = "SELECT count(*) FROM pg_locks WHERE relation = %s AND pid <> pg_backend_pid()"
    wait_until(lambda: table.execute(locks, source.relation.relid) == [(0,)])


@on_18
def test_the_writers_of_a_table_that_is_not_published_any_more_are_not_waited_for(
    table: Database, holder: TableHolder
) -> None:
    source = source_of(table)
    with table.connect() as writer:
        writer.execute("BEGIN")
        writer.execute("INSERT INTO t VALUES (2000, 'x')")
        table.execute("ALTER PUBLICATION p DROP TABLE t")
        with pytest.raises(SnapshotInterrupted, match="is not published any more"):
            Holding(holder, source, wait_for_writers=True).result()
        writer.execute("ROLLBACK")


def test_vacuum_full_before_the_lock_is_no_change(table: Database, holder: TableHolder) -> None:
    source = source_of(table)
    table.execute("DELETE FROM t WHERE id > 10")
    table.execute("VACUUM FULL t")
    held = holder.hold(source, wait_for_writers=False)
    assert len(rows_in(table, held)) == 10 and held.source.leaves[0].n_pages == 1


@on_18
def test_an_alter_table_that_runs_is_waited_for_a_while_at_a_time(
    table: Database, holder: TableHolder
) -> None:
    source = source_of(table)
    with table.connect() as other:
        other.execute("BEGIN")
        other.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        holding = Holding(holder, source, wait_for_writers=False, lock_timeout_ms=100)
        wait_until(lambda: holding.told)
        assert holding.held is None and holding.told[-1][0].pid == other.info.backend_pid
        other.execute("COMMIT")
    assert len(rows_in(table, holding.result())) == 1000


@on_18
def test_an_alter_table_waits_behind_a_held_table_until_it_is_released(
    table: Database, holder: TableHolder
) -> None:
    held = holder.hold(source_of(table), wait_for_writers=False)
    with table.connect() as other:
        other.execute("SET lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            other.execute("ALTER TABLE t ADD c int")
        table.execute("INSERT INTO t VALUES (2000, 'writers go on')")
        holder.release(held.source.relation.relid)
        other.execute("SET lock_timeout = 0")
        other.execute("ALTER TABLE t ADD c int")


def test_a_partition_that_is_attached_while_the_snapshot_waits_is_not_left_out(
    database: Database, holder: TableHolder
) -> None:
    """Our lock does not stop ATTACH. Its rows are in the snapshot, and in no leaf that was found before."""
    for statement in (
        "CREATE TABLE t (id int, day int) PARTITION BY RANGE (day)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10)",
        "CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root = true)",
    ):
        database.execute(statement)
    with database.connect() as writer:
        writer.execute("BEGIN")
        writer.execute("INSERT INTO t VALUES (1, 1)")
        holding = Holding(holder, source_of(database), wait_for_writers=True)
        wait_until(holder.waiting_for)
        database.execute("CREATE TABLE t2 (id int, day int)")
        database.execute("INSERT INTO t2 VALUES (2, 12)")
        database.execute("ALTER TABLE t ATTACH PARTITION t2 FOR VALUES FROM (10) TO (20)")
        writer.execute("COMMIT")
    with pytest.raises(SnapshotInterrupted):
        holding.result()
    held = holder.hold(source_of(database), wait_for_writers=True)
    assert rows_in(database, held) == [(1, 1), (2, 12)]


# -- small tables together --------------------------------------------------------------------------------


@pytest.fixture
def small(database: Database) -> Database:
    """With tables t1 to t5, where t3 has 3 rows, published before the slot was made."""
    for n in range(1, 6):
        database.execute(f"CREATE TABLE t{n} (id int PRIMARY KEY)")
        database.execute(f"INSERT INTO t{n} SELECT generate_series(1, {n})")
    database.execute("CREATE PUBLICATION p FOR TABLE t1, t2, t3, t4, t5")
    make_slot(database)
    return database


def numbers(small: Database, held: dict[int, HeldSnapshot]) -> list[int]:
    """Of the tables that are held. The rows of each are what it had."""
    found = {int(each.source.relation.table[1:]): each for each in held.values()}
    for n, each in found.items():
        assert rows_in(small, each) == [(i,) for i in range(1, n + 1)]
    return sorted(found)


def holding_sessions(database: Database) -> int:
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND state = 'idle in transaction' AND backend_xmin IS NOT NULL"
    )
    return int(database.execute(query)[0][0])


def test_small_tables_are_held_by_one_session_under_one_snapshot_until_the_last_of_them_is_released(
    small: Database, holder: TableHolder
) -> None:
    held = holder.hold_together(survey(small.connection, ["p"]))
    small.execute("INSERT INTO t2 VALUES (2000)")
    assert numbers(small, held) == [1, 2, 3, 4, 5] and holding_sessions(small) == 1
    (bounds,) = {each.bounds for each in held.values()}
    assert {each.snapshot_name for each in held.values()} == {next(iter(held.values())).snapshot_name}
    (stream,) = [each for each in slot_changes(small).transactions if each.inserted == ["2000"]]
    assert not bounds.contains(stream.xid, stream.commit_lsn)
    *first, last = held
    holder.release(*first)
    small.execute("INSERT INTO t3 VALUES (2000)")
    assert holding_sessions(small) == 1
    assert list(holder.confirm([*first, last], bounds.valid_from)) == first
    holder.release(last)
    wait_until(lambda: holding_sessions(small) == 0)
    place = bounds.snapshot_lsn
    for _ in range(3):  # nothing is written in between
        again = holder.hold_together(survey(small.connection, ["p"]), behind=place)
        holder.release(*again)
        assert len(again) == 5 and all(each.bounds.snapshot_lsn > place for each in again.values())
        place = next(iter(again.values())).bounds.snapshot_lsn


def test_a_table_that_somebody_has_locked_or_waits_to_lock_is_left_out_and_the_others_are_held_at_once(
    small: Database, holder: TableHolder
) -> None:
    sources = survey(small.connection, ["p"])
    with small.connect() as altering, small.connect() as reading, small.connect() as waiting:
        altering.execute("BEGIN")
        altering.execute("LOCK TABLE t2 IN ACCESS EXCLUSIVE MODE")
        reading.execute("BEGIN")
        reading.execute("SELECT FROM t4")
        truncate = threading.Thread(target=waiting.execute, args=(b"TRUNCATE t4",))
        truncate.start()
        asked = "SELECT count(*) FROM pg_locks WHERE relation = 't4'::regclass AND NOT granted"
        wait_until(lambda: small.execute(asked) == [(1,)])
        held = holder.hold_together(sources)
        assert numbers(small, held) == [1, 3, 5] and holder.waiting_for() == {}
        # Who has one of the tables may ask for the others, and is not ended as a deadlock.
        altering.execute("SET lock_timeout = '100ms'")
        altering.execute("SAVEPOINT before")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            altering.execute("LOCK TABLE t1 IN ACCESS EXCLUSIVE MODE")
        altering.execute("ROLLBACK TO before")
        holder.release(*held)
        altering.execute("SET lock_timeout = '10s'")
        altering.execute("LOCK TABLE t1 IN ACCESS EXCLUSIVE MODE")
        altering.execute("ROLLBACK")
        reading.execute("ROLLBACK")
        truncate.join()


def test_tables_that_changed_since_they_were_surveyed_are_left_out_and_the_others_are_held(
    small: Database, holder: TableHolder
) -> None:
    sources = survey(small.connection, ["p"])
    small.execute("DROP TABLE t1")
    small.execute("ALTER TABLE t2 ALTER id TYPE bigint")
    small.execute("ALTER TABLE t3 RENAME TO u")
    small.execute("ALTER PUBLICATION p DROP TABLE t4")
    assert numbers(small, holder.hold_together(sources)) == [5]
    assert holder.hold_together(sources[:1]) == {}
    wait_until(lambda: holding_sessions(small) == 1)


def test_a_table_that_the_role_may_not_read_is_left_out_of_its_group(small: Database) -> None:
    role = f"r_{small.name}"[:60]
    small.execute(f"CREATE ROLE {role} LOGIN")
    small.execute(f"GRANT SELECT ON t1, t2, t4, t5 TO {role}")
    small.execute("ALTER TABLE t5 ENABLE ROW LEVEL SECURITY")
    lesser = TableHolder(f"{small.dsn()} user={role}", ["p"])
    try:
        assert numbers(small, lesser.hold_together(survey(small.connection, ["p"]))) == [1, 2, 4]
    finally:
        lesser.close()
        small.execute(f"DROP OWNED BY {role}")
        small.execute(f"DROP ROLE {role}")


def test_a_group_whose_session_ended_before_the_last_row_was_read_is_not_confirmed_and_can_be_held_again(
    small: Database, holder: TableHolder
) -> None:
    sources = survey(small.connection, ["p"])
    held = holder.hold_together(sources[:3])
    other = holder.hold_together(sources[3:])
    bounds = next(iter(held.values())).bounds
    assert holder.confirm(list(held), bounds.valid_from) == {}
    small.execute(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_locks JOIN pg_stat_activity USING (pid)"
        f" WHERE relation = {next(iter(held))} AND state = 'idle in transaction'"
    )
    valid_from = next(iter(other.values())).bounds.valid_from
    assert list(holder.confirm([*held, *other], valid_from)) == list(held)
    assert len(holder.hold_together(sources[:3])) == 3
    single = holder.hold(sources[3], wait_for_writers=False)
    assert single.snapshot_name not in {each.snapshot_name for each in other.values()}
    assert holder.confirm(list(other), valid_from) == {}


@pytest.mark.parametrize("is_together", [False, True])
def test_a_table_that_was_truncated_between_its_snapshot_and_its_lock_is_not_held(
    small: Database, holder: TableHolder, monkeypatch: pytest.MonkeyPatch, is_together: bool
) -> None:
    """That snapshot would read no rows of it, and the table is defined as before. Only its file tells."""
    sources = survey(small.connection, ["p"])
    name = "_lock_at_once" if is_together else "_lock"
    lock: Callable[..., Any] = getattr(table_snapshot, name)

    def snapshot_and_truncate_and_lock(session: psycopg.Connection[Any], *arguments: Any) -> Any:
        session.execute("SELECT 1")
        small.execute("TRUNCATE t2")
        return lock(session, *arguments)

    monkeypatch.setattr(table_snapshot, name, snapshot_and_truncate_and_lock)
    if is_together:
        assert numbers(small, holder.hold_together(sources)) == [1, 3, 4, 5]
        return
    with pytest.raises(SnapshotInterrupted, match=r"table public\.t2 was rewritten"):
        holder.hold(sources[1], wait_for_writers=False)
    wait_until(lambda: holding_sessions(small) == 0)


@pytest.mark.parametrize("is_together", [False, True])
def test_who_alters_a_table_with_a_row_filter_right_behind_its_lock_goes_first(
    small: Database, holder: TableHolder, monkeypatch: pytest.MonkeyPatch, is_together: bool
) -> None:
    """The catalog's question about its filter waited for the ALTER TABLE, that one for the lock, and the lock for the
    answer: nobody ever went on."""
    if small.connection.info.server_version < PG15:
        pytest.skip("row filters came with 15")
    small.execute("ALTER PUBLICATION p SET TABLE t1, t2 WHERE (id > 0), t3, t4, t5")
    small.execute("SET lock_timeout = 0")
    sources = survey(small.connection, ["p"])
    asked = "SELECT count(*) FROM pg_locks WHERE relation = 't2'::regclass AND NOT granted"
    with small.connect() as session:
        alter = threading.Thread(target=session.execute, args=(b"ALTER TABLE t2 ADD c int",), daemon=True)
        name = "_lock_at_once" if is_together else "_lock"
        lock: Callable[..., Any] = getattr(table_snapshot, name)

        def lock_and_be_waited_for(*arguments: Any) -> Any:
            locked = lock(*arguments)
            if not alter.ident:
                alter.start()
                wait_until(lambda: small.execute(asked) == [(1,)])
            return locked

        monkeypatch.setattr(table_snapshot, name, lock_and_be_waited_for)
        with pytest.raises(SnapshotInterrupted, match="waits to alter"):
            if is_together:
                holder.hold_together(sources)
            else:
                holder.hold(sources[1], wait_for_writers=False)
        alter.join(30)
        assert not alter.is_alive()
    assert len(holder.hold_together(survey(small.connection, ["p"]))) == 5


def test_a_tables_size_is_known_under_the_lock_of_its_group_though_somebody_waits_to_alter_one_of_it(
    small: Database, holder: TableHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question waited behind the ALTER TABLE. A large table that was never analyzed was one of no bytes then, and
    held up the others of its group."""
    small.execute("SET lock_timeout = 0")
    small.execute("ALTER TABLE t2 SET (autovacuum_enabled = off)")
    small.execute("INSERT INTO t2 SELECT generate_series(3, 30000)")
    sources = survey(small.connection, ["p"])
    asked = "SELECT count(*) FROM pg_locks WHERE relation = 't4'::regclass AND NOT granted"
    lock = table_snapshot._lock_at_once
    with small.connect() as session:
        alter = threading.Thread(target=session.execute, args=(b"ALTER TABLE t4 ADD c int",), daemon=True)

        def lock_and_be_waited_for(*arguments: Any) -> Any:
            locked = lock(*arguments)
            alter.start()
            wait_until(lambda: small.execute(asked) == [(1,)])
            return locked

        monkeypatch.setattr(table_snapshot, "_lock_at_once", lock_and_be_waited_for)
        held = holder.hold_together(sources)
        holder.release(*held)
        alter.join(30)
        assert not alter.is_alive()
    sizes = {each.source.relation.table: each.source.n_bytes for each in held.values()}
    assert sizes["t2"] == sources[1].n_bytes > SMALL_BYTES >= max(sizes["t1"], sizes["t3"]) > 0


# -- sessions, servers and roles --------------------------------------------------------------------------


@on_18
def test_a_table_whose_holder_ended_before_the_last_row_was_read_is_not_confirmed(
    table: Database, holder: TableHolder
) -> None:
    """Its lock may have been gone meanwhile, and a crash of the server may have taken what the snapshot saw."""
    source = source_of(table)
    relid = source.relation.relid
    held = holder.hold(source, wait_for_writers=False)
    assert not holder.confirm([relid], held.bounds.valid_from)
    table.execute(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
        " WHERE state = 'idle in transaction' AND datname = current_database()"
    )
    assert list(holder.confirm([relid], held.bounds.valid_from)) == [relid]
    with pytest.raises(psycopg.Error):
        rows_in(table, held)
    assert list(TableHolder(table.dsn(), ["p"]).confirm([relid], held.bounds.valid_from)) == [relid]
    again = holder.hold(source, wait_for_writers=False)
    assert not holder.confirm([relid], again.bounds.valid_from)
    assert len(rows_in(table, again)) == 1000


@on_18
def _observers(database: Database) -> set[int]:
    """Backends of the holder that hold no table."""
    query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle' AND query <> ''"
    return {pid for (pid,) in database.connection.execute(query.encode()).fetchall()}


def test_the_session_that_asks_about_a_table_asks_about_the_next_and_another_one_where_it_was_ended(
    table: Database, holder: TableHolder
) -> None:
    source, before = source_of(table), _observers(table)
    holder.hold(source, wait_for_writers=False)
    holder.release(source.relation.relid)
    (kept,) = _observers(table) - before
    table.execute("UPDATE t SET v = 'y' WHERE id = 1")
    held = holder.hold(source, wait_for_writers=True)
    assert (1, "y") in rows_in(table, held)
    wait_until(lambda: _observers(table) - before == {kept})
    table.execute(f"SELECT pg_terminate_backend({kept})")
    wait_until(lambda: kept not in _observers(table))
    assert not holder.confirm([source.relation.relid], held.bounds.valid_from)  # nobody held the table by it
    holder.release(source.relation.relid)
    assert len(rows_in(table, holder.hold(source, wait_for_writers=False))) == 1000
    wait_until(lambda: len(_observers(table) - before) == 1)
    holder.close()
    wait_until(lambda: _observers(table) == before)


def test_the_session_that_asks_is_not_kept_for_ever(
    table: Database, holder: TableHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_holder, "_RENEWED_AFTER", 2)
    source, before = source_of(table), _observers(table)
    for n_kept in (1, 0, 1):
        holder.hold(source, wait_for_writers=False)
        holder.release(source.relation.relid)
        wait_until(lambda n_kept=n_kept: len(_observers(table) - before) == n_kept)  # type: ignore[misc]


def test_what_was_altered_since_the_same_session_asked_before_is_found(
    table: Database, holder: TableHolder
) -> None:
    source = source_of(table)
    holder.hold(source, wait_for_writers=False)
    holder.release(source.relation.relid)
    table.execute("ALTER TABLE t ADD COLUMN w int")
    with pytest.raises(SnapshotInterrupted, match="changed before its snapshot"):
        holder.hold(source, wait_for_writers=False)
    held = holder.hold(source_of(table), wait_for_writers=False)
    assert [column.name for column in held.source.relation.columns] == ["id", "v", "w"]


def test_closing_ends_what_waits_and_releases_what_is_held(table: Database, holder: TableHolder) -> None:
    table.execute("CREATE TABLE u (id int)")
    table.execute("ALTER PUBLICATION p ADD TABLE u")
    holder.hold(source_of(table, "public.u"), wait_for_writers=False)
    with table.connect() as writer:
        writer.execute("BEGIN")
        writer.execute("INSERT INTO t VALUES (2000, 'x')")
        holding = Holding(holder, source_of(table), wait_for_writers=True)
        wait_until(lambda: holding.told)
        holder.close()
        with pytest.raises(SnapshotLost):
            holding.result()
    table.execute("SET lock_timeout = '10s'")
    table.execute("DROP TABLE u, t")


@on_18
def test_a_table_that_is_released_while_its_snapshot_waits_is_not_held_later(
    table: Database, holder: TableHolder
) -> None:
    source = source_of(table)
    with table.connect() as writer:
        writer.execute("BEGIN")
        writer.execute("INSERT INTO t VALUES (2000, 'x')")
        holding = Holding(holder, source, wait_for_writers=True)
        wait_until(holder.waiting_for)
        holder.release(source.relation.relid)
        with pytest.raises(SnapshotLost):
            holding.result()
        writer.execute("COMMIT")
    table.execute("SET lock_timeout = '10s'")
    table.execute("TRUNCATE t")


@on_18
def test_time_limits_of_the_database_do_not_end_what_is_held(table: Database, holder: TableHolder) -> None:
    for setting in ("statement", "lock", "idle_in_transaction_session", "transaction", "idle_session"):
        table.execute(f"ALTER DATABASE {table.name} SET {setting}_timeout = '500ms'")
    held = holder.hold(source_of(table), wait_for_writers=False)
    time.sleep(1.2)
    table.execute(f"ALTER DATABASE {table.name} RESET ALL")
    assert not holder.confirm([held.source.relation.relid], held.bounds.valid_from)
    assert len(rows_in(table, held)) == 1000


@pytest.fixture
def role(table: Database) -> Iterator[str]:
    name = f"role_{table.name}"
    table.execute(f"CREATE ROLE {name} LOGIN")
    yield name
    table.execute(f"DROP OWNED BY {name}")
    table.execute(f"DROP ROLE {name}")


@on_18
def test_a_role_that_may_not_read_the_table_whole_is_told_what_it_lacks(table: Database, role: str) -> None:
    holder = TableHolder(table.dsn(user=role), ["p"])
    source = source_of(table)
    with pytest.raises(PreconditionMissing, match=r"table public\.t: the role lacks SELECT on it") as caught:
        holder.hold(source, wait_for_writers=False)
    assert "GRANT SELECT" in caught.value.remedy
    table.execute(f"GRANT SELECT ON t TO {role}")
    holder.hold(source, wait_for_writers=True)
    holder.close()
    table.execute("ALTER TABLE t ENABLE ROW LEVEL SECURITY")
    table.execute("CREATE POLICY few ON t FOR SELECT USING (id < 10)")
    holder = TableHolder(table.dsn(user=role), ["p"])
    with pytest.raises(
        PreconditionMissing, match=r"table public\.t: the role lacks the rows that its row security"
    ):
        holder.hold(source, wait_for_writers=False)
    table.execute(f"ALTER ROLE {role} BYPASSRLS")
    holder.hold(source, wait_for_writers=False)
    holder.close()


def test_a_standby_is_refused(own_postgres: Callable[..., EmbeddedPostgres]) -> None:
    server = own_postgres()
    with own_database(server) as database:
        source = source_of(database)
    server.stop()
    (server.data_dir / "standby.signal").touch()
    server.start()
    with pytest.raises(Unsupported, match="standby"):
        TableHolder(server.conninfo(), ["p"]).hold(source, wait_for_writers=False)


def test_the_lost_row_of_a_transaction_that_wrote_before_the_table_was_published(
    database: Database, holder: TableHolder
) -> None:
    """With the wait the snapshot has both rows. Without it the first one is in neither the snapshot nor the stream."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    database.execute("CREATE TABLE u (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION p FOR TABLE u")
    make_slot(database)
    writer = database.connect()
    writer.execute("BEGIN")
    writer.execute("INSERT INTO t VALUES (1)")
    database.execute("ALTER PUBLICATION p ADD TABLE t")
    source = source_of(database, "public.t")

    hasty = holder.hold(source, wait_for_writers=False)
    assert rows_in(database, hasty) == []

    told: list[str] = []
    done: list[HeldSnapshot] = []
    patient = TableHolder(database.dsn(), ["p"])
    waiting = threading.Thread(
        target=lambda: done.append(
            patient.hold(source, wait_for_writers=True, on_wait=lambda found: told.extend(map(str, found)))
        )
    )
    waiting.start()
    wait_until(lambda: bool(told))
    assert not done and f"session {writer.info.backend_pid}" in told[0]
    assert list(patient.waiting_for()) == [source.relation.relid]
    writer.execute("INSERT INTO t VALUES (2)")
    writer.execute("COMMIT")
    waiting.join(60)
    (held,) = done
    assert patient.waiting_for() == {}
    assert rows_in(database, held) == [(1,), (2,)]
    patient.close()

    (stream,) = slot_changes(database).transactions
    assert stream.inserted == ["2"], "the row before ALTER PUBLICATION is not in the stream"
    assert held.bounds.contains(stream.xid, stream.commit_lsn), "so the stream's part of it is left out"
    assert not hasty.bounds.contains(stream.xid, stream.commit_lsn)
    writer.close()
