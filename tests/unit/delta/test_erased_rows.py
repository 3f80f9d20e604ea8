"""A log table without the rows of some keys: all other rows, ranges, counts and watermarks stay. No Spark."""

from __future__ import annotations

import json
import random
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tests.fold import folded
from tests.random_log import COLUMNS, RandomLog, values_of
from tests.unit.delta.test_small_files import s3 as s3
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.delta.erased_table import erase_rows
from xidstream.pipeline.errors import SinkFailed, StorageFault, Unsupported, UsageError
from xidstream.pipeline.log_tables import erased_rows
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.erased_keys import parse_keys
from xidstream.pipeline.log_tables.erased_marks import UPTO, erased_id
from xidstream.pipeline.log_tables.erased_rows import Erased
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.log_table import SnapshotOutdated
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles, WrittenFile
from xidstream.pipeline.log_tables.small_files import SIZE_CLASSES
from xidstream.pipeline.log_tables.table_metadata import TableMetadata
from xidstream.pipeline.schema.rows import CONTRACT_FIELDS

SLOT = "7/shop/orders"
LABEL = "public.t"
ARROW = {
    "id": pa.int32(),
    "Part": pa.string(),
    "n": pa.float64(),
    "body": pa.string(),
    "tags": pa.list_(pa.int32()),
    "at": pa.timestamp("us"),
    "c0": pa.decimal128(10, 2),
}
TYPES = {"id": "integer", "Part": "text"}
SCHEMA = pa.schema([*(pa.field(name, ARROW[name]) for name in COLUMNS), *CONTRACT_FIELDS])
PLACE = 999


class Table:
    """The log of one table, as the sink leaves it."""

    def __init__(self, location: Location, key: list[str] | None = None) -> None:
        self.location = location
        key = ["id"] if key is None else key
        columns = {name: {"type": TYPES.get(name, "t"), "column": name} for name in COLUMNS}
        version = {"slot": SLOT, "since": PLACE, "key": key or None, "columns": columns}
        about = TableMetadata("", {"xidstream.versions": json.dumps([version]), **STATISTICS}, {})
        delta = [TableColumn(field.name, field.type, field.name) for field in SCHEMA]
        self.writer = DeltaTableWriter.open_or_create(location, LABEL, delta, about)
        self.n_files = 0

    def written(self, rows: list[dict[str, Any]], prefix: str = "data") -> list[WrittenFile]:
        self.n_files += 1
        files = ParquetFiles(self.location, f"{prefix}-{self.n_files}", SCHEMA, "_commit_lsn")
        shown = [{name: value for name, value in row.items() if name in SCHEMA.names} for row in rows]
        for row in shown:
            row["_text"] = list((row.get("_text") or {}).items()) or None
        files.write(pa.RecordBatch.from_pylist(shown, SCHEMA))
        return files.close()

    def commit(self, *rows: dict[str, Any]) -> None:
        last = max(row["_commit_lsn"] for row in rows)
        self.writer.commit(self.written(list(rows)), {SLOT: last}, marks={f"{SLOT}/owner": 3}, merges=False)

    def snapshot(self, rows: list[dict[str, Any]], snapshot_lsn: int = PLACE) -> None:
        told = [
            {**row, "_change_type": "snapshot", "_commit_lsn": snapshot_lsn, "_seq": i}
            for i, row in enumerate(rows)
        ]
        files = self.written(told, "snapshot")
        self.writer.commit(
            files, {f"{SLOT}/snapshot": snapshot_lsn}, marks={f"{SLOT}/owner": 3}, merges=False
        )

    def erase(self, *keys: str, upto: int = 10**6) -> Erased:
        return erase_rows(self.location, LABEL, SLOT, parse_keys(keys), upto)


STATISTICS = {"delta.dataSkippingStatsColumns": "_commit_lsn"}


def read(location: Location) -> list[dict[str, Any]]:
    table = DeltaTable(location.uri, storage_options=location.storage_options).to_pyarrow_table()
    rows = sorted(table.to_pylist(), key=lambda row: (row["_commit_lsn"], row["_seq"]))
    return [{**row, "_text": dict(row["_text"] or ()) or None} for row in rows]


def listed(location: Location) -> list[dict[str, Any]]:
    writer = DeltaTableWriter.open(location, LABEL)
    assert writer is not None
    return writer.files().to_pylist()


def change(kind: str, lsn: int, seq: int = 0, **values: Any) -> dict[str, Any]:
    return {"_change_type": kind, "_commit_lsn": lsn, "_xid": lsn, "_seq": seq, **values}


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(Location.parse(str(tmp_path / LABEL)))


def states_of(rows: list[dict[str, Any]], key: list[str] | None, lsns: list[int]) -> list[Counter[Any]]:
    """The table at each LSN, folded by the contract alone; what ``_text`` has is in the place of its column."""
    shown = [{**row, **dict(zip(COLUMNS, values_of(row), strict=True))} for row in rows]
    before = [row for row in shown if row["_change_type"] == "snapshot"]
    changes = [row for row in shown if row["_change_type"] != "snapshot"]
    return [
        folded(list(COLUMNS), key, before, [row for row in changes if row["_commit_lsn"] <= lsn])
        for lsn in lsns
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        {"key": ("id",)},
        {"key": ("id", "Part")},
        {"key": ("id",), "is_full": True},
        {"key": None},
        {"key": ("id",), "moves": False},
        {"key": ("id",), "row_filter": True},
    ],
    ids=["key", "two", "full", "keyless", "still", "filtered"],
)
def test_at_every_lsn_all_other_rows_are_what_they_were_and_those_of_the_keys_are_not_there(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    n_changed = 0
    for seed in range(5):
        log = RandomLog(seed, n_keys=8, n_transactions=25, **arguments)
        dice = random.Random(seed)
        key = list(arguments["key"] or ())
        is_full = arguments.get("is_full") or not key
        table = Table(Location.parse(str(tmp_path / str(seed))), [] if is_full else key)
        table.snapshot(log.base)
        rows = list(log.changes)
        while rows:
            # Also in the middle of a transaction: the files of one commit are several.
            n = dice.randint(5, 40)
            files = [
                file for part in (rows[: n // 2], rows[n // 2 : n]) if part for file in table.written(part)
            ]
            table.writer.commit(files, {}, marks={SLOT: rows[:n][-1]["_commit_lsn"]}, merges=False)
            rows = rows[n:]
        erased = dice.sample(range(1, 9), 3)
        before = read(table.location)
        done = table.erase(f"id in ({', '.join(map(str, erased))})")
        n_changed += done.n_changed
        assert done.n_rows == sum(row["id"] in erased for row in before)
        left = read(table.location)
        assert [(row["_commit_lsn"], row["_seq"]) for row in left] == [
            (row["_commit_lsn"], row["_seq"]) for row in before if row["id"] not in erased
        ]
        lsns = [lsn for lsn, _ in log.states]
        wanted = [
            Counter({row: n for row, n in state.items() if row[0] not in erased}) for _, state in log.states
        ]
        assert states_of(left, key or None, lsns) == wanted
        n_gone = sum(row["id"] in erased for row in log.base)
        assert DeltaTable(table.location.uri).transaction_version(erased_id(PLACE)) in (
            n_gone,
            n_gone or None,
        )
        again = table.erase(f"id in ({', '.join(map(str, erased))})")
        assert (again.n_rows, again.n_files) == (0, 0) and repr(read(table.location)) == repr(left)
    assert n_changed or not arguments.get("moves", True) or arguments["key"] is None


# -- what stays, and what is not touched ------------------------------------------------------------------


def test_only_files_with_such_rows_are_written_anew_and_keep_the_ranges_of_the_rows_that_stay(
    table: Table,
) -> None:
    table.snapshot([{"id": i} for i in range(5)])
    table.commit(
        change("insert", 1010, id=7), change("insert", 1020, id=8), change("update_postimage", 1030, id=7)
    )
    table.commit(change("insert", 1040, id=9))
    table.commit(change("delete", 1050, id=7))
    before = {each["path"]: each for each in listed(table.location)}
    assert table.erase("id = 7") == Erased(3, 2, 0, 0)
    after = {each["path"]: each for each in listed(table.location)}
    (new,) = after.keys() - before.keys()
    assert len(before.keys() - after.keys()) == 2, "the last one has no row left"
    assert (after[new]["num_records"], after[new]["min._commit_lsn"], after[new]["max._commit_lsn"]) == (
        1,
        1020,
        1020,
    )
    writer = DeltaTableWriter.open(table.location, LABEL)
    assert writer is not None
    assert (writer.watermark(SLOT), writer.watermark(UPTO)) == (1050, 10**6)
    assert [row["id"] for row in read(table.location)] == [0, 1, 2, 3, 4, 8, 9]


def test_a_snapshots_rows_are_counted_and_its_file_stays_one(table: Table) -> None:
    table.snapshot([{"id": i} for i in range(5)])
    table.snapshot([{"id": i} for i in range(5)], snapshot_lsn=2000)
    table.erase("id in (1, 2)")
    table.erase("id = 3")
    found = DeltaTable(table.location.uri)
    assert [found.transaction_version(erased_id(snapshot_lsn)) for snapshot_lsn in (PLACE, 2000)] == [3, 3]
    assert all(each["path"].startswith("snapshot-") for each in listed(table.location))


def test_rows_behind_the_lsn_stay_and_are_told(table: Table) -> None:
    table.commit(change("insert", 1010, id=7), change("delete", 1020, id=7), change("insert", 1030, id=7))
    assert table.erase("id = 7", upto=1020) == Erased(2, 1, 1, 0)
    assert [row["_commit_lsn"] for row in read(table.location)] == [1030]


def test_a_row_that_changed_its_key_stands_for_itself(table: Table) -> None:
    table.snapshot([{"id": 1, "body": "long", "tags": [1], "_text": {"c0": "NaN"}}])
    moved = change("update_postimage", 1010, 5, id=2, n=0.5, _unchanged=["body", "tags", "c0"])
    files = [*table.written([change("update_preimage", 1010, 4, id=1)]), *table.written([moved])]
    table.writer.commit(files, {SLOT: 1010}, merges=False)
    table.commit(
        change("update_preimage", 1020, 0, id=2), change("update_postimage", 1020, 1, id=3, body="b")
    )
    assert table.erase("id = 1").n_changed == 1
    moved = next(row for row in read(table.location) if row["_commit_lsn"] == 1010)
    assert (moved["_change_type"], moved["body"], moved["tags"], moved["n"]) == ("insert", "long", [1], 0.5)
    assert (moved["_unchanged"], moved["_text"]) == (None, {"c0": "NaN"})
    assert table.erase("id = 3").n_changed == 1
    assert [(row["_change_type"], row["id"]) for row in read(table.location)] == [
        ("insert", 2),
        ("delete", 2),
    ]


def test_nothing_is_committed_where_a_file_is_not_what_the_log_says(table: Table) -> None:
    table.commit(change("insert", 1010, id=7), change("insert", 1020, id=8))
    path = Path(table.location.uri, listed(table.location)[0]["path"])
    other = Path(table.location.uri, table.written([change("insert", 1010, id=7)])[0].path)
    path.write_bytes(other.read_bytes())
    with pytest.raises(SinkFailed):
        table.erase("id = 7")
    assert table.writer.version == DeltaTable(table.location.uri).version()
    assert not list(Path(table.location.uri).glob("*-erased"))


# -- beside others ----------------------------------------------------------------------------------------


def during(monkeypatch: pytest.MonkeyPatch, act: Any, n_times: int = 1) -> None:
    """``act`` happens when the files are written and nothing is committed, in the first ``n_times`` attempts."""
    left = [n_times]

    def reach(point: str) -> None:
        if point == "erasing_rows" and left[0]:
            left[0] -= 1
            act()

    monkeypatch.setattr(erased_rows, "reach", reach)


def test_rows_of_the_key_that_come_meanwhile_are_erased_too(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.commit(change("insert", 1010, id=7), change("insert", 1010, 1, id=8))
    during(
        monkeypatch,
        lambda: table.commit(change("update_postimage", 1020, id=7), change("insert", 1020, 1, id=9)),
    )
    assert table.erase("id = 7").n_rows == 2
    assert [row["id"] for row in read(table.location)] == [8, 9]
    assert len(list(Path(table.location.uri).glob("*-erased"))) == 2, "each file is written once"


def test_a_merge_of_small_files_meanwhile_is_looked_at_anew(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = SIZE_CLASSES[0].many
    for i in range(many - 1):
        table.commit(change("insert", 1010 + i, id=7 if i == 5 else i + 100))

    def merge() -> None:
        files = table.written([change("insert", 1990, id=7)])
        table.writer.commit(files, {SLOT: 1990}, marks={f"{SLOT}/owner": 3})
        assert len(listed(table.location)) == 1

    during(monkeypatch, merge)
    assert table.erase("id = 7").n_rows == 2
    assert len(read(table.location)) == many - 2 and not [r for r in read(table.location) if r["id"] == 7]
    assert len(list(Path(table.location.uri).glob("*-erased"))) == 1, "what was not needed is gone"


def test_whoever_has_a_commit_in_hand_is_refused_and_brings_no_row_back(table: Table) -> None:
    table.commit(change("insert", 1010, id=7))
    table.commit(change("insert", 1015, id=6))
    compacting = DeltaTable(table.location.uri)
    table.commit(change("insert", 1020, id=8))
    sink = DeltaTableWriter.open(table.location, LABEL)
    table.erase("id = 7")
    snapshot = DeltaTableWriter.open(table.location, LABEL)
    table.erase("id = 70")  # which has no row
    assert sink is not None and snapshot is not None
    with pytest.raises(SnapshotOutdated):
        sink.commit(table.written([change("insert", 1030, id=9)]), {SLOT: 1030}, marks={f"{SLOT}/owner": 3})
    with pytest.raises(SnapshotOutdated):
        snapshot.commit([], {f"{SLOT}/snapshot": 5000}, marks={f"{SLOT}/owner": 3}, merges=False)
    with pytest.raises(Exception, match=r"(?i)concurrent|conflict|version"):
        compacting.optimize.compact()
    assert [row["id"] for row in read(table.location)] == [6, 8]


def test_two_erasures_at_once_take_both_keys(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    table.snapshot([{"id": i} for i in range(5)])
    table.commit(*(change("update_postimage", 1010, i, id=i) for i in range(5)))
    during(monkeypatch, lambda: erase_rows(table.location, LABEL, SLOT, parse_keys(["id = 2"]), 10**6))
    assert table.erase("id = 1").n_rows == 2
    assert [row["id"] for row in read(table.location)] == [0, 3, 4] * 2
    assert DeltaTable(table.location.uri).transaction_version(erased_id(PLACE)) == 2


def test_a_table_that_is_changed_all_the_time_is_given_up_and_left_as_it_is(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.commit(change("insert", 1010, id=7), change("insert", 1010, 1, id=8))
    monkeypatch.setattr(erased_rows, "ATTEMPTS", 3)
    lsn = iter(range(1020, 2000))
    during(monkeypatch, lambda: table.commit(change("insert", next(lsn), id=9)), n_times=3)
    with pytest.raises(StorageFault):
        table.erase("id = 7")
    assert len(read(table.location)) == 5 and not list(Path(table.location.uri).glob("*-erased"))


def test_an_erasure_in_a_store_goes_through_though_the_answer_to_its_commit_is_lost(
    s3: tuple[Location, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    location, server = s3
    table = Table(location)
    table.snapshot([{"id": 7}, {"id": 8}])
    table.commit(change("update_postimage", 1010, id=7), change("insert", 1010, 1, id=9))

    def lose() -> None:
        server.send(1)
        server.recv()

    during(monkeypatch, lose)
    table.erase("id = 7")
    assert [row["id"] for row in read(location)] == [8, 9]
    found = DeltaTable(location.uri, storage_options=location.storage_options)
    assert found.transaction_version(erased_id(PLACE)) == 1


# -- keys -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("id > 7", "range"),
        ("id = 7 and id = 8", "twice"),
        ("id = ", "no key"),
        ("n = 7", "not one of the key"),
        ("id = 'secret'", "none of its type"),
    ],
)
def test_what_is_no_key_is_refused_without_its_value(table: Table, key: str, what: str) -> None:
    table.commit(change("insert", 1010, id=7))
    with pytest.raises(UsageError, match=what) as raised:
        table.erase(key)
    assert "secret" not in str(raised.value) and "7" not in str(raised.value)


def test_a_file_of_keys_has_one_a_line(table: Table) -> None:
    table.commit(*(change("insert", 1010, i, id=i) for i in range(6)))
    keys = parse_keys(["id = 0"], ["# of ticket 12", "", "id = 2", "  id in (3, 4)"])
    assert keys.n_keys == 4 and "3" not in repr(keys)
    erase_rows(table.location, LABEL, SLOT, keys, 10**6)
    assert [row["id"] for row in read(table.location)] == [1, 5]
    with pytest.raises(UsageError, match="line 2"):
        parse_keys([], ["id = 1", "4711"])


def test_a_key_whose_type_changed_is_found_in_both_columns_and_one_that_was_renamed_must_be_given_twice(
    tmp_path: Path,
) -> None:
    location = Location.parse(str(tmp_path / LABEL))
    table = Table(location)
    table.commit(change("insert", 1010, id=7), change("insert", 1010, 1, id=8))
    table.writer.add_columns(
        [TableColumn("id__long", pa.int64(), "id"), TableColumn("uid", pa.int64(), "uid")]
    )
    types = {"id": {"type": "bigint", "column": "id__long"}}
    versions = [
        {"slot": SLOT, "since": 999, "key": ["id"], "columns": {"id": {"type": "integer", "column": "id"}}},
        {"slot": SLOT, "since": 1020, "key": ["id"], "columns": types},
    ]
    set_versions(location, versions)
    rows = pa.table(
        {"_change_type": ["insert"] * 2, "_commit_lsn": [1020] * 2, "_seq": [0, 1], "id__long": [7, 1 << 40]}
    )
    append(location, rows, 1020)
    erase_rows(location, LABEL, SLOT, parse_keys(["id = 7", f"id = {1 << 40}"]), 10**6)
    assert [row["id"] for row in read(location)] == [8]
    renamed = {"uid": {"type": "bigint", "column": "uid"}}
    set_versions(location, [*versions, {"slot": SLOT, "since": 1030, "key": ["uid"], "columns": renamed}])
    with pytest.raises(UsageError, match="named by uid"):
        erase_rows(location, LABEL, SLOT, parse_keys(["id = 8"]), 10**6)
    erase_rows(location, LABEL, SLOT, parse_keys(["id = 8", "uid = 8"]), 10**6)
    assert read(location) == []


def set_versions(location: Location, versions: list[dict[str, Any]]) -> None:
    properties = {"xidstream.versions": json.dumps(versions)}
    DeltaTable(location.uri).alter.set_table_properties(properties, raise_if_not_exists=False)


def append(location: Location, rows: pa.Table, lsn: int) -> None:
    columns = DeltaTableWriter.open(location, LABEL)
    assert columns is not None
    schema = pa.schema([column.field for column in columns.columns])
    files = ParquetFiles(location, f"data-{lsn}", schema, "_commit_lsn")
    files.write(pa.RecordBatch.from_pylist(rows.to_pylist(), schema))
    columns.commit(files.close(), {SLOT: lsn}, merges=False)


@pytest.mark.parametrize("name", ["delta.appendOnly", "delta.enableChangeDataFeed"])
def test_a_table_whose_rows_are_never_removed_or_whose_changes_are_followed_is_refused(
    table: Table, name: str
) -> None:
    table.commit(change("insert", 1010, id=7))
    DeltaTable(table.location.uri).alter.set_table_properties({name: "true"})
    with pytest.raises(Unsupported, match=name):
        table.erase("id = 7")
    assert len(read(table.location)) == 1
