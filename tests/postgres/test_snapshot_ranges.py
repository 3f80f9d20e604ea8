"""Scenario *snapshot*: ranges of a table through COPY into Parquet files; the stream and the table are the oracles."""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
import weakref
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest

from tests.postgres.test_decode_types import CORNERS, MADE, open_slot, receive
from tests.postgres_fixtures import VERSIONS, Database
from tests.snapshot_ranges import (
    BOUNDS,
    active_copies,
    growth_of_reading,
    relation_of,
    snapshot_of,
    wait_until_reading,
)
from tests.waiting import wait_until
from xidstream.pipeline.errors import (
    ConnectionLost,
    PoisonedChange,
    PreconditionMissing,
    SnapshotInterrupted,
    SnapshotLost,
)
from xidstream.pipeline.initial_copy import range_reading
from xidstream.pipeline.initial_copy.range_reading import RangeReader
from xidstream.pipeline.postgres.admin import sql_connection
from xidstream.pipeline.postgres.range_copy import BLOCK_BYTES, RangeCopy, copy_statement
from xidstream.pipeline.postgres.snapshot_sources import survey
from xidstream.pipeline.schema.rows import CONTRACT_FIELDS, N_INTERNAL
from xidstream.pipeline.snapshot.key_filter import bound, parse_key_filter
from xidstream.pipeline.snapshot.tables import RangeTask, plan_ranges

pytestmark = pytest.mark.postgres
NEWEST = pytest.mark.parametrize("postgres_server", VERSIONS[-1:], indirect=True, ids=lambda v: f"pg{v}")

OTHER_SETTINGS = {
    "datestyle": "German, DMY",
    "intervalstyle": "sql_standard",
    "bytea_output": "escape",
    "extra_float_digits": "-10",
    "timezone": "Asia/Kolkata",
    "client_encoding": "LATIN1",
    "default_transaction_isolation": "serializable",
}


def exact(column: pa.ChunkedArray) -> list[str]:
    """Values as text: NaN is itself, and 0.0 is not -0.0."""
    return [repr(value) for value in column.to_pylist()]


def sorted_rows(table: pa.Table, *columns: str) -> list[tuple[object, ...]]:
    return sorted(zip(*(table.column(name).to_pylist() for name in columns), strict=True))


# -- values --------------------------------------------------------------------------------------------


def test_the_corner_values_of_every_type_are_what_the_stream_gives(
    database: Database, tmp_path: Path
) -> None:
    for statement in MADE.strip().splitlines():
        database.execute(statement)
    types = list(CORNERS)
    try:
        database.execute("SELECT '<a/>'::xml")
    except psycopg.errors.FeatureNotSupported:  # built without libxml
        types.remove("xml")
    columns = ", ".join(f"c{i} {each}" for i, each in enumerate(types))
    database.execute(f"CREATE TABLE corners (id int PRIMARY KEY, {columns})")
    open_slot(database)
    n = max(len(CORNERS[each]) for each in types) + 1  # the last row is all null
    for r in range(n):
        values = [CORNERS[each][r] if r < len(CORNERS[each]) else None for each in types]
        casts = ", ".join(f"%s::{each}" for each in types)
        database.execute(f"INSERT INTO corners VALUES (%s, {casts})", r, *values)
    received = receive(database)
    relation, streamed = received.relations["corners"], received.tables["corners"]
    for name, value in OTHER_SETTINGS.items():
        database.execute(f"ALTER DATABASE {database.name} SET {name} = '{value}'")

    # All at once, where most columns have a value that only its text can hold; and each row for itself, where few have.
    with snapshot_of(database, relation, tmp_path / "all") as snapshot:
        all_at_once = snapshot.read_all()
    with snapshot_of(database, relation, tmp_path / "each") as snapshot:
        for r in range(n):
            of_row = replace(snapshot.source, row_filter=f"id = {r}")
            snapshot.read(replace(snapshot.whole, source=of_row))
        each_for_itself = snapshot.rows()
    for copied in (all_at_once, each_for_itself):
        assert copied.num_rows == n
        for i, column in enumerate(relation.columns):
            expected = streamed.column(N_INTERNAL + i)
            assert copied.field(i).type == expected.type == relation.arrow_fields[i].type, column.name
            assert exact(copied.column(i)) == exact(expected), column.name
        assert exact(copied.column("_text")) == exact(streamed.column(4))
        assert any(value is not None for value in copied.column("_text").to_pylist())


@NEWEST
def test_random_numbers_and_times_are_what_the_stream_gives(database: Database, tmp_path: Path) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, a numeric, b numeric(38,19), c numeric(9,0), d numeric(20,20), e float8,"
        " f float4, g timestamptz, h date, i bigint, j uuid)"
    )
    open_slot(database)
    seed = random.uniform(-1, 1)
    print(f"setseed({seed})")
    database.execute("SELECT setseed(%s)", seed)
    database.execute(
        "INSERT INTO t SELECT n, x, least(greatest(x, -1e18), 1e18), (random() * 1e9 - 5e8)::int,"
        " random()::numeric, sign * exp(random() * 1400 - 700), sign * exp(random() * 170 - 85),"
        " timestamptz '1970-01-01' + random() * 2e11 * sign * interval '1 second',"
        " date '1970-01-01' + (random() * 700000 * sign)::int, (random() * 1.8e19 - 9e18)::int8,"
        " md5(random()::text)::uuid"
        " FROM (SELECT n, sign, (sign * random()::numeric * 10::numeric ^ (random() * 60 - 30)::int) x FROM"
        " (SELECT n, sign(random() - 0.5)::numeric sign FROM generate_series(1, 4000) n) s) s"
    )
    received = receive(database)
    relation, streamed = received.relations["t"], received.tables["t"].sort_by("id")
    with snapshot_of(database, relation, tmp_path) as snapshot:
        copied = snapshot.read_all().sort_by("id")
    for i, column in enumerate(relation.columns):
        assert exact(copied.column(i)) == exact(streamed.column(N_INTERNAL + i)), column.name


def test_a_row_type_is_null_only_where_the_value_is_and_not_where_its_fields_are(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TYPE pair AS (a int, b text)")
    database.execute("CREATE TABLE t (id int, v pair)")
    database.execute(
        "INSERT INTO t VALUES (1, ROW(1, NULL)), (2, ROW(NULL, NULL)), (3, NULL), (4, ROW(1, 'x'))"
    )
    with snapshot_of(database, relation_of(database, "t"), tmp_path) as snapshot:
        copied = snapshot.read_all()
    assert sorted_rows(copied, "id", "v") == [(1, "(1,)"), (2, "(,)"), (3, None), (4, "(1,x)")]


def test_a_column_with_a_value_that_only_its_text_can_hold_is_read_again_as_text_and_then_at_once(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE t (id int, valid_to timestamptz, v text, n numeric(9,2))")
    database.execute(
        "INSERT INTO t SELECT i, CASE WHEN i % 150000 = 0 THEN 'infinity' ELSE timestamptz '2024-01-01' + i * interval"
        " '1 hour' END, 'v' || i, i / 100.0 FROM generate_series(1, 300000) i"
    )
    database.execute("UPDATE t SET n = 'NaN' WHERE id = 299999")
    reader = RangeReader(database.dsn())
    with snapshot_of(database, relation_of(database, "t"), tmp_path) as snapshot:
        snapshot.read(snapshot.whole, reader)
        first = snapshot.rows()
        n_directories = len(list(tmp_path.iterdir()))
        snapshot.files = []
        snapshot.read(snapshot.whole, reader)
        second = snapshot.rows()
    reader.close()
    assert n_directories > 1, "a value that is not held was found behind rows that were written"
    assert len(list(tmp_path.iterdir())) == n_directories + 1
    expected = database.execute(
        "SELECT id, CASE WHEN isfinite(valid_to) THEN valid_to END, v, nullif(n, 'NaN') FROM t ORDER BY id"
    )
    for copied in (first, second):
        assert (
            sorted(zip(*(copied[c].to_pylist() for c in ("id", "valid_to", "v", "n")), strict=True))
            == expected
        )
        texts = {
            i: text
            for i, text in zip(copied["id"].to_pylist(), copied["_text"].to_pylist(), strict=True)
            if text
        }
        assert texts == {
            150_000: [("valid_to", "infinity")],
            299_999: [("n", "NaN")],
            300_000: [("valid_to", "infinity")],
        }


def test_the_contracts_columns_say_where_a_row_comes_from(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int)")
    database.execute("INSERT INTO t SELECT generate_series(1, 1000)")
    with snapshot_of(database, relation_of(database, "t"), tmp_path) as snapshot:
        copied = snapshot.read_all(range_bytes=8192)
    n_ranges = len(snapshot.files)
    assert n_ranges == 5
    assert [(f.name, f.type) for f in copied.schema] == [("id", pa.int32())] + [
        (f.name, f.type) for f in CONTRACT_FIELDS
    ]
    assert set(copied.column("_change_type").to_pylist()) == {"snapshot"}
    assert set(copied.column("_commit_lsn").to_pylist()) == {BOUNDS.snapshot_lsn}
    assert {t.timestamp() for t in copied.column("_commit_timestamp").to_pylist()} == {1_700_000_000}
    assert copied.column("_xid").null_count == copied.column("_unchanged").null_count == 1000
    seqs = copied.column("_seq").to_pylist()
    assert len(set(seqs)) == 1000 and {seq >> 32 for seq in seqs} == set(range(n_ranges))
    for number in range(n_ranges):
        own = [seq & 0xFFFFFFFF for seq in seqs if seq >> 32 == number]
        assert own == list(range(len(own)))
    assert {(f.min_commit_lsn, f.max_commit_lsn) for f in snapshot.files} == {
        (BOUNDS.snapshot_lsn, BOUNDS.snapshot_lsn)
    }


def test_large_toast_values_come_whole(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int, plain text, packed text, raw bytea)")
    database.execute("ALTER TABLE t ALTER plain SET STORAGE EXTERNAL")
    database.execute(
        "INSERT INTO t SELECT i, repeat(md5(i::text), 40000) || E'\\t\\n\\\\', repeat('ab' || i, 900000),"
        " decode(repeat(md5(i::text), 20000), 'hex') FROM generate_series(1, 12) i"
    )
    with snapshot_of(database, relation_of(database, "t"), tmp_path) as snapshot:
        copied = snapshot.read_all(range_bytes=1 << 20)
    expected = database.execute("SELECT id, plain, packed, raw FROM t ORDER BY id")
    assert sorted_rows(copied, "id", "plain", "packed", "raw") == expected


def test_a_giant_row_is_let_go_before_the_next_one_is_read(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (v text)")
    database.execute("INSERT INTO t SELECT repeat(md5(i::text), 200000) FROM generate_series(1, 3) i")
    with snapshot_of(database, relation_of(database, "t"), tmp_path) as snapshot:
        connection = RangeCopy(database.dsn())
        connection.begin(snapshot.name)
        n_giant = 0
        for rows in connection.blocks(snapshot.whole):
            if len(rows.payload) > BLOCK_BYTES:
                n_giant += 1
                array = weakref.ref(rows.payload.base)
                del rows
                assert array() is None
        connection.close()
    assert n_giant == 3


def test_no_time_limit_of_the_database_ends_a_read(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int)")
    database.execute("INSERT INTO t VALUES (1)")
    limits = ["statement_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout"]
    for name in [*limits, "transaction_timeout"][: 4 if database.version >= 17 else 3]:
        database.execute(f"ALTER DATABASE {database.name} SET {name} = '300ms'")
    reader = RangeReader(database.dsn())
    with snapshot_of(
        database, relation_of(database, "t"), tmp_path, row_filter="pg_sleep(0.5) IS NOT NULL"
    ) as one:
        for _ in range(2):
            one.read(one.whole, reader)
            time.sleep(0.5)
    reader.close()
    assert one.rows().num_rows == 2


# -- ranges --------------------------------------------------------------------------------------------


def test_ranges_give_each_row_once_after_updates_deletes_and_vacuum_and_nothing_that_came_later(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text) WITH (fillfactor = 70)")
    database.execute("INSERT INTO t SELECT i, repeat('x', i % 300) FROM generate_series(1, 5000) i")
    database.execute("UPDATE t SET v = v || 'hot' WHERE id % 3 = 0")
    database.execute("DELETE FROM t WHERE id % 7 = 0")
    database.execute("VACUUM t")
    database.execute("UPDATE t SET v = v || repeat('moved', 100) WHERE id % 11 = 0")
    relation = relation_of(database, "t")
    with snapshot_of(database, relation, tmp_path) as snapshot:
        expected = database.execute("SELECT id, v FROM t ORDER BY id")
        database.execute("UPDATE t SET v = 'later' WHERE id % 2 = 0")
        database.execute("DELETE FROM t WHERE id % 5 = 0")
        database.execute("INSERT INTO t SELECT i, 'later' FROM generate_series(10001, 12000) i")
        database.execute("VACUUM t")
        copied = snapshot.read_all(range_bytes=64 << 10)
    assert len(snapshot.files) > 10
    assert sorted_rows(copied, "id", "v") == expected
    assert len(set(copied.column("_seq").to_pylist())) == len(expected)


def test_rows_that_came_after_the_size_was_asked_are_in_the_last_range(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE t (id int)")
    database.execute("INSERT INTO t SELECT generate_series(1, 1000)")
    relation = relation_of(database, "t")
    with snapshot_of(database, relation, tmp_path) as small:
        pass
    database.execute("INSERT INTO t SELECT generate_series(1001, 5000)")
    with snapshot_of(database, relation, tmp_path) as snapshot:
        snapshot.source = small.source
        copied = snapshot.read_all(range_bytes=16 << 10)
    assert sorted(copied.column("id").to_pylist()) == list(range(1, 5001))


def test_a_range_is_read_by_its_pages_and_not_by_a_scan_of_the_whole_table(database: Database) -> None:
    database.execute("CREATE TABLE t (id int)")
    database.execute("INSERT INTO t SELECT generate_series(1, 100000)")
    plan = "\n".join(
        line
        for (line,) in database.execute(
            "EXPLAIN SELECT id FROM ONLY t WHERE ctid >= '(50,0)' AND ctid < '(90,0)'"
        )
    )
    assert "Tid Range Scan" in plan


@NEWEST
def test_the_rows_of_a_repair_are_found_by_the_keys_index(database: Database) -> None:
    database.execute("CREATE TABLE t (name text, id int, PRIMARY KEY (id, name))")
    database.execute("INSERT INTO t SELECT 'n' || i, i FROM generate_series(1, 20000) i")
    database.execute("ANALYZE t")
    database.execute("CREATE PUBLICATION pub FOR TABLE t")
    with sql_connection(database.dsn(), "a test") as sql:
        (source,) = survey(sql, ["pub"])
    (pages,) = plan_ranges(source.leaves, by_range=False)
    for where in ("id between 7 and 9", "id in (7, 8, 9)", "name = 'n7' and id = 7"):
        only = bound(parse_key_filter(where), source.relation, source.relation.key)
        statement = copy_statement(RangeTask(source, "", pages, only))
        query = statement.removeprefix("COPY (").removesuffix(") TO STDOUT (FORMAT binary)")
        plan = "\n".join(line for (line,) in database.execute(f"EXPLAIN {query}"))
        assert "t_pkey" in plan, plan
        assert len(database.execute(query)) in (1, 3)


@pytest.mark.parametrize("table", ["t (id int)", "t ()"])
def test_an_empty_table_has_no_file_and_a_table_without_columns_its_rows(
    database: Database, tmp_path: Path, table: str
) -> None:
    database.execute(f"CREATE TABLE {table}")
    with snapshot_of(database, relation_of(database, "t"), tmp_path) as snapshot:
        assert snapshot.read_all().num_rows == 0
        assert snapshot.files == [] and list(tmp_path.iterdir()) == []
    database.execute("INSERT INTO t DEFAULT VALUES")
    with snapshot_of(database, relation_of(database, "t"), tmp_path) as snapshot:
        assert snapshot.read_all().column("_seq").to_pylist() == [0]


@NEWEST
@pytest.mark.slow
def test_memory_follows_the_largest_value_and_not_the_table(database: Database, tmp_path: Path) -> None:
    n_bytes = 110 << 20
    database.execute("CREATE TABLE t (id int, v text)")
    database.execute("ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    database.execute("INSERT INTO t VALUES (0, '')")
    growth = []
    for statement in (
        "INSERT INTO t SELECT i, repeat(md5(i::text), 40) FROM generate_series(1, 100000) i",
        "INSERT INTO t SELECT i, repeat(md5(i::text), 40) FROM generate_series(1, 200000) i",
        f"INSERT INTO t SELECT i, repeat(md5(i::text), {n_bytes // 32}) FROM generate_series(1, 2) i",
        f"INSERT INTO t SELECT i, repeat(md5(i::text), {n_bytes // 32}) FROM generate_series(1, 5) i",
    ):
        database.execute("DELETE FROM t WHERE id > 0")
        database.execute("VACUUM t")
        database.execute(statement)
        with (
            snapshot_of(database, relation_of(database, "t"), tmp_path) as snapshot,
            ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh,
        ):
            whole = (snapshot.whole, snapshot.target, snapshot.conform)
            small = replace(snapshot.whole, source=replace(snapshot.source, row_filter="id = 0"))
            growth.append(fresh.submit(growth_of_reading, database.dsn(), whole, small).result(250))
    of_128_mb, of_256_mb, of_two, of_five = (g / 2**20 for g in growth)
    told = f"MB: {of_128_mb:.0f}, {of_256_mb:.0f}; {of_two:.0f}, {of_five:.0f}"
    print(told)
    assert of_256_mb < of_128_mb + 40, told
    assert of_five < of_two + 110, told
    assert of_five < 12 * 110, told


# -- what the publication says -------------------------------------------------------------------------


def test_a_partition_with_another_order_of_columns_and_dropped_ones_gives_the_roots_columns(
    database: Database, tmp_path: Path
) -> None:
    database.execute(
        'CREATE TABLE root (id int, gone int, "Ünï ""code""" text, n numeric(8,2)) PARTITION BY LIST (id)'
    )
    database.execute("CREATE TABLE one PARTITION OF root FOR VALUES IN (1)")
    database.execute(
        'CREATE TABLE "two ""2""" (n numeric(8,2), x int, "Ünï ""code""" text, gone int, id int)'
    )
    database.execute('ALTER TABLE "two ""2""" DROP x')
    database.execute('ALTER TABLE root ATTACH PARTITION "two ""2""" FOR VALUES IN (2)')
    database.execute("INSERT INTO root VALUES (1, 9, 'a', 1.5), (2, 9, 'b', 2.5)")
    database.execute("ALTER TABLE root DROP gone")
    relation = relation_of(database, "root")
    with snapshot_of(database, relation, tmp_path, leaves=["one", '"two ""2"""']) as snapshot:
        copied = snapshot.read_all()
    assert copied.schema.names[:3] == ["id", 'Ünï "code"', "n"]
    assert [tuple(map(str, row)) for row in sorted_rows(copied, "id", 'Ünï "code"', "n")] == [
        ("1", "a", "1.50"),
        ("2", "b", "2.50"),
    ]
    assert sorted(copied.column("_seq").to_pylist()) == [0, 1 << 32]


def test_children_of_a_table_are_not_read_with_it(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int)")
    database.execute("CREATE TABLE child () INHERITS (t)")
    database.execute("INSERT INTO t VALUES (1)")
    database.execute("INSERT INTO child VALUES (2)")
    with snapshot_of(database, relation_of(database, "t"), tmp_path) as snapshot:
        assert snapshot.read_all().column("id").to_pylist() == [1]


def test_the_publications_row_filter_and_column_list_decide_what_is_read(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE t (id int, secret text, v text)")
    database.execute("INSERT INTO t SELECT i, 'no', 'v' || i FROM generate_series(1, 2000) i")
    relation = relation_of(database, "t", ["id", "v"])
    condition = "(id > 10) AND (id < 1500) OR (v = 'v3')"
    with snapshot_of(database, relation, tmp_path, row_filter=condition) as snapshot:
        copied = snapshot.read_all(range_bytes=8192)
    assert copied.schema.names[:2] == ["id", "v"]
    assert sorted_rows(copied, "id", "v") == database.execute(
        f"SELECT id, v FROM t WHERE {condition} ORDER BY id"
    )


# -- failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["00000003-0000001B-1", "no snapshot' at all"])
def test_a_snapshot_that_nobody_holds_is_lost(database: Database, tmp_path: Path, name: str) -> None:
    database.execute("CREATE TABLE t (id int)")
    with snapshot_of(database, relation_of(database, "t"), tmp_path) as snapshot:
        snapshot.name = name
        with pytest.raises(SnapshotLost):
            snapshot.read_all()


def test_when_the_holder_has_ended_no_reader_reads_another_range(database: Database, tmp_path: Path) -> None:
    """Its lock is gone, so the table may be another one by then: none may go on under the snapshot that it has."""
    database.execute("CREATE TABLE t (id int)")
    database.execute("INSERT INTO t SELECT generate_series(1, 100)")
    reader = RangeReader(database.dsn())
    with snapshot_of(database, relation_of(database, "t"), tmp_path) as snapshot:
        snapshot.read(snapshot.whole, reader)
    database.execute("TRUNCATE t")
    with pytest.raises(SnapshotLost, match=snapshot.name):
        snapshot.read(snapshot.whole, reader)
    reader.close()


def test_a_lost_session_is_told_and_the_next_read_makes_another(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int)")
    database.execute("INSERT INTO t SELECT generate_series(1, 100)")
    reader = RangeReader(database.dsn())
    with snapshot_of(database, relation_of(database, "t"), tmp_path) as snapshot:
        (first,) = snapshot.read(snapshot.whole, reader)
        database.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
            " WHERE application_name = 'xidstream' AND datname = current_database()"
        )
        with pytest.raises(ConnectionLost, match="a snapshot's reader"):
            snapshot.read(snapshot.whole, reader)
        (second,) = snapshot.read(snapshot.whole, reader)
    reader.close()
    assert first.n_rows == second.n_rows == 100
    assert Path(first.path).parent != Path(second.path).parent, "each attempt has a directory of its own"


def test_a_read_whose_snapshot_is_given_up_ends_at_the_server_too_and_no_other_read_does(
    database: Database, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE t (id int)")
    database.execute("INSERT INTO t SELECT generate_series(1, 100000)")
    reader = RangeReader(database.dsn())
    caught: list[BaseException] = []
    with snapshot_of(
        database, relation_of(database, "t"), tmp_path, row_filter="pg_sleep(0.05) IS NULL"
    ) as snapshot:

        def read() -> None:
            try:
                snapshot.read(snapshot.whole, reader)
            except BaseException as error:
                caught.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        wait_until_reading(database, "pg_sleep")
        reader.cancel("another snapshot")
        time.sleep(0.5)
        assert thread.is_alive() and active_copies(database, "pg_sleep")
        reader.cancel(snapshot.name)
        thread.join(60)
        assert not thread.is_alive()
        (error,) = caught
        assert isinstance(error, SnapshotLost) and "given up" in error.message
        # By itself it would take more than an hour. The server's process ends a moment after the connection.
        wait_until(lambda: active_copies(database, "pg_sleep") == [])
        reader.cancel(snapshot.name)
    with snapshot_of(database, relation_of(database, "t"), tmp_path) as another:
        assert another.read(another.whole, reader)[0].n_rows == 100_000, "the reader goes on with others"
    reader.close()


def test_a_missing_privilege_and_row_security_are_errors_with_a_remedy(
    database: Database, tmp_path: Path
) -> None:
    role = f"reader_{database.name}"
    database.execute(f"CREATE ROLE {role} LOGIN")
    try:
        database.execute("CREATE TABLE t (id int)")
        database.execute("INSERT INTO t VALUES (1)")
        reader = RangeReader(database.dsn(user=role))
        with snapshot_of(database, relation_of(database, "t"), tmp_path) as snapshot:
            with pytest.raises(PreconditionMissing, match="permission denied") as caught:
                snapshot.read(snapshot.whole, reader)
            assert "GRANT SELECT" in caught.value.remedy
            database.execute(f"GRANT SELECT ON t TO {role}")
            database.execute("ALTER TABLE t ENABLE ROW LEVEL SECURITY")
        with snapshot_of(database, relation_of(database, "t"), tmp_path) as snapshot:
            with pytest.raises(PreconditionMissing, match="row-level security") as caught:
                snapshot.read(snapshot.whole, reader)
            assert "BYPASSRLS" in caught.value.remedy
        reader.close()
    finally:
        database.execute(f"DROP OWNED BY {role}")
        database.execute(f"DROP ROLE {role}")


def test_a_reader_holds_no_lock_between_its_ranges(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int)")
    reader = RangeReader(database.dsn())
    with snapshot_of(database, relation_of(database, "t"), tmp_path) as snapshot:
        snapshot.read(snapshot.whole, reader)
        holding = (
            "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE relation = 't'::regclass "
            "AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
        assert database.execute(holding) == [(0,)]
        snapshot.read(snapshot.whole, reader)
    reader.close()


@NEWEST
@pytest.mark.parametrize("is_together", [False, True])
def test_a_reader_gives_up_a_table_that_somebody_waits_to_alter_behind_its_holder_and_reads_the_others(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_together: bool
) -> None:
    """ALTER TABLE waited for the holder, the reader behind it, and the holder for the reader: nobody ever went on."""
    monkeypatch.setattr(range_reading, "_LOCK_WAIT_MS", 200)
    for table in ("t", "u"):
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)")
        database.execute(f"INSERT INTO {table} SELECT generate_series(1, 10)")
    with snapshot_of(database, relation_of(database, "t"), tmp_path / "t") as snapshot:
        database.execute("SET lock_timeout = 0")
        holder = database.connect()
        holder.execute("BEGIN")
        holder.execute("LOCK TABLE t IN ACCESS SHARE MODE")
        other = snapshot.beside(relation_of(database, "u"), tmp_path / "u")
        with database.connect() as session:
            alter = threading.Thread(target=session.execute, args=(b"ALTER TABLE t ALTER id TYPE bigint",))
            alter.start()
            asked = "SELECT count(*) FROM pg_locks WHERE relation = 't'::regclass AND NOT granted"
            wait_until(lambda: database.execute(asked) == [(1,)])
            reader = RangeReader(database.dsn())
            read = [snapshot, other] if is_together else [snapshot]
            first, *others = reader.read_together(
                [each.whole for each in read], BOUNDS, [(each.target, each.conform) for each in read]
            )
            assert isinstance(first, SnapshotInterrupted)
            assert "somebody waits to alter or truncate the table" in first.message
            assert [sum(file.n_rows for file in files) for files in others] == [10] * (len(read) - 1)
            holder.close()
            alter.join(30)
            assert not alter.is_alive()
            reader.close()


@NEWEST
def test_ranges_of_small_tables_are_read_in_one_transaction_and_one_that_fails_costs_no_other(
    database: Database, tmp_path: Path
) -> None:
    for table in ("t", "u", "v", "w"):
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, d numeric)")
        database.execute(f"INSERT INTO {table} SELECT i, 1 FROM generate_series(1, 10) i")
    database.execute("INSERT INTO w VALUES (11, 'Infinity')")
    with snapshot_of(database, relation_of(database, "t"), tmp_path / "t") as snapshot:
        each = [snapshot, *(snapshot.beside(relation_of(database, name), tmp_path / name) for name in "uvw")]
        database.execute("INSERT INTO v VALUES (2000, 1)")
        tasks = [one.whole for one in each]
        tasks[1] = replace(tasks[1], source=replace(tasks[1].source, row_filter="1 / (id - 5) > 2"))
        reader = RangeReader(database.dsn())
        for _ in range(2):  # the second time columns are known to come as text
            found = reader.read_together(tasks, BOUNDS, [(one.target, one.conform) for one in each])
            for one, files in zip(each, found, strict=True):
                one.files = files if isinstance(files, list) else []
            assert isinstance(found[1], PoisonedChange)
            assert [one.rows().num_rows for one in each] == [10, 0, 10, 11]
            locked = "SELECT count(*) FROM pg_locks WHERE relation = ANY(%s::regclass[])"
            assert database.execute(locked, ["t", "u", "v", "w"]) == [(0,)], "the transaction has ended"
        reader.close()


def test_a_failing_expression_is_told_without_the_rows_value(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (v text)")
    database.execute("INSERT INTO t VALUES ('1'), ('topsecret')")
    with (
        snapshot_of(database, relation_of(database, "t"), tmp_path, row_filter="v::int > 0") as snapshot,
        pytest.raises(PoisonedChange, match=r"public\.t .*22P02") as caught,
    ):
        snapshot.read_all()
    assert "topsecret" not in f"{caught.value.message} {caught.value.remedy}"


@NEWEST
def test_text_that_is_not_utf8_names_its_column_and_not_its_value(database: Database, tmp_path: Path) -> None:
    name = f"ascii_{database.name}"
    database.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING SQL_ASCII LOCALE 'C'")
    try:
        dsn = database.server.conninfo(name)
        with psycopg.connect(dsn, autocommit=True, client_encoding="UTF8") as connection:
            other = Database(database.server, name, connection)
            connection.execute("CREATE TABLE t (id int, v text)")
            connection.execute("INSERT INTO t VALUES (1, 'good'), (2, E'secret\\xff')")
            relation = relation_of(other, "t")
            with (
                snapshot_of(other, relation, tmp_path) as snapshot,
                pytest.raises(PoisonedChange, match=r"public\.t column v .* not valid UTF-8") as caught,
            ):
                snapshot.read_all()
            assert "secret" not in caught.value.message
    finally:
        database.execute(f"DROP DATABASE {name} WITH (FORCE)")
