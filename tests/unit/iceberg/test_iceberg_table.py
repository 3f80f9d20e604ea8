"""One Iceberg table under one writer: watermarks, lost races, columns, and what is expired. The catalog is SQLite."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.exceptions import CommitFailedException

from tests.spark.support import INT4, INT8, TEXT, relation
from xidstream.pipeline.errors import SinkDiverged, SinkFailed, StorageFault, UsageError
from xidstream.pipeline.iceberg.catalogs import IcebergAddress
from xidstream.pipeline.iceberg.expiring import EXPIRES_EVERY, KEPT_SNAPSHOTS
from xidstream.pipeline.iceberg.iceberg_table import IcebergTableWriter, Newest
from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables
from xidstream.pipeline.iceberg.iceberg_types import RULES
from xidstream.pipeline.iceberg.upkeep import IcebergUpkeep
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.columns import TableColumn, map_columns
from xidstream.pipeline.log_tables.erased_marks import ERASURES
from xidstream.pipeline.log_tables.log_table import NOTHING, SnapshotOutdated
from xidstream.pipeline.log_tables.parquet_files import ColumnRange, ParquetFiles, WrittenFile
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.rows import TRANSACTIONS_SCHEMA, contract_schema

SLOT = "7/shop/orders"
A = relation("public.a", ("id", INT4), ("name", TEXT))
WIDER = relation("public.a", ("id", INT8), ("name", TEXT), ("note", TEXT))


def columns_of(described: RelationVersion) -> tuple[TableColumn, ...]:
    return map_columns((), contract_schema(described), RULES).columns


def opened(root: Path, upkeep: IcebergUpkeep | None = None) -> IcebergTables:
    return IcebergTables(IcebergAddress.parse(f"{root}/lake/shop"), makes=True, upkeep=upkeep)


def table_of(root: Path, upkeep: IcebergUpkeep | None = None) -> IcebergTableWriter:
    tables = opened(root, upkeep)
    return tables.open_or_create("public__a", "public.a", columns_of(A), tables.about(A))


def raw(root: Path) -> Any:
    """The table as any other program opens it."""
    catalog = IcebergAddress.parse(f"{root}/lake/shop").open(makes=False)
    assert catalog is not None
    return catalog.load_table("shop.public__a")


def written(table: IcebergTableWriter, lsn: int, *ids: int, **more: Any) -> list[WrittenFile]:
    """A file with these rows, in the table's columns."""
    schema = pa.schema([column.field for column in table.columns])
    files = ParquetFiles(table.location, f"data-{lsn}-{os.urandom(4).hex()}", schema, "_commit_lsn")
    rows = [
        {"id": i, "_change_type": "insert", "_commit_lsn": lsn, "_seq": n, "_text": [("a", "b")], **more}
        for n, i in enumerate(ids)
    ]
    files.write(pa.RecordBatch.from_pylist(rows, schema=schema))
    return files.close()


def ids(root: Path) -> list[int]:
    found: list[int] = sorted(raw(root).scan(selected_fields=("id",)).to_arrow()["id"].to_pylist())
    return found


def test_a_watermark_that_is_an_lsn_is_a_number_to_the_next_handle(tmp_path: Path) -> None:
    """A batch of one linked transaction has such a one. Its text was written, and no run could read the table again."""
    table = table_of(tmp_path)
    table.commit(written(table, 0x1CDEF58, 1), {SLOT: Lsn(0x1CDEF58)})
    assert table_of(tmp_path).watermark(SLOT) == 0x1CDEF58


def commit(table: IcebergTableWriter, lsn: int, *rows: int, owner: int = 1) -> None:
    table.commit(written(table, lsn, *rows), {SLOT: lsn}, marks={f"{SLOT}/owner": owner})


def set_theirs(root: Path) -> None:
    with raw(root).transaction() as change:
        change.set_properties({"theirs": "yes"})


def metadata_files(root: Path) -> set[str]:
    return set(os.listdir(root / "lake/shop/public__a/metadata"))


def named(root: Path) -> set[str]:
    """The files of metadata that the table names."""
    table = raw(root)
    found = {table.metadata_location, *(each.metadata_file for each in table.metadata.metadata_log)}
    for snapshot in table.snapshots():
        found |= {snapshot.manifest_list, *(m.manifest_path for m in snapshot.manifests(table.io))}
    return {os.path.basename(path) for path in found}


def test_rows_and_watermark_are_one_commit_and_stand_in_summary_and_properties(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    assert table.watermark(SLOT) == NOTHING
    commit(table, 100, 1, 2)
    assert (table.watermark(SLOT), table.watermark(f"{SLOT}/owner")) == (100, 1)
    found = raw(tmp_path)
    for told in (found.properties, found.current_snapshot().summary.additional_properties):
        assert (told[f"xidstream.lsn.{SLOT}"], told[f"xidstream.lsn.{SLOT}/owner"]) == ("100", "1")
    assert ids(tmp_path) == [1, 2]
    assert table_of(tmp_path).watermark(SLOT) == 100


def test_a_file_is_named_without_being_read_and_its_bounds_let_readers_skip_it(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    commit(table, 100, 1)
    there = table.location.uri
    table.commit([WrittenFile("data-x/nobody.parquet", 5, 3, 200, 250)], {SLOT: 250})
    assert not os.path.exists(f"{there}/data-x")
    assert table.read(["id"], "_commit_lsn", 0, 199)["id"].to_pylist() == [1]
    assert table.read(["id"], "_commit_lsn", 251, 300).num_rows == 0
    with pytest.raises(FileNotFoundError):
        table.read(["id"], "_commit_lsn", 250, 250)


def test_ranges_of_times_and_numbers_are_bounds_too(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    ranges = (
        ColumnRange("_commit_timestamp", "2023-11-14T22:13:20.000Z", "2023-11-14T22:13:21.000Z"),
        ColumnRange("_xid", 7, 9),
    )
    table.commit([WrittenFile("data-x/nobody.parquet", 5, 3, 200, 250, ranges)], {SLOT: 250})
    found = raw(tmp_path)
    for out in ("_xid > 9", "_commit_timestamp > '2023-11-14T22:13:21.000000+00:00'", "_xid < 7"):
        assert list(found.scan(row_filter=out).plan_files()) == []
    for inside in ("_xid = 8", "_commit_timestamp = '2023-11-14T22:13:20.500000+00:00'"):
        assert len(list(found.scan(row_filter=inside).plan_files())) == 1


def test_a_version_never_falls_and_two_files_have_two_names(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    commit(table, 100, 1, owner=2)
    with pytest.raises(UsageError, match="version 100 after 100"):
        commit(table, 100, 2, owner=2)
    with pytest.raises(UsageError, match="would fall to 1"):
        commit(table, 110, 2, owner=1)
    file = written(table, 120, 3)
    with pytest.raises(SinkFailed, match="one name"):
        table.commit([*file, *file], {SLOT: 120})
    assert ids(tmp_path) == [1]


# -- races -------------------------------------------------------------------------------------------------


def test_a_race_that_is_lost_to_somebody_harmless_is_run_again_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    table = table_of(tmp_path)
    commit(table, 100, 1)
    theirs = raw(tmp_path)
    theirs.append(theirs.scan().to_arrow().slice(0, 0))  # a snapshot of theirs, without a word of ours
    set_theirs(tmp_path)
    commit(table, 110, 2)
    assert ids(tmp_path) == [1, 2]
    found = raw(tmp_path)
    assert (found.properties["theirs"], len(found.snapshots())) == ("yes", 3)
    assert metadata_files(tmp_path) == named(tmp_path)


def test_a_race_that_is_lost_to_a_later_run_of_the_slot_commits_nothing_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    """pyiceberg itself would append after the other run, and set its owner back."""
    stale = table_of(tmp_path)
    commit(stale, 100, 1)
    rightful = table_of(tmp_path)
    rightful.commit([], {}, marks={f"{SLOT}/owner": 2})
    with pytest.raises(SnapshotOutdated):
        commit(stale, 110, 2)
    assert table_of(tmp_path).watermark(f"{SLOT}/owner") == 2
    assert ids(tmp_path) == [1]
    assert metadata_files(tmp_path) == named(tmp_path)


def test_a_race_is_lost_between_the_look_and_the_update_of_the_row_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog's own check: another process was quicker between the requirements and the UPDATE."""
    table = table_of(tmp_path)
    commit(table, 100, 1)
    raced: list[bool] = []
    catalog = table._table.catalog
    write = catalog._write_metadata

    def others_are_quicker(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        if not raced:
            raced.append(True)
            other = threading.Thread(target=set_theirs, args=(tmp_path,))
            other.start()
            other.join()

    monkeypatch.setattr(catalog, "_write_metadata", others_are_quicker)
    commit(table, 110, 2)
    assert raced and ids(tmp_path) == [1, 2]
    assert metadata_files(tmp_path) == named(tmp_path)


def test_two_writers_of_two_slots_at_once_lose_no_row(tmp_path: Path) -> None:
    table_of(tmp_path)
    failures: list[BaseException] = []

    def write(slot: str, start: int) -> None:
        try:
            table = table_of(tmp_path)
            for lsn in range(start, start + 5):
                table.commit(written(table, lsn, lsn), {slot: lsn}, marks={f"{slot}/owner": 1})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=each) for each in (("one", 100), ("two", 200))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert ids(tmp_path) == [*range(100, 105), *range(200, 205)]
    assert metadata_files(tmp_path) == named(tmp_path)


def test_a_commit_whose_answer_is_lost_is_found_by_whoever_opens_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sqlalchemy.exc import OperationalError

    table = table_of(tmp_path)
    catalog = table._table.catalog
    real = catalog.commit_table

    def lost(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        raise OperationalError("UPDATE", {}, Exception("postgresql://me:hunter2@host lost"))

    monkeypatch.setattr(catalog, "commit_table", lost)
    with pytest.raises(StorageFault) as error:
        commit(table, 100, 1)
    assert "hunter2" not in str(error.value)
    again = table_of(tmp_path)
    assert again.watermark(SLOT) == 100 and ids(tmp_path) == [1], "its manifests are not removed"


def test_a_table_that_was_set_back_to_an_older_snapshot_ends_the_run(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    for lsn in (100, 110, 120):
        commit(table, lsn, lsn)
    table.commit([], {f"{SLOT}/other": 7})
    found = raw(tmp_path)
    found.manage_snapshots().rollback_to_snapshot(found.snapshots()[1].snapshot_id).commit()
    for application_id in (SLOT, f"{SLOT}/other"):  # the second has no snapshot left that speaks of it
        with pytest.raises(SinkDiverged, match="set back to an older snapshot"):
            table_of(tmp_path).watermark(application_id)


def test_handles_of_one_sink_lose_no_race_to_each_other(tmp_path: Path) -> None:
    """The sink and its log of snapshots commit to one table in turn."""
    shared: Newest = {}
    address = IcebergAddress.parse(f"{tmp_path}/lake/shop")
    handles = []
    sent: list[int] = []
    for number in range(2):
        tables = IcebergTables(address, makes=True, newest=shared)
        columns = [TableColumn(f.name, f.type, f.name) for f in TRANSACTIONS_SCHEMA]
        about = tables.about_own(locations.TRANSACTIONS)
        handle = tables.open_or_create(locations.TRANSACTIONS, locations.TRANSACTIONS, columns, about)
        if not number:
            handle.commit([], {}, marks={f"{SLOT}/owner": 1})
        real = handle._send

        def count(transaction: Any, number: int = number, real: Any = real) -> None:
            sent.append(number)
            real(transaction)

        handle._send = count  # type: ignore[method-assign]
        handles.append(handle)
    for lsn in range(100, 106):
        handles[lsn % 2].commit([], {f"{SLOT}/{lsn % 2}": lsn}, "commit_lsn", marks={f"{SLOT}/owner": 1})
    assert sent == [0, 1] * 3, "each commit was sent once"
    handles[0].commit([], {}, marks={f"{SLOT}/owner": 2})
    with pytest.raises(SnapshotOutdated):
        handles[1].commit([], {f"{SLOT}/1": 110}, marks={f"{SLOT}/owner": 1})


# -- columns -----------------------------------------------------------------------------------------------


def test_a_table_is_widened_in_place_and_takes_files_of_both_types(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    commit(table, 100, 1)
    narrow = written(table, 105, 5)
    wide = map_columns(table.columns, contract_schema(WIDER), RULES).columns
    table.take_columns(wide)
    table.take_columns(wide)
    assert {c.name: c.type for c in table.columns} | {"id": pa.int64(), "note": pa.string()} == {
        c.name: c.type for c in table.columns
    }
    table.commit(narrow, {SLOT: 105})
    table.commit(written(table, 110, 1 << 40, note="new"), {SLOT: 110})
    assert ids(tmp_path) == [1, 5, 1 << 40]
    found = raw(tmp_path)
    assert [s.schema_id for s in found.metadata.schemas] == [0, 1], "one commit, however many columns changed"
    rows = table_of(tmp_path).read(["id", "note"], "_commit_lsn", 0, 200).to_pylist()
    assert sorted((row["id"], row["note"]) for row in rows) == [(1, None), (5, None), (1 << 40, "new")]


def test_types_that_iceberg_cannot_widen_go_to_a_further_column(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    commit(table, 100, 1)
    text = relation("public.a", ("id", TEXT), ("name", TEXT))
    mapping = map_columns(table.columns, contract_schema(text), RULES)
    assert mapping.names[0] == "id__string"
    table.take_columns(mapping.columns)
    again = table_of(tmp_path)
    assert next(c for c in again.columns if c.name == "id__string").source == "id"
    assert map_columns(again.columns, contract_schema(text), RULES).additions == ()


def test_a_column_that_a_user_renames_stays_the_one_that_its_source_fills(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    commit(table, 100, 1)
    with raw(tmp_path).update_schema() as change:
        change.rename_column("name", "title")
    table = table_of(tmp_path)
    mapping = map_columns(table.columns, contract_schema(A), RULES)
    assert mapping.names[1] == "title" and mapping.additions == ()
    table.commit(written(table, 110, 2, title="new"), {SLOT: 110})
    found = raw(tmp_path).scan(selected_fields=("id", "title")).to_arrow().to_pylist()
    assert sorted(row["title"] or "" for row in found) == ["", "new"]


def test_a_column_that_a_user_drops_comes_back_with_the_next_rows(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    commit(table, 100, 1)
    with raw(tmp_path).update_schema() as change:
        change.delete_column("name")
    table = table_of(tmp_path)
    mapping = map_columns(table.columns, contract_schema(A), RULES)
    assert [c.name for c in mapping.additions] == ["name"]
    table.take_columns(mapping.columns)
    table.commit(written(table, 110, 2, name="new"), {SLOT: 110})
    found = raw(tmp_path).scan(selected_fields=("id", "name")).to_arrow().to_pylist()
    assert {row["id"]: row["name"] for row in found} == {1: None, 2: "new"}


def test_columns_may_have_dots_and_blanks_in_their_names(tmp_path: Path) -> None:
    odd = relation("public.a", ("a.b", INT4), ("c d", TEXT), ("l", 1005))
    tables = opened(tmp_path)
    table = tables.open_or_create("public__a", "public.a", columns_of(odd), tables.about(odd))
    wider = relation("public.a", ("a.b", INT8), ("c d", TEXT), ("l", 1007), ("x.y", TEXT))
    table.take_columns(map_columns(table.columns, contract_schema(wider), RULES).columns)
    table.commit(written(table, 100, 1, **{"a.b": 1 << 40, "l": [1], "x.y": "z"}), {SLOT: 100})
    rows = table.read(["a.b", "c d", "l", "x.y"], "_commit_lsn", 0, 200).to_pylist()
    assert rows == [{"a.b": 1 << 40, "c d": None, "l": [1], "x.y": "z"}]


def test_a_column_that_somebody_adds_meanwhile_is_no_reason_to_lose_a_row(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    commit(table, 100, 1)
    from pyiceberg.types import TimeType

    with raw(tmp_path).update_schema() as change:
        change.add_column("theirs", TimeType())
    commit(table, 110, 2)
    commit(table_of(tmp_path), 120, 3)
    assert ids(tmp_path) == [1, 2, 3]


def test_a_partitioned_table_is_refused(tmp_path: Path) -> None:
    table_of(tmp_path)
    with raw(tmp_path).update_spec() as change:
        change.add_identity("id")
    with pytest.raises(SinkFailed, match="partitioned"):
        table_of(tmp_path)


def test_what_a_table_says_of_itself_is_described_once_and_renewed(tmp_path: Path) -> None:
    tables = opened(tmp_path)
    table = table_of(tmp_path)
    found = raw(tmp_path)
    assert found.properties["xidstream.source"] == "public.a"
    assert found.schema().find_field("_commit_lsn").doc
    assert "delta" not in str(sorted(found.properties))
    before = found.metadata_location
    table.describe(tables.about(A))
    assert raw(tmp_path).metadata_location == before
    table.describe(tables.about(WIDER))
    assert '"id": "bigint"' in raw(tmp_path).properties["xidstream.types"]


# -- what does not grow ------------------------------------------------------------------------------------


def grown(root: Path, table: IcebergTableWriter, lsns: Sequence[int]) -> None:
    for lsn in lsns:
        table.commit([WrittenFile(f"data-{lsn}/x.parquet", 5, 1, lsn, lsn)], {SLOT: lsn})


def test_old_snapshots_go_with_a_commit_and_the_watermark_stays(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    table.commit([], {"other": 5})
    grown(tmp_path, table, range(100, 100 + KEPT_SNAPSHOTS + EXPIRES_EVERY))
    assert len(raw(tmp_path).snapshots()) == KEPT_SNAPSHOTS + 1
    again = table_of(tmp_path)
    assert (again.watermark("other"), again.watermark(SLOT)) == (5, 99 + KEPT_SNAPSHOTS + EXPIRES_EVERY)
    assert len(again.paths()) == KEPT_SNAPSHOTS + EXPIRES_EVERY


def test_a_commit_that_expires_what_another_program_has_expired_just_now_is_made_again(
    tmp_path: Path,
) -> None:
    """To expire a snapshot does not move the main branch, so the catalog lets such a commit pass its requirements."""
    table = table_of(tmp_path)
    table.merging = None
    for lsn in range(1, KEPT_SNAPSHOTS + EXPIRES_EVERY + 1):
        table.commit([], {SLOT: lsn})
    other = table_of(tmp_path)
    assert other.expire_until(None)[0]
    commit(table, 1_000, 7)
    assert ids(tmp_path) == [7] and table.watermark(SLOT) == 1_000
    assert len(raw(tmp_path).snapshots()) == 2
    assert metadata_files(tmp_path) >= named(tmp_path)


def test_snapshots_that_a_user_needs_are_kept(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    grown(tmp_path, table, range(100, 103))
    found = raw(tmp_path)
    tagged = found.snapshots()[0].snapshot_id
    found.manage_snapshots().create_tag(tagged, "audit").commit()
    with raw(tmp_path).transaction() as change:
        change.set_properties({"history.expire.min-snapshots-to-keep": "20"})
    table = table_of(tmp_path)
    grown(tmp_path, table, range(103, 103 + KEPT_SNAPSHOTS + EXPIRES_EVERY))
    kept = {each.snapshot_id for each in raw(tmp_path).snapshots()}
    assert tagged in kept and 21 <= len(kept) < KEPT_SNAPSHOTS + EXPIRES_EVERY


def test_nothing_is_expired_where_the_table_says_so(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    with raw(tmp_path).transaction() as change:
        change.set_properties({"gc.enabled": "false"})
    table = table_of(tmp_path)
    grown(tmp_path, table, range(100, 105 + KEPT_SNAPSHOTS + EXPIRES_EVERY))
    assert len(raw(tmp_path).snapshots()) == 5 + KEPT_SNAPSHOTS + EXPIRES_EVERY


def test_manifests_are_merged(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    with raw(tmp_path).transaction() as change:
        change.set_properties({"commit.manifest.min-count-to-merge": "10"})
    table = table_of(tmp_path)
    grown(tmp_path, table, range(100, 125))
    found = raw(tmp_path)
    assert len(found.current_snapshot().manifests(found.io)) < 10
    assert metadata_files(tmp_path) == named(tmp_path)
    assert len(table.paths()) == 25


def test_metadata_is_on_disk_before_the_catalog_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sqlalchemy import event

    table = table_of(tmp_path)
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    files = written(table, 100, 1)
    monkeypatch.setattr(os, "fsync", fsync)
    named_then: list[bool] = []

    def before(connection: Any, cursor: Any, statement: str, parameters: Any, *more: Any) -> None:
        if statement.startswith("UPDATE iceberg_tables"):
            found = {os.path.basename(path) for path in synced}
            there = {n for n in metadata_files(tmp_path) if n.endswith(".avro") or n.startswith("00001-")}
            named_then.append(len(there) == 3 and there <= found and "metadata" in found)

    event.listen(table._table.catalog.engine, "before_cursor_execute", before)  # type: ignore[attr-defined]
    table.commit(files, {SLOT: 100})
    assert named_then == [True]


def test_pyicebergs_own_retry_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run takes over between the look and the commit, each time: no append may pass it."""
    table = table_of(tmp_path)
    catalog = table._table.catalog
    tried = []

    def refuse(*args: Any, **kwargs: Any) -> Any:
        tried.append(True)
        table_of(tmp_path).commit([], {}, marks={f"{SLOT}/owner": 1 + len(tried)})
        raise CommitFailedException("another was first")

    monkeypatch.setattr(catalog, "commit_table", refuse)
    with pytest.raises(SnapshotOutdated):
        commit(table, 100, 1)
    assert len(tried) == 1


def test_rows_that_a_user_deletes_by_pyiceberg_are_gone_and_a_commit_goes_on_behind(tmp_path: Path) -> None:
    """As docs/iceberg.md has it: copy-on-write, beside the run, which finds a harmless change."""
    upkeep = IcebergUpkeep()
    table = table_of(tmp_path, upkeep)
    commit(table, 100, 1, 2, 3)
    commit(table, 110, 4)
    before = set((tmp_path / "lake/shop/public__a").glob("data-*/*.parquet"))
    raw(tmp_path).delete("id = 2")
    commit(table, 120, 5)
    assert ids(tmp_path) == [1, 3, 4, 5] and table_of(tmp_path).watermark(SLOT) == 120
    left = raw(tmp_path)
    left.maintenance.expire_snapshots().by_ids([each.snapshot_id for each in left.snapshots()[:-1]]).commit()
    named = {task.file.file_path for task in raw(tmp_path).scan().plan_files()}
    (replaced,) = [each for each in before if f"file://{each}" not in named]
    assert replaced.parent.name.startswith("data-100")
    commit(table_of(tmp_path), 130, 6)
    assert ids(tmp_path) == [1, 3, 4, 5, 6]


def test_a_snapshot_that_was_read_before_an_erasure_is_not_committed_after_it(tmp_path: Path) -> None:
    """The sink takes it again: it may have rows that were erased meanwhile."""
    table = table_of(tmp_path)
    commit(table, 100, 1)
    other = table_of(tmp_path)
    other.commit([], {}, marks={ERASURES: 1})
    with pytest.raises(SnapshotOutdated):
        table.commit(written(table, 90, 7), {f"{SLOT}/snapshot": 90})
    assert ids(tmp_path) == [1]
