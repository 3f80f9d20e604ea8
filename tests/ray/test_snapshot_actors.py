"""The actors of snapshots on a real Ray, with a server: what a reader does whose table is given up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.postgres_fixtures import Database
from tests.ray.conftest import wait_until
from tests.snapshot_ranges import BOUNDS, relation_of, snapshot_of
from xidstream.actors.runtime.ray_cluster import temporary_folder
from xidstream.actors.snapshots import actors as snapshot_actors
from xidstream.actors.snapshots import snapshot_reader
from xidstream.actors.snapshots.actors import SnapshotActors
from xidstream.pipeline.errors import ConnectionLost, SnapshotLost
from xidstream.pipeline.log_tables.snapshot_tables import SnapshotOutput
from xidstream.pipeline.settings.config import Config

pytestmark = [pytest.mark.ray, pytest.mark.postgres]


def locks(database: Database) -> int:
    """By other clients than this test. Autovacuum has locks, too, and may come at any moment."""
    ((n,),) = database.execute(
        "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE relation = 't'::regclass "
        "AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    )
    return int(n)


@pytest.mark.parametrize(
    ("bytes_per_s", "n_readers", "n_rows"),
    [(64 << 10, 1, 10), (3, 4, 0)],
    ids=["64 KiB/s", "3 B/s for 4 readers"],
)
def test_a_reader_of_a_table_that_is_given_up_lets_go_of_it_and_reads_the_next_one(
    database: Database, tmp_path: Path, bytes_per_s: int, n_readers: int, n_rows: int
) -> None:
    database.execute("CREATE TABLE t (id int, body text)")
    database.execute("INSERT INTO t SELECT i, repeat('x', 1000) FROM generate_series(1, 20000) i")
    database.execute("CREATE TABLE other (id int)")
    database.execute("INSERT INTO other SELECT generate_series(1, %s)", n_rows)
    # At this pace the table takes five minutes, or more.
    actors = SnapshotActors(
        Config(dsn=database.dsn(), slot="s", publication=("p",), snapshot_bytes_per_s=bytes_per_s)
    )
    assert actors.start_readers(n_readers, 1) == n_readers
    failures: list[Any] = []
    try:
        with snapshot_of(database, relation_of(database, "t"), tmp_path) as snapshot:
            target = SnapshotOutput(snapshot.target.table, snapshot.target.job, snapshot.conform)

            def read() -> None:
                try:
                    failures.extend(actors.read([snapshot.whole], BOUNDS, [target]))
                except BaseException as error:
                    failures.append(error)

            thread = threading.Thread(target=read)
            thread.start()
            wait_until(lambda: locks(database) > 0)
            actors.cancel_reads(snapshot.source.relation.relid + 1)
            actors.cancel_reads(snapshot.source.relation.relid)
            thread.join(60)
            assert not thread.is_alive()
        (failure,) = failures
        assert isinstance(failure, SnapshotLost) and "given up" in failure.message
        wait_until(lambda: locks(database) == 0)
        with snapshot_of(database, relation_of(database, "other"), tmp_path) as snapshot:
            target = SnapshotOutput(snapshot.target.table, snapshot.target.job, snapshot.conform)
            (found,) = actors.read([snapshot.whole], BOUNDS, [target])
        assert isinstance(found, tuple) and found[1] == n_rows and len(actors._all) == 2, (
            "the holder, and the same reader, which was not lost"
        )
    finally:
        actors.close()


@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_a_reader_reads_all_ranges_on_one_thread_and_so_takes_their_memory_once(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_reader, "keep_freed_memory", lambda: None)  # this process is the tests'
    monkeypatch.setattr(snapshot_reader, "skip_pandas_import", lambda: None)
    database.execute("CREATE TABLE t (id int)")
    reader = snapshot_reader.SnapshotReader(
        Config(dsn=database.dsn(), slot="s", publication=("p",)), secrets_path=None
    )
    threads: list[int] = []
    read = reader._reader.read

    def noted(*arguments: Any, **named: Any) -> Any:
        threads.append(threading.get_ident())
        return read(*arguments, **named)

    monkeypatch.setattr(reader._reader, "read", noted)
    with snapshot_of(database, relation_of(database, "t"), tmp_path) as snapshot:
        target = SnapshotOutput(snapshot.target.table, snapshot.target.job, snapshot.conform)
        for _ in range(2):
            caller = threading.Thread(target=reader.read, args=([snapshot.whole], BOUNDS, [target], 0))
            caller.start()
            caller.join(60)
    reader._reader.close()
    assert len(threads) == 2 and len(set(threads)) == 1


@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_readers_are_loaded_before_the_first_table_is_held(database: Database) -> None:
    actors = SnapshotActors(Config(dsn=database.dsn(), slot="s", publication=("p",)))
    try:
        assert actors.start_readers(2, 10) == 2
        assert (actors._idle.qsize(), len(actors._starting)) == (2, 0)
    finally:
        actors.close()


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_a_reader_that_ray_has_no_cpus_for_is_told_of_and_the_one_that_runs_reads_all_ranges(
    database: Database,
    tmp_path: Path,
    leave: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database.execute("CREATE TABLE t (id int)")
    database.execute("INSERT INTO t SELECT generate_series(1, 10)")
    leave(0.16)
    monkeypatch.setattr(snapshot_actors, "LOADING_S", 1.0)
    actors = SnapshotActors(Config(dsn=database.dsn(), slot="s", publication=("p",)))
    try:
        # Three that start beside the holder, and one that is started when it is needed.
        assert actors.start_readers(4, 3) == 4
        with snapshot_of(database, relation_of(database, "t"), tmp_path) as snapshot:
            target = SnapshotOutput(snapshot.target.table, snapshot.target.job, snapshot.conform)
            with ThreadPoolExecutor(4) as pool:
                read = [pool.submit(actors.read, [snapshot.whole], BOUNDS, [target]) for _ in range(4)]
                assert [n_rows for each in read for _, n_rows in each.result(60)] == [10] * 4
        assert actors.missing_readers() is None
        monkeypatch.setattr(snapshot_actors, "LATE_S", 0.0)
        missing = actors.missing_readers()
        assert missing is not None and missing.startswith("3 of 4 snapshot readers have no process yet"), (
            missing
        )
        assert "Ray needs 0.1 free CPUs for each" in missing
    finally:
        actors.close()
    assert actors.missing_readers() is None


def test_readers_that_the_server_has_no_room_for_end_and_leave_no_password_behind(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = Path(temporary_folder() or "")
    actors = SnapshotActors(Config(dsn=f"{database.dsn()} password=secret", slot="s", publication=("p",)))
    asked: list[int] = []

    def room_for(_: str, n_connections: int) -> int:
        asked.append(n_connections)
        if len(asked) == 1:
            raise ConnectionLost("too many clients")
        return 2

    monkeypatch.setattr(actors, "hold", room_for)
    try:
        with pytest.raises(ConnectionLost):
            actors.start_readers(4, 3)
        before = [actor for actor, _ in actors._all]
        assert actors.start_readers(4, 3) == 1 and asked == [8, 8]
        assert [actor for actor, _ in actors._all] == before[:2], "the holder, and one reader of three"
        wait_until(lambda: not list(temporary.glob("xidstream-*/*")))
    finally:
        actors.close()
