"""Questions to ``_transactions`` of a log of 200 files: each opens few of them, on a folder and on S3. No Spark."""

from __future__ import annotations

import datetime
import shutil
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tests.unit.delta.test_small_files import s3 as s3
from xidstream.pipeline.changelog.log_frames import LogFrames
from xidstream.pipeline.changelog.log_ranges import Commits, admitted
from xidstream.pipeline.changelog.log_root import DeltaRoot
from xidstream.pipeline.changelog.moment import Moment, moment_of
from xidstream.pipeline.changelog.transactions_table import TransactionsTable
from xidstream.pipeline.delta import delta_table
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.errors import StorageFault, UsageError
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles, WrittenFile
from xidstream.pipeline.log_tables.table_metadata import OF_OWN_TABLES, STATISTICS, TableMetadata
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.schema.rows import TRANSACTIONS_SCHEMA
from xidstream.pipeline.snapshot.bounds import SnapshotBounds

SLOT = "7/shop/orders"
BEGUN = datetime.datetime(2026, 5, 4, tzinfo=datetime.timezone.utc)
N_FILES, N_ROWS = 200, 50
ABOUT = OF_OWN_TABLES[locations.TRANSACTIONS]
ABOUT_EARLIER = TableMetadata(ABOUT.description, {STATISTICS: "commit_lsn"}, {})
"""What an earlier xidstream said."""
SECOND = datetime.timedelta(seconds=1)


def transaction(i: int, **other: Any) -> dict[str, Any]:
    """The i-th one, a second after the one before: commit LSN ``10 * i``, xid ``1000 + i``."""
    row = {
        "xid": 1000 + i,
        "commit_lsn": 10 * i,
        "end_lsn": 10 * i + 5,
        "commit_timestamp": BEGUN + i * SECOND,
        "streamed": False,
        "rows": 1,
        "tables": ["public.t"],
    }
    return {**dict.fromkeys(TRANSACTIONS_SCHEMA.names), **row, **other}


class MadeLog:
    """``_transactions`` as the sink writes it. Each file has ``N_ROWS`` transactions."""

    def __init__(self, root: Location, about: TableMetadata = ABOUT) -> None:
        self.root = root
        self.table = root.child(locations.TRANSACTIONS)
        self._columns = [TableColumn(f.name, f.type, f.name) for f in TRANSACTIONS_SCHEMA]
        self.writer = DeltaTableWriter.open_or_create(
            self.table, locations.TRANSACTIONS, self._columns, about
        )
        self.paths: list[str] = []

    def write(self, rows: Sequence[dict[str, Any]]) -> list[WrittenFile]:
        directory = f"data-{len(self.paths):05d}"
        files = ParquetFiles(self.table, directory, TRANSACTIONS_SCHEMA, "commit_lsn", self.writer.ranged)
        files.write(pa.RecordBatch.from_pylist(list(rows), schema=TRANSACTIONS_SCHEMA))
        written = files.close()
        self.paths += [file.path for file in written]
        return written

    def commit(self, files: Sequence[WrittenFile]) -> None:
        last = max(file.max_commit_lsn for file in files)
        marks = {f"{SLOT}/owner": 1, f"{SLOT}/proven": last}
        self.writer.commit(files, {SLOT: last}, "commit_lsn", marks=marks, merges=False)

    def fill(self, changed: dict[int, dict[str, Any]] | None = None, n_files: int = N_FILES) -> MadeLog:
        """``changed``: columns of the i-th transactions that are others."""
        others = changed or {}
        rows = [transaction(i, **others.get(i, {})) for i in range(1, n_files * N_ROWS + 1)]
        parts = [rows[n : n + N_ROWS] for n in range(0, len(rows), N_ROWS)]
        self.commit([file for part in parts for file in self.write(part)])
        return self

    def keep_only(self, *numbers: int) -> None:
        """Remove all files but these: whoever opens another one fails."""
        for number, path in enumerate(self.paths):
            if number not in numbers:
                shutil.rmtree(Path(self.table.uri, path).parent)

    @property
    def log(self) -> LogFrames:
        return LogFrames(self.root.uri, storage_options=self.root.storage_options)


@pytest.fixture
def made(tmp_path: Path) -> MadeLog:
    return MadeLog(Location.parse(str(tmp_path)))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> MadeLog:
    return MadeLog(Location.parse(str(tmp_path_factory.mktemp("log")))).fill()


@pytest.fixture
def filled(template: MadeLog, tmp_path: Path) -> MadeLog:
    """200 files, of this test alone."""
    shutil.copytree(template.root.uri, tmp_path, dirs_exist_ok=True)
    made = MadeLog(Location.parse(str(tmp_path)))
    made.paths = list(template.paths)
    return made


def state_lsn(log: LogFrames, **at: Any) -> int:
    """Where ``as_of`` reads. It makes no plan before a table is asked for, so it needs no session."""
    no_session: Any = None
    return int(log.as_of(no_session, **at).lsn)


def test_watermarks_are_known_without_any_file(filled: MadeLog) -> None:
    filled.keep_only()
    log = filled.log
    assert (log.last_commit_lsn, log.readable_lsn, log.proven_lsn) == (100_000,) * 3
    assert log.wait(timeout_s=0) == 100_000
    assert state_lsn(log) == state_lsn(log, lsn=100_000) == 100_000
    assert Commits(log, 0, 0).oldest == 10


def test_the_pages_way_to_the_newest_complete_commit_reads_no_row(filled: MadeLog) -> None:
    page = (Path(__file__).parents[3] / "docs" / "delta.md").read_text(encoding="utf-8")
    chapter = page.partition("## Reading without a torn transaction")[2]
    code = chapter.partition("```python\n")[2].partition("rows =")[0]
    filled.keep_only()
    found: dict[str, Any] = {"uri": filled.root.uri}
    exec(code, found)
    assert found["last"] == 100_000


def test_moment_opens_the_one_file_that_has_it(filled: MadeLog) -> None:
    filled.keep_only(100)
    moment = BEGUN + 5_020 * SECOND
    assert state_lsn(filled.log, timestamp=moment) == 50_209, "right before the next commit"
    assert state_lsn(filled.log, timestamp=moment.isoformat()) == 50_209
    # Between two commits, and by a clock with another zone.
    between = (moment + SECOND / 3).astimezone(datetime.timezone(datetime.timedelta(hours=9)))
    assert state_lsn(filled.log, timestamp=between) == 50_209


def test_moment_behind_all_commits_and_before_all_of_them(filled: MadeLog) -> None:
    assert state_lsn(filled.log, timestamp=BEGUN) == 9
    assert state_lsn(filled.log, timestamp=BEGUN + 9_999 * SECOND) == 99_999
    filled.keep_only()
    assert state_lsn(filled.log, timestamp=BEGUN + 20_000 * SECOND) == 100_000


def test_timestamps_that_go_back_are_answered_by_the_first_later_commit(made: MadeLog) -> None:
    """The server's clock was an hour ahead for one transaction, and set back by an hour for a while."""
    ahead = {3_010: {"commit_timestamp": BEGUN + (3_010 + 3_600) * SECOND}}
    back = {i: {"commit_timestamp": BEGUN + (i - 3_600) * SECOND} for i in range(8_001, 8_051)}
    made.fill({**ahead, **back})
    made.keep_only(60, 132, 180)
    # The first later commit is the one with the wrong time.
    assert state_lsn(made.log, timestamp=BEGUN + 5_000 * SECOND) == 30_099
    assert state_lsn(made.log, timestamp=BEGUN + (3_010 + 3_600) * SECOND) == 66_109
    assert state_lsn(made.log, timestamp=BEGUN + 9_000 * SECOND + SECOND / 2) == 90_009


def test_time_zone_of_the_host_and_its_summer_time_are_no_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits of the hour that comes twice where the host is."""
    autumn = datetime.datetime(2026, 10, 25, 0, 30, tzinfo=datetime.timezone.utc)
    moments = {i: autumn + i * 60 * SECOND for i in range(1, 2 * N_ROWS + 1)}
    answers = []
    for zone in ("UTC", "Europe/Berlin"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        made = MadeLog(Location.parse(str(tmp_path / zone.replace("/", "-"))))
        made.fill({i: {"commit_timestamp": at} for i, at in moments.items()}, n_files=2)
        answers.append([state_lsn(made.log, timestamp=at) for at in moments.values()])
    monkeypatch.undo()
    time.tzset()
    assert answers[0] == answers[1] == [10 * i + 9 if i < 2 * N_ROWS else 10 * i for i in moments]


def test_files_that_overlap_are_both_asked(made: MadeLog) -> None:
    """As after a merge that left out a large file between its neighbours."""
    rows = [transaction(i) for i in range(1, 301)]
    made.commit([*made.write(rows[0:100] + rows[200:300]), *made.write(rows[100:200])])
    for i in (0, 99, 100, 150, 199, 200, 299):
        assert state_lsn(made.log, timestamp=BEGUN + i * SECOND) == 10 * (i + 1) - 1
    assert TransactionsTable(DeltaRoot(made.root)).between(500, 1_500, at_most=60)[
        "commit_lsn"
    ].to_pylist() == list(range(510, 1_110, 10))


def test_xid_opens_the_files_whose_range_has_it(made: MadeLog) -> None:
    """One transaction was open for an hour: its file's range is wide, and so it is asked, too."""
    made.fill({7_510: {"xid": 500}})
    made.keep_only(90, 150)
    assert state_lsn(made.log, xid=1_000 + 4_520) == 45_200
    assert state_lsn(made.log, xid=500) == 75_100
    with pytest.raises(UsageError, match="no transaction 99999"):
        made.log.as_of(None, xid=99_999)  # type: ignore[arg-type]


def test_xid_that_came_again_is_told_with_all_its_commits(made: MadeLog) -> None:
    made.fill({9_000: {"xid": 1_100}})
    with pytest.raises(UsageError, match="used more than once: commits at 0/3E8, 0/15F90"):
        made.log.as_of(None, xid=1_100)  # type: ignore[arg-type]


def test_range_of_transactions_opens_its_files_alone(filled: MadeLog) -> None:
    filled.keep_only(10, 11)
    commits = Commits(filled.log, 5_490, 5_520)
    assert (commits.lsns, commits.of("public.t"), commits.oldest) == (
        [5_500, 5_510, 5_520],
        [5_500, 5_510, 5_520],
        10,
    )
    table = TransactionsTable(DeltaRoot(filled.root))
    assert table.between(5_000, 100_000, at_most=60)["commit_lsn"].to_pylist() == list(
        range(5_010, 5_610, 10)
    )


def test_stream_that_begins_far_behind_reads_a_batch_of_transactions_and_not_the_rest_of_the_log(
    filled: MadeLog,
) -> None:
    filled.keep_only(0, 1)
    table = TransactionsTable(DeltaRoot(filled.root))

    def lsns(until: int, at_most: int | None) -> list[int]:
        found: list[int] = table.between(0, until, at_most=at_most)["commit_lsn"].to_pylist()
        return found

    assert admitted(100_000, lsns, [], 40, None) == 400


def test_verification_asks_for_the_transactions_in_progress_by_their_xids_alone(filled: MadeLog) -> None:
    filled.keep_only(180, 181)
    # Transaction 10,010 was in progress: it had its place in the WAL, and was not visible yet.
    bounds = SnapshotBounds(Lsn(90_600), Lsn(90_610), 10_010, 10_062, (10_010,), 0, Lsn(0))
    found = moment_of(filled.log, "public.t", bounds)
    assert found == Moment(Lsn(90_610), (Lsn(90_100),))


def test_a_file_that_is_needed_and_gone_is_told(made: MadeLog) -> None:
    made.fill(n_files=2)
    made.keep_only(0)
    with pytest.raises(StorageFault, match="Delta table _transactions cannot be read"):
        made.log.as_of(None, xid=1_080)  # type: ignore[arg-type]


# -- statistics ------------------------------------------------------------------------------------------


def test_log_of_an_earlier_version_answers_the_same_by_the_footers_of_its_files(tmp_path: Path) -> None:
    made = MadeLog(Location.parse(str(tmp_path)), ABOUT_EARLIER).fill()
    assert state_lsn(made.log, timestamp=BEGUN + 5_020 * SECOND) == 50_209
    assert state_lsn(made.log, xid=5_005) == 40_050
    made.keep_only(10, 11)
    assert Commits(made.log, 5_490, 5_520).lsns == [5_500, 5_510, 5_520]


def test_log_of_an_earlier_version_keeps_its_statistics_and_any_filter_finds_its_rows(tmp_path: Path) -> None:
    """deltalake takes a file without statistics of a column that should have them for one without a fitting row."""
    made = MadeLog(Location.parse(str(tmp_path)), ABOUT_EARLIER).fill(n_files=2)
    made.writer.describe(ABOUT)
    assert DeltaTable(made.table.uri).metadata().configuration[STATISTICS] == "commit_lsn"
    made.commit(made.write([transaction(i) for i in range(101, 151)]))
    for filters in ([("commit_timestamp", ">", BEGUN)], [("xid", ">", 0)], [("rows", "=", 1)]):
        assert DeltaTable(made.table.uri).to_pyarrow_table(filters=filters).num_rows == 150


def test_any_filter_of_deltalake_finds_its_rows(made: MadeLog) -> None:
    made.fill(n_files=4)
    table = DeltaTable(made.table.uri)
    at = BEGUN + 60 * SECOND + datetime.timedelta(microseconds=1)
    assert table.to_pyarrow_table(filters=[("commit_timestamp", ">", at)]).num_rows == 140
    assert table.to_pyarrow_table(filters=[("commit_timestamp", "<=", at)]).num_rows == 60
    assert table.to_pyarrow_table(filters=[("xid", "=", 1_150)]).num_rows == 1
    assert table.to_pyarrow_table(filters=[("rows", "=", 1)]).num_rows == 200
    assert table.to_pyarrow_table(filters=[("gid", "=", "g")]).num_rows == 0


def test_a_merged_file_has_the_statistics_of_those_that_it_replaced(
    made: MadeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_table, "many_small", lambda files, _: files)
    half = datetime.timedelta(microseconds=500)
    made.commit(made.write([transaction(1, commit_timestamp=BEGUN + half, xid=7)]))
    made.writer.commit(made.write([transaction(2)]), {SLOT: 20}, "commit_lsn")
    (path,) = DeltaTable(made.table.uri).to_pyarrow_dataset().files
    assert "-merged" in path
    found = pa.table(DeltaTable(made.table.uri).get_add_actions(flatten=True)).to_pylist()[0]
    assert (found["min.xid"], found["max.xid"]) == (7, 1_002)
    assert (found["min.commit_timestamp"], found["max.commit_timestamp"]) == (BEGUN, BEGUN + 2 * SECOND)


# -- a store ---------------------------------------------------------------------------------------------


def test_questions_to_a_store_cost_the_same_requests_whatever_the_number_of_files(
    s3: tuple[Location, Connection],
) -> None:
    location, server = s3
    bucket = location.uri.rpartition("/")[0]
    counted: list[dict[str, int]] = []
    for name, n_files in (("few", 12), ("many", 60)):
        made = MadeLog(Location(f"{bucket}/{name}", location.storage_options)).fill(n_files=n_files)
        log = made.log
        questions = {
            "bounds": lambda log=log: log.readable_lsn,
            "moment": lambda log=log: state_lsn(log, timestamp=BEGUN + 520 * SECOND),
            "xid": lambda log=log: state_lsn(log, xid=1_520),
            "range": lambda log=log: Commits(log, 5_490, 5_520).lsns,
        }
        found = {}
        for question, ask in questions.items():
            before = n_requests(server)
            ask()
            found[question] = n_requests(server) - before
        counted.append(found)
    few, many = counted
    assert all(many[question] <= few[question] + 2 for question in few), (few, many)


def n_requests(server: Connection) -> int:
    server.send(0)  # answers to lose
    n: int = server.recv()
    return n
