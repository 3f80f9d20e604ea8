"""From PostgreSQL through Arrow and Spark to Delta, and back into the server, which is the judge."""

from __future__ import annotations

from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from psycopg import sql

from tests.differential.source_schema import TYPES
from tests.e2e.conftest import Pipeline
from xidstream import ChangeStream

pytestmark = pytest.mark.e2e

MORE_ARRAYS = {
    "int2[]": ["'{-32768,NULL,32767}'", "'{}'", "'{{1},{2}}'"],
    "oid[]": ["'{0,4294967295,NULL}'"],
    "float4[]": ["'{NaN,-Infinity,-0,1e-45,NULL}'"],
    "varchar(5)[]": ["'{abcde,NULL,\"\"}'"],
    "char(3)[]": ["'{a,NULL}'"],
    "name[]": ["'{a_name}'"],
    "timestamp[]": ["'{2024-02-29 23:59:59.999999,NULL}'", "'{infinity}'", "'{4713-01-01 BC}'"],
    "json[]": ['\'{"{\\"a\\" :  1}",NULL,"null"}\''],
}
EVERY_TYPE = {**TYPES, **MORE_ARRAYS}


def to_delta(pipeline: Pipeline, **settings: Any) -> None:
    query = (
        ChangeStream(pipeline.config(**settings))
        .toDelta(str(pipeline.delta))
        .trigger(availableNow=True)
        .start(pipeline.spark)
    )
    assert query.awaitTermination(180), query.lastProgress


def delta(pipeline: Pipeline, name: str) -> pa.Table:
    table = DeltaTable(str(pipeline.delta / name)).to_pyarrow_table()
    return table.sort_by([("_commit_lsn", "ascending"), ("_seq", "ascending")])


def texts(column: pa.ChunkedArray) -> list[Any]:
    """Each value as text that PostgreSQL reads; a list as a list of such texts."""
    if pa.types.is_list(column.type):
        elements = iter(texts(pa.chunked_array([pc.list_flatten(column).combine_chunks()])))
        return [
            None if n is None else [next(elements) for _ in range(n)]
            for n in pc.list_value_length(column).to_pylist()
        ]
    if pa.types.is_binary(column.type):
        return [None if value is None else "\\x" + value.hex() for value in column.to_pylist()]
    # Arrow's own casts: Python cannot hold every date, and a float32 would be widened.
    return list(pc.cast(column, pa.string()).to_pylist())


@pytest.mark.parametrize(
    ("postgres_server", "spilled"),
    [pytest.param(16, False, marks=pytest.mark.slow), (18, True)],
    indirect=["postgres_server"],
)
def test_every_type_at_its_corners_comes_back_from_delta_as_the_server_has_it(
    pipeline: Pipeline, spilled: bool
) -> None:
    database = pipeline.database
    columns = {f"c{i:02d}": t for i, t in enumerate(EVERY_TYPE)}
    layout = ", ".join(f"{name} {t}" for name, t in columns.items())
    for statement in (
        "create schema s",
        "create type s.mood as enum ('sad', 'ok', 'with space')",
        "create domain s.positive as int",
        "create domain s.price as numeric(10,2)",
        "create type s.pair as (a int, b text)",
        f"create table s.t (id bigint primary key, {layout})",
        "create table s.copy (like s.t)",
        "create publication p for table s.t",
    ):
        database.execute(statement)
    settings: dict[str, Any] = {"buffer_memory_bytes": "1MB", "block_bytes": 256 << 10} if spilled else {}
    pipeline.create_slot()
    n_rows = 1 + max(map(len, EVERY_TYPE.values()))
    with database.connect() as session:
        session.execute(b"begin")
        for n in range(n_rows):
            values = ", ".join(
                f"cast({(*pool, 'null')[n % (len(pool) + 1)]} as {t})" for t, pool in EVERY_TYPE.items()
            )
            session.execute(f"insert into s.t values ({n}, {values})".encode())
        # Enough to be streamed, and to spill where that is wanted.
        session.execute(
            b"insert into s.t (id, c12) select i, repeat('x', 100) from generate_series(1001, 21000) i"
        )
        session.execute(b"commit")
    to_delta(pipeline, **settings)

    rows = delta(pipeline, "s.t")
    assert rows["_change_type"].unique().to_pylist() == ["insert"]
    assert DeltaTable(str(pipeline.delta / "_transactions")).to_pyarrow_table()["streamed"].to_pylist() == [
        True
    ]
    found = rows.slice(0, n_rows)
    kept_as_text = [dict(text or ()) for text in found["_text"].to_pylist()]
    given = {name: texts(found[name]) for name in columns}
    insert = sql.SQL("insert into s.copy values ({})").format(
        sql.SQL(", ").join(
            [sql.Placeholder()]
            + [
                sql.SQL("cast(cast({} as {}) as {})").format(
                    sql.Placeholder(),
                    sql.SQL("text[]" if pa.types.is_list(found[name].type) else "text"),
                    sql.SQL(t),
                )
                for name, t in columns.items()
            ]
        )
    )
    with psycopg.connect(database.dsn(), autocommit=True) as connection:
        for n in range(n_rows):
            values = [None if name in kept_as_text[n] else given[name][n] for name in columns]
            connection.execute(insert, [found["id"][n].as_py(), *values])
            for name, text in kept_as_text[n].items():
                assert given[name][n] is None, (name, text)
                connection.execute(
                    sql.SQL("update s.copy set {} = cast(%s as {}) where id = %s").format(
                        sql.Identifier(name), sql.SQL(columns[name])
                    ),
                    [text, n],
                )
        for name, t in columns.items():
            column = sql.Identifier(name)
            wrong = connection.execute(
                sql.SQL(
                    "select a.{0}::text, b.{0}::text from s.t a full join s.copy b using (id)"
                    " where id < 1000 and a.{0}::text is distinct from b.{0}::text"
                ).format(column)
            ).fetchall()
            assert wrong == [], f"{name} {t}: (source, came back)"
        assert connection.execute("select count(*) from s.copy").fetchone() == (n_rows,)
    assert rows.num_rows == n_rows + 20_000
    assert sum(map(len, kept_as_text)) > 20, "infinities, BC dates, arrays of two dimensions are in _text"


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_delta_follows_each_change_of_a_table_and_loses_nothing(pipeline: Pipeline) -> None:
    """The rule is docs/delta.md's, 'When a source table changes'."""
    database = pipeline.database
    database.execute("create table t (id bigint primary key, note text, n int)")
    database.execute("create publication p for all tables")
    pipeline.create_slot()
    changes = (
        "insert into t values (1, 'a', 1)",
        "alter table t add extra int default 5",
        "insert into t values (2, 'b', 2)",
        "alter table t drop note",
        "insert into t values (3, 3)",
        "alter table t rename n to m",
        "insert into t values (4, 4)",
        "alter table t alter m type bigint",
        "insert into t values (5, 5000000000)",
        "alter table t alter extra type text using 'x' || extra",
        "insert into t values (6, 6, 'six')",
        "alter table t rename to moved",
        "insert into moved values (7, 7, 'seven')",
        "drop table moved",
        "create table t (id bigint primary key, other bool)",
        "insert into t values (8, true)",
    )
    for change in changes[:7]:  # one by one, each in a batch with its neighbours
        database.execute(change)
    to_delta(pipeline)
    with database.connect() as session:  # the others within one streamed transaction
        session.execute(b"begin")
        session.execute(b"insert into t select i, i from generate_series(1001, 3000) i")
        for change in changes[7:]:
            session.execute(change.encode())
        session.execute(b"insert into t select i, false from generate_series(3001, 5000) i")
        session.execute(b"commit")
    to_delta(pipeline)

    names = ["id", "note", "n", "extra", "m", "m__long", "extra__string", "other"]
    table = delta(pipeline, "public.t")
    assert [name for name in table.column_names if not name.startswith("_")] == names
    rows = [tuple(row[name] for name in names) for row in table.to_pylist()]
    none = None
    assert rows[:3] == [
        (1, "a", 1, none, none, none, none, none),
        (2, "b", 2, 5, none, none, none, none),
        (3, none, 3, 5, none, none, none, none),
    ]
    assert rows[3] == (4, none, none, 5, 4, none, none, none)
    assert rows[4] == (1001, none, none, 5, 1001, none, none, none)
    by_id = {row[0]: row for row in rows}
    assert by_id[5] == (5, none, none, 5, none, 5_000_000_000, none, none)
    assert by_id[6] == (6, none, none, none, none, 6, "six", none)
    assert by_id[8] == (8, none, none, none, none, none, none, True)
    assert len(rows) == len(by_id) == 7 + 2000 + 2000
    moved = delta(pipeline, "public.moved").select(["id", "m", "extra"]).to_pylist()
    assert moved == [{"id": 7, "m": 7, "extra": "seven"}]
