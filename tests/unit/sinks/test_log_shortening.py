"""``log_retention`` on real Delta tables, in a folder and on S3: what goes, what stays, and what readers are told."""

from __future__ import annotations

import dataclasses
import datetime
import random
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tests.snapshot_tables import commit_one, output_of
from tests.unit.delta.test_small_files import s3  # noqa: F401 - a fixture
from tests.unit.log_tables.test_snapshot_log import crash_behind_the_rows
from tests.unit.mirror.bases import PlainMirror
from tests.waiting import wait_until
from xidstream.pipeline import faultpoints
from xidstream.pipeline.account import LogPart
from xidstream.pipeline.changelog import small_fold
from xidstream.pipeline.changelog.consumers import ConsumerPosition
from xidstream.pipeline.changelog.log_frames import LogFrames
from xidstream.pipeline.changelog.log_ranges import QueryTable
from xidstream.pipeline.changelog.log_table import LogFile
from xidstream.pipeline.changelog.shortening import held_back, stretches_of
from xidstream.pipeline.changelog.small_fold import small_table
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.delta.delta_tables import DeltaTables
from xidstream.pipeline.delta.upkeep import Upkeep
from xidstream.pipeline.errors import (
    ComponentLost,
    PreconditionMissing,
    SinkDiverged,
    SnapshotInterrupted,
    StorageFault,
    Superseded,
    UsageError,
)
from xidstream.pipeline.exchange import Tenure
from xidstream.pipeline.log_tables import small_files
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.erased_keys import StoredColumn, parse_keys
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.ownership import Ownership
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles
from xidstream.pipeline.log_tables.relation_history import VersionSince
from xidstream.pipeline.log_tables.small_files import SizeClass
from xidstream.pipeline.log_tables.snapshot_log import SnapshotLog
from xidstream.pipeline.log_tables.table_metadata import OF_OWN_TABLES, metadata_of_source
from xidstream.pipeline.mirror.erased_base import erase_base
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.relation import Column, ReplicaIdentity
from xidstream.pipeline.schema.rows import MESSAGES_SCHEMA, TRANSACTIONS_SCHEMA, contract_schema
from xidstream.pipeline.settings.delta_retention import DeltaRetention
from xidstream.pipeline.settings.log_retention import LogRetention
from xidstream.pipeline.sinks.log_shortening import LogShortening
from xidstream.pipeline.sinks.log_watch import LOOK_S, LogWatch
from xidstream.pipeline.sinks.shortened_tables import DeltaShortenedRoot, ShortenedRoot
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.generation import Generation
from xidstream.pipeline.spark.session import GetSession

SLOT = "7/shop/orders"
TABLE = "public.a"
RELATION = RelationVersion(
    16384,
    "public",
    "a",
    ReplicaIdentity.DEFAULT,
    (Column("id", 20, -1, True), Column("v", 20, -1, False)),
)
FIELDS = [pa.field("id", pa.int64()), pa.field("v", pa.int64())]
SCHEMA = contract_schema(RELATION)
BEGAN = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)


def at_hour(lsn: int) -> datetime.datetime:
    """A commit LSN of 100 more is an hour later."""
    return BEGAN + datetime.timedelta(hours=lsn / 100)


class Root:
    """One slot's root with one table. A commit at LSN n sets v = n for the key n // 100 % 5."""

    def __init__(self, root: Location, tenure: int = 1, layout: str | None = None) -> None:
        """``layout``: the column that merged files are ordered by; files are merged only with one, or an empty one."""
        self.root = root
        self.merges = layout is not None
        hold = Tenure(tenure, "epoch", 1, {}, Lsn(10**9))
        self.ownership = Ownership(SLOT, f"{SLOT}/messages", "root", hold)
        self.snapshots = SnapshotLog(DeltaTables(root), SLOT, self.ownership)
        columns = [TableColumn(f.name, f.type, f.name) for f in TRANSACTIONS_SCHEMA]
        self.transactions = DeltaTableWriter.open_or_create(
            root.child("_transactions"), "_transactions", columns, OF_OWN_TABLES["_transactions"]
        )
        self.columns = [TableColumn(f.name, f.type, f.name) for f in SCHEMA]
        targets = [TableColumn(field.name, field.type, field.name) for field in FIELDS]
        brought = [VersionSince(SLOT, Lsn(1), RELATION, targets)]
        self.table = DeltaTableWriter.open_or_create(
            root.child(TABLE), TABLE, self.columns, metadata_of_source(RELATION, layout=layout), brought
        )

    def commit(self, *lsns: int) -> None:
        """Of one batch, and so in one file."""
        self.put({lsn: ("update_postimage", lsn // 100 % 5, lsn) for lsn in lsns})

    def put(self, changes: dict[int, tuple[str, int | None, int | None]]) -> None:
        """By commit LSN: the change type, the key and the value. Of one batch."""
        lsns = list(changes)
        rows = [
            {
                "id": key,
                "v": value,
                "_change_type": kind,
                "_commit_lsn": lsn,
                "_commit_timestamp": at_hour(lsn),
                "_xid": 10_000 + lsn,
                "_seq": 0,
            }
            for lsn, (kind, key, value) in changes.items()
        ]
        files = ParquetFiles(self.table.location, f"data-{lsns[0]:06d}", SCHEMA, "_commit_lsn")
        files.write(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
        self.table.refresh()
        self.table.commit(files.close(), {SLOT: lsns[-1]}, marks=self.ownership.marks, merges=self.merges)
        told = [
            {"xid": 10_000 + n, "commit_lsn": n, "commit_timestamp": at_hour(n), "rows": 1, "tables": [TABLE]}
            for n in lsns
        ]
        about = OF_OWN_TABLES["_transactions"]
        assert about
        self.transactions.refresh()
        files = ParquetFiles(
            self.transactions.location,
            f"data-{lsns[0]:06d}",
            TRANSACTIONS_SCHEMA,
            "commit_lsn",
            self.transactions.ranged,
        )
        files.write(pa.RecordBatch.from_pylist(told, schema=TRANSACTIONS_SCHEMA))
        self.transactions.commit(
            files.close(), {SLOT: lsns[-1]}, "commit_lsn", marks=self.ownership.marks, merges=False
        )

    def generation(self, number: int, valid_from: int, contained_upto: int) -> Generation:
        bounds = SnapshotBounds(
            Lsn(valid_from - 1), Lsn(valid_from), 9_000, 9_001, (), 1_700_000_000_000_000, Lsn(contained_upto)
        )
        return Generation(RELATION, number, bounds)

    def snapshot(self, number: int, valid_from: int, contained_upto: int, values: dict[int, int]) -> None:
        generation = self.generation(number, valid_from, contained_upto)
        snapshot_lsn = int(generation.bounds.snapshot_lsn)
        target = output_of(self.snapshots, RELATION, Lsn(snapshot_lsn))
        files = ParquetFiles(target.table, target.directory, target.conform.schema, "_commit_lsn")
        rows = [
            {"id": i, "v": v, "_change_type": "snapshot", "_commit_lsn": snapshot_lsn, "_seq": i}
            for i, v in values.items()
        ]
        files.write(target.conform(pa.RecordBatch.from_pylist(rows, schema=SCHEMA)))
        assert commit_one(self.snapshots, generation, files.close())

    def prove(self, lsn: int) -> None:
        self.snapshots.prove(Lsn(lsn))

    def shorten(
        self,
        retention: str,
        *,
        folds: bool = False,
        get_session: GetSession | None = None,
        tell_held: Callable[[Mapping[str, int]], None] = lambda held: None,
        **clock: Callable[[], datetime.datetime],
    ) -> None:
        """``folds``: else the table counts as too large to be folded."""
        shortening = LogShortening(
            self.shortened,
            SLOT,
            self.ownership,
            LogRetention.parse(retention),
            self.snapshots.is_being_taken,
            get_session,
            tell_held,
            **clock,
        )
        with pytest.MonkeyPatch.context() as patch:
            if not folds:
                patch.setattr(small_fold, "SMALL_BYTES", 0)
            shortening.shorten()

    @property
    def shortened(self) -> ShortenedRoot:
        return DeltaShortenedRoot(self.root)

    @property
    def log(self) -> LogFrames:
        return LogFrames(self.root.uri, SLOT, self.root.storage_options)

    def state(self, lsn: int) -> dict[int, int]:
        """Folded without Spark, from the snapshot alone."""
        at = self.log.table_at(TABLE, Lsn(lsn))
        at.snapshot_files()
        found = small_table(at, FIELDS, ["id"])
        assert found is not None
        return dict(zip(found.rows["id"].to_pylist(), found.rows["v"].to_pylist(), strict=True))

    def lsns(self, directory: str = TABLE, column: str = "_commit_lsn") -> list[int]:
        location = self.root.child(directory)
        table = DeltaTable(location.uri, storage_options=location.storage_options)
        return sorted(table.to_pyarrow_table(columns=[column])[column].to_pylist())


def truth(lsn: int, first: int = 0) -> dict[int, int]:
    """What the table holds at ``lsn``."""
    held = dict.fromkeys(range(5), first)
    for each in range(100, lsn + 1, 100):
        held[each // 100 % 5] = each
    return held


COMMITS = range(100, 10_001, 100)


def long_log(root: Location) -> Root:
    """100 hours, a snapshot valid from 51 and one from 5,051; commits by twos, so that files straddle."""
    made = Root(root)
    made.snapshot(1, 51, 40, truth(0))
    for lsn in COMMITS[:50:2]:
        made.commit(lsn, lsn + 100)
    made.snapshot(2, 5051, 5040, truth(5000))
    for lsn in COMMITS[50::2]:
        made.commit(lsn, lsn + 100)
    made.prove(10_000)
    return made


@pytest.fixture
def root(tmp_path: Path) -> Location:
    return Location.parse(str(tmp_path))


def check_cut_at_the_second_snapshot(made: Root) -> None:
    assert made.log.cut_lsn(TABLE) == 5040
    assert made.log.oldest_lsn(TABLE) == 5051
    # 4,900 and 5,000 are in one file, all below the cut; the first snapshot's rows are gone, the second's stay.
    assert made.lsns() == [*[5050] * 5, *COMMITS[50:]]


def test_a_log_is_cut_as_far_as_a_later_snapshot_allows_and_answers_all_that_it_says(root: Location) -> None:
    made = long_log(root)
    made.shorten("30h")
    check_cut_at_the_second_snapshot(made)
    assert made.lsns("_transactions", "commit_lsn") == [*COMMITS[50:]]
    for lsn in (5051, 5100, 6_789, 7_000, 10_000):
        assert made.state(lsn) == truth(lsn)
    says = r"shortened up to 0/13B0.*oldest state.* 0/13BB .*2026-01-03T03"
    with pytest.raises(PreconditionMissing, match=says) as told:
        made.state(5050)
    assert "later LSN" in str(told.value.remedy)
    before = DeltaTable(made.table.location.uri).version()
    made.shorten("30h")
    assert DeltaTable(made.table.location.uri).version() == before, (
        "nothing more goes, so nothing is committed"
    )


def test_a_log_in_the_order_of_a_column_answers_as_one_in_commit_order_and_is_cut_as_far(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file of one row has at most 2,100 bytes, and one of eight rows 2,200.
    monkeypatch.setattr(small_files, "SIZE_CLASSES", (SizeClass(0, 2_150, 8),))
    logs = [Root(root.child(name or "plain"), layout=name) for name in ("v", "")]
    for made in logs:
        made.snapshot(1, 51, 40, truth(0))
        chance = random.Random(36)
        for lsn in COMMITS[:40]:
            key, value = chance.randrange(5), chance.choice([None, *range(100)])
            made.put({lsn: (chance.choice(["update_postimage", "insert", "delete"]), key, value)})
            if lsn == 2000:
                made.snapshot(2, 2051, 2040, logs[0].state(2000))
        made.prove(4_000)
    path = next(path for path in sorted(logs[0].table.paths()) if "-merged" in path)
    merged = logs[0].table.rows_of({path})["v"].to_pylist()
    assert merged == sorted(merged, key=lambda v: (v is None, v))

    def answers(made: Root) -> list[Any]:
        table = QueryTable(made.log, TABLE, Lsn(4_000))
        files = table.files(2_200, 3_500)
        ranges = table.ranges(files, 2_200, 3_500)
        batches = [batch for each in ranges for batch in each.batches(None)]
        changes = pa.Table.from_batches(batches).sort_by(
            [("_commit_lsn", "ascending"), ("_seq", "ascending")]
        )
        return [changes.to_pylist(), *(made.state(lsn) for lsn in range(2_100, 4_001, 380))]

    for made in logs:
        made.shorten("10h")
    assert answers(logs[0]) == answers(logs[1])
    assert logs[0].log.cut_lsn(TABLE) == logs[1].log.cut_lsn(TABLE) == 2040
    assert logs[0].lsns() == logs[1].lsns() and logs[0].lsns()[0] > 1_000


def test_a_log_is_cut_on_s3_as_in_a_folder(s3: tuple[Location, Connection]) -> None:  # noqa: F811
    table, server = s3
    server.send(0)
    server.recv()
    made = Root(Location.parse(table.uri.rpartition("/")[0], table.storage_options))
    made.snapshot(1, 51, 40, truth(0))
    made.commit(100, 200)
    made.snapshot(2, 251, 240, truth(200))
    for lsn in (300, 1000, 2000):
        made.commit(lsn)
    made.prove(2000)
    made.log.consumer("billing").commit(900)
    made.shorten("5h")
    assert made.log.cut_lsn(TABLE) == 240 and made.lsns() == [*[250] * 5, 300, 1000, 2000]
    assert made.lsns("_transactions", "commit_lsn") == [300, 1000, 2000]
    assert made.log.consumer("billing").position() == 900


@pytest.mark.parametrize("retention", ["", "public.*=, 30h", "60h", "1GB"])
def test_nothing_goes_that_the_retention_keeps(root: Location, retention: str) -> None:
    made = long_log(root)
    made.shorten(retention)
    assert made.log.oldest_lsn(TABLE) == 51 and made.state(60) == truth(60)


def test_a_size_removes_the_oldest_files(root: Location) -> None:
    made = long_log(root)
    made.shorten("1")
    check_cut_at_the_second_snapshot(made)


def test_a_table_with_one_snapshot_and_no_base_table_that_cannot_be_folded_is_not_cut_and_an_event_says_why(
    root: Location, caplog: pytest.LogCaptureFixture
) -> None:
    made = Root(root)
    made.snapshot(1, 51, 40, truth(0))
    for lsn in COMMITS[:20]:
        made.commit(lsn)
    made.prove(2_000)
    made.shorten("2h")
    assert made.log.cut_lsn(TABLE) == 0 and made.state(2000) == truth(2000)
    assert "could not be folded: it is large" in caplog.text


def test_base_goes_as_far_as_the_oldest_base_table_and_not_behind_the_newest(root: Location) -> None:
    made = Root(root)
    made.snapshot(1, 100, 40, truth(0))  # its place is the one of PlainMirror's lines
    for lsn in COMMITS[:20]:
        made.commit(lsn + 50)
    made.prove(2_050)
    mirror = PlainMirror(root, [TABLE])
    mirror.refresh(800)
    mirror.refresh(1200)
    made.shorten("base")
    assert made.log.cut_lsn(TABLE) == 800 and made.log.oldest_lsn(TABLE) == 800
    assert made.lsns() == [lsn + 50 for lsn in COMMITS[7:20]]
    at = made.log.table_at(TABLE, Lsn(900))
    base = at.find_base()
    assert base is not None and base.lsn == 800 and at.tail_files(base.lsn)
    with pytest.raises(PreconditionMissing, match="shortened"):
        made.log.table_at(TABLE, Lsn(900)).snapshot_files()
    # An age would go further, but the mirror goes on from its newest one.
    made.shorten("2h")
    assert made.log.cut_lsn(TABLE) == 1200
    # The base table at the cut is forgotten, and so are the states that came from it: the log says so.
    assert made.log.oldest_lsn(TABLE) == 1200


def test_an_erasure_takes_the_states_of_a_shortened_log_that_came_from_older_base_tables_and_the_log_says_so(
    root: Location,
) -> None:
    made = Root(root)
    made.snapshot(1, 100, 40, truth(0))
    for lsn in COMMITS[:20]:
        made.commit(lsn + 50)
    made.prove(2_050)
    mirror = PlainMirror(root, [TABLE])
    mirror.refresh(800)
    mirror.refresh(1200)
    made.shorten("base")
    assert made.log.oldest_lsn(TABLE) == 800
    keys, held = parse_keys(["id = 1"]), {"id": [StoredColumn("id", pa.int64(), "bigint")]}
    assert erase_base(root, SLOT, TABLE, keys, held) is not None
    assert (made.log.cut_lsn(TABLE), made.log.oldest_lsn(TABLE)) == (800, 1200)
    with pytest.raises(PreconditionMissing, match=r"shortened up to 0/320.*oldest state.*0/4B0"):
        made.log.table_at(TABLE, Lsn(900)).snapshot_files()
    assert made.log.as_of(None, lsn=900).tables() == []  # type: ignore[arg-type]
    base = made.log.table_at(TABLE, Lsn(1300)).find_base()
    assert base is not None and base.lsn == 1200
    assert made.log.as_of(None, lsn=1300).tables() == [TABLE]  # type: ignore[arg-type]


def test_messages_go_with_the_transactions_but_for_those_whose_commit_lies_behind_the_cut(
    root: Location,
) -> None:
    made = long_log(root)
    columns = [TableColumn(f.name, f.type, f.name) for f in MESSAGES_SCHEMA]
    about = OF_OWN_TABLES["_messages"]
    messages = DeltaTableWriter.open_or_create(root.child("_messages"), "_messages", columns, about)

    def told(*messages_of_file: tuple[int, int | None]) -> None:
        rows = [
            {"lsn": lsn, "commit_lsn": commit_lsn, "transactional": commit_lsn is not None, "prefix": "p"}
            for lsn, commit_lsn in messages_of_file
        ]
        files = ParquetFiles(messages.location, f"data-{messages_of_file[0][0]:06d}", MESSAGES_SCHEMA, "lsn")
        files.write(pa.RecordBatch.from_pylist(rows, schema=MESSAGES_SCHEMA))
        messages.commit(files.close(), {}, "lsn", marks=made.ownership.marks, merges=False)

    told((110, 200), (120, None))
    told((130, None))
    told((4_010, 5_100), (4_020, None))
    told((5_110, None))
    made.shorten("30h")
    assert made.log.cut_lsn(TABLE) == 5_040
    assert made.lsns("_messages", "lsn") == [4_010, 4_020, 5_110]


def test_what_is_younger_than_an_hour_or_not_proven_stays(root: Location) -> None:
    made = Root(root)
    made.snapshot(1, 51, 40, truth(0))
    for lsn in COMMITS[:10]:
        made.commit(lsn)
    made.snapshot(2, 951, 950, truth(900))
    made.prove(200)
    made.shorten("1")
    assert made.log.cut_lsn(TABLE) == 0 and 100 in made.lsns(), "not proven"
    made.commit(1_010)
    made.commit(1_020)
    made.prove(1_020)
    made.shorten("1")
    assert made.log.cut_lsn(TABLE) == 950 and made.lsns() == [*[950] * 5, 1_000, 1_010, 1_020]


def test_commits_that_a_clock_of_the_server_stamped_weeks_ahead_have_nothing_removed_sooner(
    root: Location,
) -> None:
    made = long_log(root)
    ahead = 10_000 + 40 * 24 * 100
    made.commit(ahead)
    made.prove(ahead)
    made.shorten("24h", folds=True, now=lambda: at_hour(10_000))
    assert 7_600 < made.log.cut_lsn(TABLE) < 7_700 and made.lsns()[-25:] == [*COMMITS[-24:], ahead]


def test_a_clock_here_that_is_wrong_has_nothing_removed_sooner(root: Location) -> None:
    made = long_log(root)
    made.shorten("24h", folds=True, now=lambda: at_hour(2_400))
    assert made.log.cut_lsn(TABLE) == 0
    made.shorten("24h", folds=True, now=lambda: at_hour(10**6))
    assert 7_600 < made.log.cut_lsn(TABLE) < 7_700


def test_nothing_goes_that_a_consumer_has_not_read_until_it_moves_or_is_removed(root: Location) -> None:
    made = long_log(root)
    billing = made.log.consumer("billing")
    assert billing.position() is None and made.log.consumers() == []
    billing.commit(1_250)
    made.log.consumer("audit").commit(9_000)
    assert [(each.name, each.lsn) for each in made.log.consumers()] == [("audit", 9000), ("billing", 1250)]
    made.shorten("30h")
    assert made.log.cut_lsn(TABLE) == 1_250 and made.log.oldest_lsn(TABLE) == 5_051
    assert made.lsns("_transactions", "commit_lsn") == [*COMMITS[12:]]
    assert set(COMMITS[12:]) <= set(made.lsns()) and COMMITS[11] not in made.lsns()
    QueryTable(made.log, TABLE, Lsn(10_000)).files(1_250, 10_000)
    with pytest.raises(UsageError, match="cannot go back"):
        billing.commit(1_249)
    assert billing.remove() and not billing.remove() and billing.position() is None
    made.shorten("30h")
    check_cut_at_the_second_snapshot(made)
    assert made.log.consumer("audit").remove() and made.log.consumers() == []


def test_consumers_that_commit_at_once_lose_no_position(root: Location) -> None:
    from concurrent.futures import ThreadPoolExecutor

    made = long_log(root)
    made.log.consumer("first").commit(1)

    def commit(i: int) -> None:
        made.log.consumer(f"c{i}").commit(i)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(commit, range(6)))
    assert {each.name: int(each.lsn) for each in made.log.consumers()} == {
        "first": 1,
        **{f"c{i}": i for i in range(6)},
    }


def test_changes_from_below_the_cut_are_refused_with_the_oldest_lsn(root: Location) -> None:
    made = long_log(root)
    made.shorten("30h")
    spark: Any = None
    for since in (None, 0, 5039):
        with pytest.raises(
            PreconditionMissing, match="gone: its change log was shortened up to 0/13B0"
        ) as told:
            made.log.changes(spark, TABLE, since=since)
        assert "since='0/13B0'" in str(told.value.remedy)
    with pytest.raises(PreconditionMissing, match="shortened up to 0/13B0"):
        made.log.transactions(spark, since=5039)


def test_the_spark_source_refuses_what_was_cut_and_begins_behind_it(root: Location) -> None:
    pytest.importorskip("pyspark.sql.datasource")
    from xidstream.pipeline.changelog.spark_source import LogSource, SourceOptions

    made = long_log(root)
    made.shorten("30h")
    table = QueryTable(made.log, TABLE, Lsn(10_000))
    source = LogSource(SourceOptions.parse({"path": root.uri, "table": TABLE}))
    assert source.beginning() == 5099, "a new stream begins with the first commit that there is"
    with pytest.raises(PreconditionMissing, match="shortened up to 0/13B0"):
        source.ranges([table], 5039, 10_000)
    found = source.ranges([table], 5040, 10_000)
    assert sum(batch.num_rows for part in found for batch in part.batches(None)) == 50


def test_a_time_that_the_cut_made_unknown_is_refused_and_a_later_one_is_found(root: Location) -> None:
    made = long_log(root)
    made.shorten("30h")
    with pytest.raises(PreconditionMissing, match="knows the commits after 2026-01-03T02:00"):
        made.log.as_of(None, timestamp=at_hour(4999))  # type: ignore[arg-type]
    assert made.log.as_of(None, timestamp=at_hour(5150)).lsn == 5199  # type: ignore[arg-type]
    assert made.log.as_of(None, lsn=5050).tables() == []  # type: ignore[arg-type]
    assert made.log.as_of(None, lsn=5051).tables() == [TABLE]  # type: ignore[arg-type]


def test_a_reader_that_opened_the_log_before_the_cut_reads_on(root: Location) -> None:
    made = long_log(root)
    early = made.log.table_at(TABLE, Lsn(3000))
    made.shorten("30h")
    found = small_table(early, FIELDS, ["id"])
    assert found is not None
    assert dict(zip(found.rows["id"].to_pylist(), found.rows["v"].to_pylist(), strict=True)) == truth(3000)


@pytest.mark.parametrize("point", ["shortening_log", "log_shortened"])
def test_a_crash_between_the_steps_leaves_a_log_that_answers_rightly(
    root: Location, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    made = long_log(root)
    with monkeypatch.context() as armed:
        armed.setattr(faultpoints, "_plan", faultpoints.FaultPlan(f"{point}:error", None))
        with pytest.raises(ComponentLost):
            made.shorten("30h")
    cut = made.log.cut_lsn(TABLE)
    assert cut == (0 if point == "shortening_log" else 5040)
    assert made.lsns("_transactions", "commit_lsn") == [*COMMITS]
    for lsn in (60, 4_000, 5_051, 9_000):
        if lsn >= (made.log.oldest_lsn(TABLE) or 0):
            assert made.state(lsn) == truth(lsn)
        else:
            with pytest.raises(PreconditionMissing, match="shortened"):
                made.state(lsn)
    Root(root, tenure=2).commit(10_100)
    Root(root, tenure=2).shorten("30h")
    assert made.lsns("_transactions", "commit_lsn") == [*COMMITS[50:], 10_100]
    assert made.state(9_000) == truth(9_000)


def test_a_run_that_was_taken_over_cuts_nothing(root: Location) -> None:
    made = long_log(root)
    Root(root, tenure=2).commit(10_100)
    with pytest.raises(Superseded):
        made.shorten("30h")
    assert made.log.cut_lsn(TABLE) == 0 and made.state(60) == truth(60)


def test_a_table_waits_while_its_snapshot_is_taken_and_one_that_began_before_the_cut_is_refused(
    root: Location,
) -> None:
    made = long_log(root)
    made.prove(10_000)
    generation = made.generation(3, 9_051, 5_000)
    target = output_of(made.snapshots, RELATION, Lsn(9_050))
    files = ParquetFiles(target.table, target.directory, target.conform.schema, "_commit_lsn")
    row = {"id": 1, "v": 1, "_change_type": "snapshot", "_commit_lsn": 9_050, "_seq": 1}
    files.write(target.conform(pa.RecordBatch.from_pylist([row], schema=SCHEMA)))
    made.shorten("30h")
    assert made.log.cut_lsn(TABLE) == 0
    # Another process knows nothing of it.
    Root(root).shorten("30h")
    assert made.log.cut_lsn(TABLE) == 5040
    with pytest.raises(SnapshotInterrupted, match="shortened up to 0/13B0"):
        commit_one(made.snapshots, generation, files.close())
    assert made.state(10_000) == truth(10_000)
    # One that waited for the table's writers needs nothing of what was cut.
    waited = dataclasses.replace(generation.bounds, writers_upto=generation.bounds.snapshot_lsn)
    assert commit_one(made.snapshots, dataclasses.replace(generation, bounds=waited), files.close())
    assert made.log.generations()[TABLE][-1].bounds.contained_upto == 9_050


def test_rows_of_a_snapshot_that_a_crash_left_without_a_line_hold_the_cut(root: Location) -> None:
    made = long_log(root)
    with crash_behind_the_rows():
        made.snapshot(3, 9_051, 9_040, truth(9_000))
    after = Root(root)
    after.shorten("5h")
    assert after.log.cut_lsn(TABLE) == 0
    assert after.snapshots.recover(after.generation(3, 9_051, 9_040))
    after.shorten("5h")
    assert after.log.cut_lsn(TABLE) == 9_040 and after.state(9_500) == truth(9_500)


def test_transactions_that_the_run_has_cut_may_come_again(root: Location) -> None:
    made = long_log(root)
    again = pa.Table.from_pylist(
        [
            {"xid": 10_100, "commit_lsn": 100, "commit_timestamp": at_hour(100), "rows": 1},
            {"xid": 15_100, "commit_lsn": 5_100, "commit_timestamp": at_hour(5_100), "rows": 1},
        ],
        schema=TRANSACTIONS_SCHEMA,
    )
    made.shorten("30h")
    made.transactions.refresh()
    made.ownership.check_repeated(made.transactions, again)
    foreign = again.set_column(0, "xid", pa.array([10_100, 15_101], pa.int64()))
    with pytest.raises(SinkDiverged):
        made.ownership.check_repeated(made.transactions, foreign)


def test_the_upkeep_has_the_logs_shortened_when_files_of_transactions_are_due(root: Location) -> None:
    made = long_log(root)
    shortened = threading.Event()

    def shorten() -> None:
        made.shorten("30h")
        shortened.set()

    upkeep = Upkeep(DeltaRetention(), shorten=shorten)
    try:
        upkeep.note(made.table.location, TABLE, "_commit_lsn", 1_000)
        upkeep.note(made.transactions.location, "_transactions", "commit_lsn", 999)
        upkeep.note(made.transactions.location, "_transactions", "commit_lsn", 1_000)
        assert shortened.wait(60)
    finally:
        upkeep.close()
    check_cut_at_the_second_snapshot(made)


def test_the_upkeep_of_the_tables_goes_on_while_a_log_is_shortened_and_begins_no_second_time(
    root: Location,
) -> None:
    made = long_log(root)
    began, may_end, now_s = threading.Event(), threading.Event(), [0.0]
    begun: list[int] = []

    def shorten() -> None:
        begun.append(len(begun))
        began.set()
        assert may_end.wait(60)

    upkeep = Upkeep(DeltaRetention(), clock=lambda: now_s[0], shorten=shorten)

    def pass_by(version: int) -> None:
        """A turn of ``_transactions``, an hour later, and one of the table after it."""
        now_s[0] += 3_600.0
        upkeep.note(made.transactions.location, "_transactions", "commit_lsn", version)
        upkeep.note(made.table.location, TABLE, "_commit_lsn", version)

    def is_idle() -> bool:
        return all(each.schedule.wait_s(now_s[0]) is None for each in upkeep._tables.values())

    try:
        for location, label in ((made.transactions.location, "_transactions"), (made.table.location, TABLE)):
            upkeep.note(location, label, "commit_lsn", 1)
        pass_by(1_000)
        assert began.wait(60)
        pass_by(2_000)
        wait_until(is_idle)
        assert begun == [0]
        may_end.set()
        assert upkeep._shortening is not None
        upkeep._shortening.join(60)
        pass_by(3_000)
        wait_until(lambda: begun == [0, 1])
    finally:
        may_end.set()
        upkeep.close()


def test_each_consumer_holds_back_the_bytes_that_a_later_cut_removes_when_it_has_read_them(
    root: Location,
) -> None:
    made = long_log(root)
    made.table.refresh()
    files = made.table.files()
    sizes = dict(zip(files["max._commit_lsn"].to_pylist(), files["size_bytes"].to_pylist(), strict=True))
    positions = {"billing": 1_500, "audit": 3_000}
    for name, lsn in positions.items():
        made.log.consumer(name).commit(lsn)
    told: list[Mapping[str, int]] = []

    def shorten() -> int:
        made.shorten("24h", folds=True, tell_held=told.append)
        return int(made.log.cut_lsn(TABLE))

    assert shorten() <= 1_500
    for name in positions:
        made.log.consumer(name).commit(10_000)
    cut = shorten()
    assert cut > 7_000 and told[1] == {"billing": 0, "audit": 0}
    assert told[0] == {
        name: sum(size for lsn, size in sizes.items() if position < lsn <= cut)
        for name, position in positions.items()
    }
    assert told[0]["billing"] > told[0]["audit"] > 0


def test_a_consumer_holds_back_nothing_of_what_a_mirror_needs_itself() -> None:
    files = [LogFile(f"{lsn}", 100, lsn, lsn) for lsn in range(100, 1_000, 100)]
    stretches = stretches_of([], [])
    assert held_back(files, stretches, 500, None, {"billing": 200, "audit": 500}) == {
        "billing": 300,
        "audit": 0,
    }
    assert held_back(files, stretches, 500, 300, {"billing": 200, "audit": 500}) == {
        "billing": 100,
        "audit": 0,
    }


def watched(watch: LogWatch) -> LogPart:
    """The part after the look that this call begins."""
    watch.part()
    thread = watch._thread
    assert thread is not None
    thread.join(30)
    part = watch.part()
    assert part is not None
    return part


def test_the_account_says_how_far_back_the_log_answers_and_follows_cuts_and_consumers(root: Location) -> None:
    made, now_s = long_log(root), [0.0]
    watch = LogWatch(DeltaShortenedRoot(root), SLOT, lambda: now_s[0])
    assert watch.part() is None, "nobody waits for a look"
    whole = watched(watch)
    assert (whole.oldest_lsn, whole.cut_lsn, whole.n_tables, whole.n_cut_tables) == (str(Lsn(51)), None, 1, 0)
    assert whole.reach_bytes == 10_000 - 51 and whole.consumers == ()
    made.log.consumer("billing").commit(1_500)
    made.log.consumer("audit").commit(10_000)
    assert watched(watch) == whole, "it was looked just now"
    made.shorten("24h", tell_held=watch.shortened)
    now_s[0] += LOOK_S
    cut = watched(watch)
    assert (cut.oldest_lsn, cut.cut_lsn, cut.n_cut_tables) == (str(Lsn(5_051)), str(Lsn(1_500)), 1)
    billing, audit = cut.consumers
    assert (billing.name, billing.lsn, billing.behind_bytes) == ("billing", str(Lsn(1_500)), 8_500)
    assert billing.held_bytes and billing.held_bytes > 0 and not billing.is_forgotten
    assert (audit.name, audit.behind_bytes, audit.held_bytes) == ("audit", 0, 0)
    made.log.consumer("billing").commit(9_000)
    now_s[0] += LOOK_S
    assert watched(watch).consumers[0].behind_bytes == 1_000


def test_a_look_at_the_log_that_fails_is_told_and_the_figures_before_it_stay(
    root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, now_s = long_log(root), [0.0]
    looked_at = DeltaShortenedRoot(root)
    watch = LogWatch(looked_at, SLOT, lambda: now_s[0])
    before = watched(watch)

    def fail(application_id: str) -> list[ConsumerPosition]:
        raise StorageFault("the sink cannot be reached")

    with monkeypatch.context() as patch:
        patch.setattr(looked_at, "positions", fail)
        made.shorten("24h", tell_held=watch.shortened)
        now_s[0] += LOOK_S
        assert watched(watch) == dataclasses.replace(before, error="the sink cannot be reached")
    now_s[0] += LOOK_S
    after = watched(watch)
    assert after.error is None and after.cut_lsn == str(Lsn(5_040)), (
        "the cut that the failed look had not seen"
    )
