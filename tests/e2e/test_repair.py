"""A key range of one table is repaired in its log: the range is read from the source, and the rest carried over."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tests.e2e.conftest import Pipeline
from tests.e2e.test_snapshots import generations
from tests.e2e.test_verify import Verified, damaged, place_in, replaced, twice, without
from tests.postgres_fixtures import Database
from tests.waiting import wait_until
from xidstream.actors.cli.snapshots import request_command, status_command
from xidstream.actors.snapshots import coordinator
from xidstream.pipeline import faultpoints
from xidstream.pipeline.changelog.carrying import _meets
from xidstream.pipeline.errors import SinkDiverged
from xidstream.pipeline.faultpoints import FaultPlan
from xidstream.pipeline.initial_copy.range_reading import RangeOutput, RangeReader
from xidstream.pipeline.log_tables.columns import Conform, map_columns
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.postgres.admin import sql_connection
from xidstream.pipeline.postgres.snapshot_sources import survey
from xidstream.pipeline.postgres.table_holder import TableHolder
from xidstream.pipeline.schema.rows import contract_schema
from xidstream.pipeline.snapshot.key_filter import bound, parse_key_filter
from xidstream.pipeline.snapshot.tables import RangeTask, plan_ranges
from xidstream.pipeline.verify.result import Verdict
from xidstream.pipeline.verify.source_rows import read_source

pytestmark = pytest.mark.e2e
on_18 = pytest.mark.parametrize("postgres_server", [18], indirect=True)

SCHEMA = """
    create table orders (
        region varchar, id bigint, day date, price numeric(10,2), free numeric, at timestamptz,
        local timestamp, tags text[], doc jsonb, body text, flag bool, "${user.dir}" text, primary key (region, id)
    );
    alter table orders alter body set storage external;
    insert into orders
    select case when i % 2 = 0 then 'Île' else 'east' end, i, date '2026-01-01' + i, i / 8.0, i / 3.0,
        case when i % 97 = 0 then 'infinity' else now() end, 'epoch'::timestamp + i * interval '1 s',
        array['a' || i, null], jsonb_build_object('i', i), repeat(md5(i::text), 100), i % 3 = 0, 'user ' || i
    from generate_series(1, 2000) i;
"""


class Writes:
    """One session that changes rows in and outside of the range, until ``stop``."""

    STATEMENTS = (
        "update orders set price = price + 1 where id = {n}",  # its body is not sent
        "update orders set body = repeat('new', 1000) where id = {n}",
        "delete from orders where id = {n} and id % 7 = 0",
        "insert into orders (region, id, body) values ('east', 5000 + {n}, repeat('x', 3000)) on conflict do nothing",
        "update orders set id = 10000 + {n} where id = {n} and id % 11 = 0",
        "update orders set id = 150 where id = {n} and id % 13 = 0 and not exists (select from orders where id = 150)",
    )

    def __init__(self, database: Database) -> None:
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(database,), daemon=True)
        self._thread.start()

    def _run(self, database: Database) -> None:
        try:
            with database.connect() as session:
                n = 0
                while not self._stop.wait(0.02):
                    n += 1
                    statement = self.STATEMENTS[n % len(self.STATEMENTS)].format(n=n * 7 % 1000 + 300)
                    session.execute(statement.encode())
        except BaseException as error:
            self._failures.append(error)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        assert not self._failures, self._failures


KEYS = {
    "small": ("int2", "-32768", "-1", "0", "32767"),
    "plain": ("int4", "-2147483648", "0", "7", "2147483647"),
    "big": ("int8", "-9223372036854775808", "5", "9223372036854775807"),
    "o": ("oid", "0", "2147483648", "4294967295"),
    "d": (
        "date",
        "0001-01-01",
        "1969-12-31",
        "2026-05-04",
        "9999-12-31",
        *("-infinity", "infinity", "0044-03-15 BC"),
    ),
    "at": (
        "timestamptz",
        *("0001-01-01 00:00:00+00", "2026-03-29 00:59:59.999999+00", "9999-12-31 23:59:59.999999+00"),
        *("-infinity", "infinity", "0044-03-15 12:00:00+00 BC"),
    ),
    "local": (
        "timestamp",
        *("0001-01-01 00:00:00", "2026-03-29 02:30:00", "1500-02-28 00:00:00.5", "9999-12-31 23:59:59"),
        *("-infinity", "infinity", "10000-01-01 00:00:00"),
    ),
    "price": ("numeric(10,2)", "-99999999.99", "-0.01", "0", "0.10", "99999999.99", "NaN"),
    "most": ("numeric(38,10)", "-9999999999999999999999999999.9999999999", "0", "1.0000000001"),
    "u": (
        "uuid",
        *("00000000-0000-0000-0000-00000000000a", "7fffffff-0000-0000-0000-000000000000"),
        *("80000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"),
    ),
    "t": (
        "text",
        "",
        "A",
        "a",
        "a ",
        "Z",
        "z",
        "é",
        "e\u0301",
        "it's",
        "\\",
        "\uffff",
        "\U0001f600",
        "ß",
        "ss",
    ),
    "v": ("varchar(9)", "ab", "aB", "-ab", "a b", "äb", "100", "99"),
    "c": ("char(3)", "", "a", "ab", "é", "a\t"),
    "f": ("bool", "true", "false"),
    "of_domain": ("whole", "-3", "0", "3"),
}
"""Column → its type, and values at its corners."""
OUTSIDE = ("infinity", "BC", "10000", "NaN")
"""Values that a filter cannot name."""


def filters_of(dice: random.Random) -> list[str]:
    found = []
    for column, (type_, *values) in KEYS.items():
        named = [v.replace("'", "''") for v in values if not any(each in v for each in OUTSIDE)]
        operators = ("=",) if type_.startswith("char") else ("=", "<", "<=", ">", ">=")
        found += [f"{column} {operator} '{value}'" for value in named for operator in operators]
        quoted = ", ".join(f"'{value}'" for value in dice.sample(named, 2))
        found.append(f"{column} in ({quoted})")
    found += [f"{dice.choice(found)} and {dice.choice(found)}" for _ in range(20)]
    return found


def generation_of(pipeline: Pipeline) -> int:
    finished = [line["generation"] for line in generations(pipeline) if line["state"] == "finished"]
    return max(finished, default=0)


@pytest.mark.slow
@on_18
@pytest.mark.timeout(300)
def test_a_repair_reads_the_range_alone_heals_it_amid_writes_and_leaves_what_is_outside(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    monkeypatch.setattr(coordinator, "_LOOK_S", 0.5)
    caplog.set_level(logging.INFO)
    database, verified = pipeline.database, Verified(pipeline, SCHEMA)
    verified.start("orders")
    table = verified.root / "public.orders"
    writes = Writes(database)
    # A crash of the carrying, once: what was read is still there.
    monkeypatch.setattr(faultpoints, "_plan", FaultPlan("snapshot_carried:error=StorageFault", None))
    try:
        with ExitStack() as damages:
            for damage in (
                replaced("body", "wrong", id=101),
                without(id=102),
                twice(id=103),
                replaced("id", 104, id=105),  # 105 is missing, and 104 there twice
                replaced("price", None, id=20),  # outside
            ):
                damages.enter_context(damaged(table, damage))
            request_command(pipeline.config(), ["public.orders"], "id between 100 and 199")
            pipeline.wait_until(lambda: generation_of(pipeline) == 2)
    finally:
        writes.stop()

    def told() -> str:
        return next((m for r in caplog.records if "key range is repaired" in (m := r.getMessage())), "")

    pipeline.wait_until(lambda: bool(told()))
    (read,) = database.execute("select count(*) from orders where id between 100 and 199")[0]
    assert f"{read} rows read from the source" in told(), told()

    rows = DeltaTable(str(table)).to_pyarrow_table().to_pylist()
    (line,) = [line for line in generations(pipeline) if line["generation"] == 2]
    mine = [row for row in rows if row["_commit_lsn"] == line["place"]]
    assert len(mine) == line["rows"] and {row["_change_type"] for row in mine} == {"snapshot"}
    assert max(Counter(row["_seq"] for row in mine).values()) == 1
    assert {row["_xid"] for row in mine} == {None}
    assert [row["price"] for row in mine if row["id"] == 20] == [None], "it was not read from the source"

    # What is outside is repaired in the same way, in a database where nothing commits any more.
    sink = f"delta:{verified.root}"
    request_command(pipeline.config(sink=sink), ["public.orders"], "id in (20) and region = 'Île'")
    capsys.readouterr()
    status_command(pipeline.config(sink=sink))
    assert "repair asked for: id = 20 and region = 'Île'" in capsys.readouterr().out
    pipeline.wait_until(lambda: generation_of(pipeline) == 3)
    assert verified("orders")["public.orders"].verdict is Verdict.EQUAL
    status_command(pipeline.config(sink=sink))
    assert "finished: repair of id = 20 and region = 'Île'" in capsys.readouterr().out
    pipeline.query.stop()
    assert place_in(table, id=20) is not None


@on_18
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_repair_in_whose_middle_the_run_ends_is_made_by_the_next_one_once(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "_LOOK_S", 0.5)
    database, verified = pipeline.database, Verified(pipeline, SCHEMA)
    verified.start("orders")
    table = verified.root / "public.orders"
    with damaged(table, replaced("body", "wrong", id=101)):
        for n, point in enumerate(("snapshot_carried", "committing_snapshot", "snapshot_committed")):
            monkeypatch.setattr(faultpoints, "_plan", FaultPlan(f"{point}:error=SinkDiverged", None))
            # Another one each time: what is asked for again before it is forgotten is done.
            request_command(pipeline.config(), ["public.orders"], f"id between 100 and {199 + n}")
            wait_until(lambda: not pipeline.query.isActive, timeout_s=60)
            assert isinstance(pipeline.query.exception(), SinkDiverged)
            database.execute("update orders set price = price + 1 where id in (101, 201)")
            verified.start("orders")
            pipeline.wait_until(lambda n=n: generation_of(pipeline) == n + 2)  # type: ignore[misc]
    assert verified("orders")["public.orders"].verdict is Verdict.EQUAL
    assert generation_of(pipeline) == 4, "none was made twice"
    pipeline.query.stop()


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [pytest.param(16, marks=pytest.mark.slow), 18], indirect=True)
def test_the_source_and_the_log_choose_the_same_rows_of_every_type_that_a_filter_may_name(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    database, dice = pipeline.database, random.Random(40)
    database.execute("create domain whole as int4")
    columns = ", ".join(f"{name} {type_}" for name, (type_, *_) in KEYS.items())
    database.execute(f"create table keys (n int, {columns}, primary key ({', '.join(KEYS)}))")
    database.execute("create publication p for all tables")
    n_rows = 2 * max(len(values) for values in KEYS.values())
    for n in range(n_rows):
        # Each value of each column, with others beside it.
        row = [
            values[(n + n // len(values) * i) % len(values)] for i, (_, *values) in enumerate(KEYS.values())
        ]
        casts = ", ".join(f"%s::{type_}" for type_, *_ in KEYS.values())
        database.execute(f"insert into keys values ({n}, {casts})", *row)
    with sql_connection(database.dsn(), "the table") as connection:
        (source,) = survey(connection, ["p"])
    holder, reader = TableHolder(database.dsn(), ["p"]), RangeReader(database.dsn())
    try:
        held = holder.hold(source, wait_for_writers=False)
        folder = Location.parse(str(tmp_path / "rows"))
        no_pause: dict[str, Any] = {"pause_ms": 0, "bytes_per_s": 0, "check": lambda: None}
        rows = read_source(reader, held, folder, tuple(KEYS), **no_pause)
        assert rows.n_rows == n_rows
        mapping = map_columns((), contract_schema(held.source.relation))
        conform = Conform.of(mapping.columns, mapping.names)
        (pages,) = plan_ranges(held.source.leaves, by_range=False)
        chosen: dict[str, set[int]] = {}
        filters = {
            text: bound(parse_key_filter(text), held.source.relation, tuple(KEYS))
            for text in filters_of(dice)
        }
        for text, only in filters.items():
            task = RangeTask(held.source, held.snapshot_name, pages, only)
            files = reader.read(task, held.bounds, RangeOutput(folder, "only"), conform)
            chosen[text] = {
                n for file in files for n in pq.read_table(f"{folder.uri}/{file.path}")["n"].to_pylist()
            }
    finally:
        reader.close()
        holder.close()
    session = pipeline.spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    masks = [_meets(only).alias(f"m{i}") for i, only in enumerate(filters.values())]
    found = rows.frame(session).select("n", *masks).collect()
    for i, text in enumerate(filters):
        assert {row["n"] for row in found if row[f"m{i}"]} == chosen[text], text
    assert sum(0 < len(each) < n_rows for each in chosen.values()) > len(chosen) / 2
