"""Names that try to be something else: SQL, a path, a URI, a Spark expression, a line of a log.

Whoever may create tables in the source chooses them. Each is a table's, a column's, a schema's and a publication's name
at once, a prefix of a message and a prepared transaction's gid, on the real server, and comes back from Delta as it is.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from deltalake import DeltaTable
from psycopg import sql

from tests.e2e.conftest import Pipeline
from tests.e2e.test_command_line import NEWEST
from tests.e2e.test_delta_round_trip import to_delta
from xidstream import ChangeLog, ChangeStream, Mirror
from xidstream.actors.cli.main import main
from xidstream.pipeline.log_tables.locations import encode_table
from xidstream.pipeline.pg_rules import table_label

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HOSTILE = (
    "..",
    "../../../etc/x",
    "%2e%2e%2fx",
    "%00",
    ".hidden",
    "-rf",
    "~",
    "~2E",
    "a.b",
    "new\nline",
    "carriage\rreturn",
    "a\ttab",
    "\x01\x1b[31m\x7f",
    'double"quote',
    "single'quote",
    "back`tick`",
    "`",
    "back\\slash\\n",
    "$$;drop table t;--",
    "/* comment",
    "${spark.app.name}",
    "{x}%s",
    "a b,c=d(e)[f]",
    "*",
    "#?&=:@",
    "x" * 63,
    "é" * 31,
    "\U0001f600" * 15,
    "\u202eright to left",
    "_transactions",
)
HOSTILE_FOLDER = "-d {a,b} *?${java.home} 'q\" #&=+~;`é"
READ_BY_SPARK = ("back`tick`", "a b,c=d(e)[f]", "${spark.app.name}")


@NEWEST
def test_a_hostile_name_of_anything_is_a_name_and_nothing_else(pipeline: Pipeline, tmp_path: Path) -> None:
    database, name_of = pipeline.database, sql.Identifier
    pipeline.delta = tmp_path / HOSTILE_FOLDER
    pipeline.storage = tmp_path / f"segments of {HOSTILE_FOLDER}"
    with database.connect() as session:
        for name in HOSTILE:
            session.execute(sql.SQL("create schema {}").format(name_of(name)))
            table = sql.Identifier(name, name)
            session.execute(
                sql.SQL("create table {} (id bigint primary key, {} text, b text)").format(
                    table, name_of(name)
                )
            )
            session.execute(
                sql.SQL("insert into {} values (1, 'before', {})").format(table, sql.Literal(name))
            )
            session.execute(sql.SQL("create publication {} for table {}").format(name_of(name), table))
    settings = {
        "publication": HOSTILE,
        "snapshot": "initial",
        "two_phase": True,
        "buffer_memory_bytes": "1MB",
    }
    to_delta(pipeline, **settings)
    with database.connect() as session:
        session.execute(b"begin")  # large enough to be streamed and spilled
        for name in HOSTILE:
            rows = "insert into {} select i, repeat('x', 500), {} from generate_series(2, 300) i"
            session.execute(sql.SQL(rows).format(sql.Identifier(name, name), sql.Literal(name)))
        session.execute(b"commit")
        for number, name in enumerate(HOSTILE):
            emit = sql.SQL("select pg_logical_emit_message(true, {}, {})")
            session.execute(emit.format(sql.Literal(name), sql.Literal(name)))
            session.execute(b"begin")
            update = sql.SQL("update {} set {} = 'after' where id = 1")
            session.execute(update.format(sql.Identifier(name, name), name_of(name)))
            session.execute(sql.SQL("prepare transaction {}").format(sql.Literal(name)))
            if number % 2:
                session.execute(sql.SQL("commit prepared {}").format(sql.Literal(name)))
    to_delta(pipeline, **settings)
    with database.connect() as session:
        for name in HOSTILE[::2]:
            session.execute(sql.SQL("commit prepared {}").format(sql.Literal(name)))
    to_delta(pipeline, **settings)

    for name in HOSTILE:
        table = DeltaTable(str(pipeline.delta / encode_table(name, name))).to_pyarrow_table()
        assert set(table["b"].to_pylist()) == {name} and table.num_rows == 301 and name in table.column_names
    state = ChangeLog(str(pipeline.delta)).as_of(pipeline.spark)
    assert set(state.tables()) == {table_label(name, name) for name in HOSTILE}
    for name in READ_BY_SPARK:
        rows = {row["id"]: row for row in state[(name, name)].collect()}
        assert len(rows) == 300 and rows[1][name] == "after" and rows[2]["b"] == name
    assert Mirror(str(pipeline.delta)).refresh(pipeline.spark) is not None
    (base,) = (pipeline.delta / "current").glob(f"{encode_table('*', '*')}")
    assert DeltaTable(str(base)).to_pyarrow_table().num_rows == 300
    shutil.rmtree(pipeline.delta / "current")
    folders = {path.name for path in pipeline.delta.iterdir()}
    assert folders == {encode_table(name, name) for name in HOSTILE} | {
        "_messages",
        "_transactions",
        "_snapshots",
    }
    messages = DeltaTable(str(pipeline.delta / "_messages")).to_pyarrow_table().to_pylist()
    assert sorted(m["prefix"] for m in messages) == sorted(HOSTILE)
    # Nothing was written anywhere else.
    assert {path.name for path in tmp_path.iterdir()} == {pipeline.delta.name, pipeline.storage.name}


@NEWEST
def test_columns_that_clash_cost_only_their_table_which_can_be_had_under_other_names(
    pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the run for all tables, and could not be had at all."""
    database = pipeline.database
    for statement in (
        'create table odd (id int primary key, "Name" text, name text, "_COMMIT_LSN" int)',
        "create table good (id int primary key, n int)",
        "insert into odd select i, 'A' || i, 'a' || i, i from generate_series(1, 5) i",
        "insert into good select i, i from generate_series(1, 5) i",
        "create publication p for all tables",
    ):
        database.execute(statement)
    query = (
        ChangeStream(pipeline.config(snapshot="initial")).toDelta(str(pipeline.delta)).start(pipeline.spark)
    )
    pipeline.query = query
    pipeline.wait_until(lambda: "the snapshot of table public.odd: column name clashes" in caplog.text)
    database.execute("insert into odd values (6, 'A6', 'a6', 6)")
    database.execute("insert into good values (6, 6)")
    pipeline.wait_until(lambda: DeltaTable.is_deltatable(str(pipeline.delta / "_transactions")))
    log = ChangeLog(str(pipeline.delta))
    log.wait()
    pipeline.wait_until(lambda: "public.good" in log.as_of(pipeline.spark).tables())
    pipeline.wait_until(lambda: log.as_of(pipeline.spark)["public.good"].count() == 6)
    assert any("public.odd" in row["tables"] for row in log.transactions(pipeline.spark).collect())
    pipeline.wait_until(lambda: "table public.odd is parked" in caplog.text)
    query.stop()
    assert query.exception() is None

    with pytest.raises(SystemExit) as ended:
        where = [
            "--dsn",
            database.dsn(),
            "--slot",
            pipeline.config().slot,
            "--storage",
            str(pipeline.storage),
        ]
        main(["table", "resume", *where, "--table", "public.odd"])
    assert not ended.value.code
    names = ("public.odd.Name=name_2", "public.odd._COMMIT_LSN=source_lsn")
    query = (
        ChangeStream(pipeline.config(snapshot="initial", column_names=names))
        .toDelta(str(pipeline.delta))
        .start(pipeline.spark)
    )
    pipeline.query = query
    pipeline.wait_until(lambda: "public.odd" in log.as_of(pipeline.spark).tables())
    database.execute("update odd set \"Name\" = 'new' where id = 1")
    verified = log.verify(pipeline.spark, database.dsn(), "p", column_names=names)
    assert verified.is_equal, verified.summary
    rows = {row["id"]: row for row in log.as_of(pipeline.spark)["public.odd"].collect()}
    assert rows[1].asDict() == {"id": 1, "name_2": "new", "name": "a1", "source_lsn": 1} and len(rows) == 6
    query.stop()
    assert query.exception() is None
