"""What ``check``, ``run`` and ``ChangeStream.start`` find before anything is started, on a real server."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.postgres_fixtures import Database
from xidstream.actors.preflight import findings_of, require
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.errors import (
    ExitStatus,
    PreconditionMissing,
    SinkDiverged,
    SlotLost,
    SnapshotInterrupted,
    UsageError,
    XidstreamError,
)
from xidstream.pipeline.exchange import SlotIdentity
from xidstream.pipeline.findings import Finding, Status
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.admin import create_slot, current_flush_lsn, describe_slot
from xidstream.pipeline.postgres.connection import ReplicationConnection
from xidstream.pipeline.postgres.opening import slot_settings
from xidstream.pipeline.postgres.snapshot_sources import survey_unless_locked
from xidstream.pipeline.preflight import checks as stages_preflight
from xidstream.pipeline.schema.rows import TRANSACTIONS_SCHEMA
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.sinks.sink_findings import check_of_function
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import write_progress
from xidstream.pipeline.storage.storage import Storage

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.parametrize("postgres_server", [18], indirect=True),
]


@pytest.fixture
def config(database: Database, tmp_path: Path) -> Config:
    """Of a run that lacks nothing."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t")
    slot = f"s_{database.name}"
    create_slot(database.dsn(), slot)
    return Config(
        dsn=database.dsn(),
        slot=slot,
        publication=("pub",),
        storage=str(tmp_path / "storage"),
        sink=f"delta:{tmp_path / 'delta'}",
    )


@pytest.fixture
def own_role(database: Database) -> Iterator[str]:
    """A role that replicates, without a right on any table."""
    role = f"role_{database.name}"
    database.execute(f"CREATE ROLE {role} LOGIN REPLICATION")
    yield role
    database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def identity_of(config: Config) -> SlotIdentity:
    with ReplicationConnection(slot_settings(config)) as connection:
        system = connection.identify_system()
    return SlotIdentity(int(system.system_identifier), system.dbname, config.slot)


def record(config: Config, lsn: Lsn) -> None:
    layout = Layout(identity_of(config).system_identifier, config.slot, "e")
    write_progress(Storage(config.storage), layout, lsn)


def finding(config: Config, check: str) -> Finding:
    (found,) = [f for f in findings_of(config) if f.check == check]
    return found


def raised(config: Config) -> XidstreamError:
    with pytest.raises(XidstreamError) as caught:
        require(config, tell=print, wait_s=0)
    return caught.value


def transactions_of(config: Config, watermark: int, *, timeline: int = 1) -> None:
    """A Delta root as a run of this slot has left it."""
    root = Location.parse(config.sink.partition(":")[2])
    columns = [TableColumn(f.name, f.type, f.name) for f in TRANSACTIONS_SCHEMA]
    writer = DeltaTableWriter.open_or_create(
        root.child(locations.TRANSACTIONS), locations.TRANSACTIONS, columns
    )
    application_id = identity_of(config).application_id
    marks = {f"{application_id}/owner": 3, f"{application_id}/timeline": timeline}
    writer.commit([], {application_id: watermark}, "commit_lsn", marks=marks)


def test_a_sound_setup_is_all_ok_but_for_what_only_the_cluster_knows_and_leaves_nothing_behind(
    config: Config, tmp_path: Path
) -> None:
    findings = findings_of(config)
    assert [f.check for f in findings if f.status is not Status.OK] == ["cluster"], findings
    assert {f.check for f in findings} >= {"storage", "record", "sink", "sink_tables", "java"}
    assert "nothing of this slot" in finding(config, "sink_tables").statement
    assert not (tmp_path / "delta").exists()
    assert [path for path in (tmp_path / "storage").rglob("*") if path.is_file()] == []
    require(config, tell=pytest.fail)


def test_a_slot_beyond_its_record_is_told_with_both_positions_before_anything_is_started(
    config: Config, database: Database
) -> None:
    """``check`` passed it, and the run refused it after 77 seconds, with Ray and Spark started."""
    confirmed = describe_slot(config.dsn, config.slot).confirmed_flush
    assert confirmed is not None
    record(config, Lsn(0x100))
    error = raised(config)
    assert type(error) is SlotLost
    assert str(confirmed) in error.message and "0/100" in error.message
    assert finding(config, "record").status is Status.FAILED


def test_a_record_beyond_the_servers_wal_is_told_with_both_positions(config: Config) -> None:
    delivered = Lsn(current_flush_lsn(config.dsn) + (1 << 30))
    record(config, delivered)
    error = raised(config)
    assert type(error) is SlotLost
    assert str(delivered) in error.message and "the server's WAL ends at" in error.message


def test_a_record_that_the_slot_has_not_reached_fits(config: Config) -> None:
    record(config, current_flush_lsn(config.dsn))
    assert finding(config, "record").status is Status.OK


def test_a_table_with_clashing_column_names_is_told_and_does_not_keep_a_run_from_starting(
    config: Config, database: Database
) -> None:
    """A run did not start as long as there was one, though others could have gone on."""
    database.execute('ALTER TABLE t ADD COLUMN "_XID" int')
    found = finding(config, "column_names")
    assert found.status is Status.WARNING
    assert "table public.t: column _XID has the name" in found.statement and "parks" in found.statement
    told: list[str] = []
    for has_sink in (True, False):
        require(config, tell=told.append, wait_s=0, has_sink=has_sink)
    assert told == [f"note: {found.statement}"] * 2


@pytest.mark.slow
def test_a_locked_table_with_a_row_filter_is_told_and_does_not_keep_a_run_from_starting(
    config: Config, database: Database
) -> None:
    database.execute("ALTER PUBLICATION pub SET TABLE t WHERE (id > 5)")
    snapshots = dataclasses.replace(config, snapshot="initial")
    with database.connect() as other, other.transaction():
        other.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(SnapshotInterrupted, match=rf"of session {other.info.backend_pid} \("):
            survey_unless_locked(database.connection, ["pub"])
        assert finding(snapshots, "snapshot_size").status is Status.WARNING
        require(snapshots, tell=str, wait_s=0)
    assert survey_unless_locked(database.connection, ["pub"])


@pytest.mark.slow
def test_a_locked_table_is_told_with_who_has_locked_it_and_does_not_keep_a_run_from_starting(
    config: Config, database: Database
) -> None:
    """A run that was started beside a VACUUM FULL waited for its end, and did not say for what."""
    with database.connect() as other, other.transaction():
        other.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        found = finding(config, "publication")
        assert found.status is Status.WARNING
        assert f"of session {other.info.backend_pid} (" in found.statement
        told: list[str] = []
        require(dataclasses.replace(config, snapshot="initial"), tell=told.append, wait_s=0)
        assert f"note: {found.statement}" in told
    assert finding(config, "publication").status is Status.OK


def test_a_storage_that_cannot_be_written_is_refused_at_once(config: Config, tmp_path: Path) -> None:
    """The run tried for 40 seconds, with Ray and Spark started."""
    (tmp_path / "file").touch()
    error = raised(dataclasses.replace(config, storage=str(tmp_path / "file" / "segments")))
    assert type(error) is PreconditionMissing
    assert "Not a directory" in error.message


def test_a_delta_root_that_cannot_be_written_is_refused_at_once(config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = raised(dataclasses.replace(config, sink=f"delta:{tmp_path / 'file' / 'root'}"))
    assert error.policy.exit_status is ExitStatus.PRECONDITION
    assert "cannot be written: Not a directory" in error.message


def test_a_partitioned_table_in_the_root_is_refused_at_once(config: Config, tmp_path: Path) -> None:
    rows = pa.table({"id": [1], "day": ["a"]})
    write_deltalake(str(tmp_path / "delta" / "public.t"), rows, partition_by=["day"])
    error = raised(config)
    assert error.policy.exit_status is ExitStatus.PRECONDITION
    assert "Delta table public.t is partitioned" in error.message


def test_a_root_that_is_ahead_of_the_server_is_refused_as_diverged(config: Config) -> None:
    transactions_of(config, current_flush_lsn(config.dsn) + (1 << 30))
    error = raised(config)
    assert type(error) is SinkDiverged
    assert error.policy.exit_status is ExitStatus.TERMINAL


def test_a_root_of_a_timeline_that_the_server_never_had_is_refused_as_diverged(config: Config) -> None:
    transactions_of(config, 0x100, timeline=7)
    assert type(raised(config)) is SinkDiverged


def test_what_the_root_holds_of_this_slot_is_told(config: Config) -> None:
    transactions_of(config, 0x100)
    found = finding(config, "sink_tables")
    assert found.status is Status.OK
    assert found.statement.endswith("transactions up to 0/100")


@pytest.mark.parametrize(
    ("sink", "says"),
    [
        ("foreach:no_such_module:handle", "no_such_module"),
        ("foreach:os.path:no_such_name", "no_such_name"),
        ("foreach:os:sep", "not a function"),
        ("foreach:shutil:copyfile", "cannot be called with one argument"),
        ("delta:ftp://somewhere", "unknown scheme"),
        ("delta", "names no folder"),
    ],
)
def test_a_sink_that_cannot_be_is_a_usage_error(config: Config, sink: str, says: str) -> None:
    error = raised(dataclasses.replace(config, sink=sink))
    assert isinstance(error, UsageError)
    assert says in error.message


def test_the_sink_of_a_script_is_checked_in_place_of_a_setting(config: Config) -> None:
    def takes_none() -> None: ...

    without = dataclasses.replace(config, sink="")
    (found,) = [f for f in findings_of(without, check_of_function(takes_none)) if f.check == "sink"]
    assert found.status is Status.FAILED and "takes_none" in found.statement
    (found,) = [f for f in findings_of(without, check_of_function(print)) if f.check == "sink"]
    assert found.status is Status.OK


def test_an_object_store_that_does_not_answer_is_told_within_seconds_and_without_its_secrets(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    error = raised(dataclasses.replace(config, sink="delta:s3://bucket/root"))
    assert "Delta root s3://bucket/root cannot be written: Connection refused" in error.message
    assert "hunter2" not in f"{error.message} {error.remedy}"


def test_a_storage_and_tables_that_other_logins_may_read_are_told_of(
    config: Config, short_folder: Path
) -> None:
    short_folder.chmod(0o755)
    config = dataclasses.replace(
        config, storage=str(short_folder / "storage"), sink=f"delta:{short_folder / 'delta'}"
    )
    findings_of(config)
    assert [f for f in findings_of(config) if f.check == "storage_mode"] == [], (
        "check made it as it should be"
    )
    for name in ("storage", "delta"):
        (short_folder / name).mkdir(exist_ok=True)
        (short_folder / name).chmod(0o755)
    told = [f for f in findings_of(config) if f.check == "storage_mode"]
    assert [f.status for f in told] == [Status.WARNING] * 2
    for finding, name in zip(told, ("storage", "Delta root"), strict=True):
        assert (
            finding.statement.startswith(name)
            and "every login of this machine may read it" in finding.statement
        )
        assert "chmod" in (finding.remedy or "")
    wanted = dataclasses.replace(config, storage_mode="0755")
    assert [f for f in findings_of(wanted) if f.check == "storage_mode"] == []


def test_rows_from_before_that_a_first_run_does_not_read_are_told_with_whether_the_role_may_read_them(
    config: Config, database: Database, own_role: str
) -> None:
    """The literal quick start left them out, and no line of it said so."""
    database.execute("INSERT INTO t SELECT i FROM generate_series(1, 5000) i; ANALYZE t")
    told: list[str] = []
    require(config, tell=told.append, wait_s=0)
    (note,) = told
    assert "1 table, about 5,000 rows from before the slot are not read (snapshot = never): public.t" in note
    assert note.endswith("the role may read them")
    found = finding(dataclasses.replace(config, dsn=database.dsn(user=own_role)), "snapshot_none")
    assert "the role may not read public.t whole" in found.statement
    assert (
        found.remedy is not None and "--snapshot initial" in found.remedy and "GRANT SELECT" in found.remedy
    )
    printing = dataclasses.replace(config, sink="console")
    assert "--snapshot" not in (finding(printing, "snapshot_none").remedy or "")
    # A run that takes them says what it needs, and one that has delivered something cannot tell rows apart any more.
    taking = findings_of(dataclasses.replace(config, snapshot="initial"))
    assert not [f for f in taking if f.check == "snapshot_none"]
    record(config, current_flush_lsn(config.dsn))
    later = finding(config, "snapshot_none")
    assert later.status is Status.OK and "1 table without a snapshot" in later.statement


def test_paths_with_a_tilde_are_told_absolute_and_check_makes_none_of_them(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``check`` made a folder named ``~`` in the working directory."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    typed = dataclasses.replace(config, storage="~/seg ments", sink="delta:~/tables")
    assert f"{tmp_path}/home/seg ments" in finding(typed, "storage").statement
    assert f"{tmp_path}/home/tables" in finding(typed, "sink").statement
    assert list(tmp_path.iterdir()) == []


def test_what_the_storages_disk_has_free_is_told_and_little_is_warned_of(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert re.search(r"can be written: its disk has [\d.]+ [GT]iB free", finding(config, "storage").statement)
    monkeypatch.setattr(stages_preflight, "_LITTLE_BYTES", 1 << 60)
    found = finding(config, "storage")
    assert found.status is Status.WARNING and "the journal (up to 64.0 GiB)" in found.statement
    # It is usable all the same: nothing that depends on it is left out.
    assert finding(config, "record").status is Status.OK


def test_a_storage_that_is_mounted_read_only_is_blamed_itself_and_not_the_sink(config: Config) -> None:
    """A second failure said that the Delta root could not be read, and ``run`` printed that one first."""
    folder = Path(config.storage)
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,ro", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mount is not there, or does not work for this user")
    try:
        failed = [f for f in findings_of(config) if f.status is Status.FAILED]
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
    assert [f.check for f in failed] == ["storage"], failed
    assert "Read-only file system" in failed[0].statement


def test_a_storage_or_tables_where_another_login_could_plant_a_link_are_refused(
    config: Config, short_folder: Path
) -> None:
    short_folder.chmod(0o755)
    config = dataclasses.replace(
        config, storage=str(short_folder / "storage"), sink=f"delta:{short_folder / 'delta'}"
    )
    for name, mode in (("storage", 0o1777), ("delta", 0o757)):
        (short_folder / name).mkdir()
        (short_folder / name).chmod(mode)
    refused = [f for f in findings_of(config) if f.check == "storage_mode"]
    assert [(f.status, f.raises) for f in refused] == [(Status.FAILED, PreconditionMissing)] * 2
    assert "every login of this machine may change storage" in refused[0].statement
    assert "may change Delta root" in refused[1].statement and "chmod" in (refused[1].remedy or "")
    short_folder.chmod(0o700)
    assert [f for f in findings_of(config) if f.check == "storage_mode"] == [], "nobody gets there"
    if os.geteuid() == 0:  # else no link can be another login's
        planted = short_folder / "storage" / "1"
        planted.symlink_to("/etc")
        os.chown(planted, 65534, 65534, follow_symlinks=False)
        (refused,) = [f for f in findings_of(config) if f.check == "storage_mode"]
        assert (
            refused.raises is PreconditionMissing and f"{planted} is a link that another" in refused.statement
        )
