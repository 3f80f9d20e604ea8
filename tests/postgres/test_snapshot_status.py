"""``xidstream snapshot status``: what a person wants to know of each table's snapshot, with the sink's word."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.postgres_fixtures import Database
from tests.snapshot_tables import commit_one, output_of
from tests.unit.account.accounts import FULL, RUN
from xidstream.actors.cli.main import main
from xidstream.actors.runtime.run_socket import RunSocket
from xidstream.pipeline.account.codec import to_json
from xidstream.pipeline.delta.delta_tables import DeltaTables
from xidstream.pipeline.exchange import SlotIdentity, Tenure
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.ownership import Ownership
from xidstream.pipeline.log_tables.snapshot_log import SnapshotLog
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.admin import create_slot, sql_connection
from xidstream.pipeline.postgres.connection import ReplicationConnection
from xidstream.pipeline.postgres.settings import SlotSettings
from xidstream.pipeline.postgres.snapshot_sources import survey
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.generation import Generation
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.snapshot_record import (
    TakenSnapshot,
    forget_request,
    read_wishes,
    request,
    write_taken,
)
from xidstream.pipeline.storage.storage import Storage

pytestmark = [pytest.mark.postgres, pytest.mark.parametrize("postgres_server", [18], indirect=True)]
PLACE = Lsn(0x1000)


def test_each_table_is_finished_read_in_part_begun_or_without_a_snapshot(
    database: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said "begun or finished", and sent people to a table of the sink."""
    for name in "abcd":
        database.execute(f"CREATE TABLE {name} (id int PRIMARY KEY)")
    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    slot = f"s_{database.name}"
    create_slot(database.dsn(), slot)
    with ReplicationConnection(SlotSettings(database.dsn(), slot, ("pub",))) as connection:
        system = connection.identify_system()
        with sql_connection(connection.same_server, "a test") as sql:
            sources = survey(sql, ["pub"])
    identity = SlotIdentity(int(system.system_identifier), system.dbname, slot)
    stored = Storage(str(tmp_path / "segments")), Layout(identity.system_identifier, slot, "e")
    root = Location.parse(str(tmp_path / "tables"))
    tenure = Tenure(1, "e", 1, {}, Lsn(10**12))
    application_id = identity.application_id
    owner = Ownership(application_id, f"{application_id}/messages", root.uri, tenure)
    log = SnapshotLog(DeltaTables(root), application_id, owner)
    bounds = SnapshotBounds(PLACE, Lsn(0x1100), 700, 710, (), 1_700_000_000_000_000)
    for source in sources[:3]:
        generation = Generation(source.relation, 1, bounds)
        write_taken(*stored, TakenSnapshot(generation, {}))
        if source.name != "public.b":
            output_of(log, source.relation, PLACE)
            assert commit_one(log, generation, [])
    ended = next(line for line in log.lines(True) if line.table == "public.c")
    log.end(ended, "the type of column id changed")

    def states(*more: str) -> dict[str, str]:
        options = [
            "--dsn",
            database.dsn(),
            "--slot",
            slot,
            "--publication",
            "pub",
            "--storage",
            stored[0].uri,
        ]
        with pytest.raises(SystemExit) as finished:
            main(["snapshot", "status", *options, *more])
        printed = capsys.readouterr()
        assert not finished.value.code, printed.err
        lines = [line for line in printed.out.splitlines() if line.startswith("public.")]
        return {line.split()[0]: line.partition(" B")[2].strip() for line in lines}

    sink = ("--sink", f"delta:{root.uri}")
    shown = states(*sink)
    assert shown["public.a"].endswith("finished")
    assert shown["public.b"].endswith("begun, and not in the sink")
    assert shown["public.c"].endswith("no longer valid: the type of column id changed")
    assert shown["public.d"].endswith("none")
    assert states()["public.a"].endswith("begun or finished"), "without the sink nobody can tell"

    def asked(table: str, where: str, *more: str) -> str:
        options = [
            "--dsn",
            database.dsn(),
            "--slot",
            slot,
            "--publication",
            "pub",
            "--storage",
            stored[0].uri,
        ]
        with pytest.raises(SystemExit) as finished:
            main(["snapshot", "request", *options, "--table", table, "--where", where, *more])
        printed = capsys.readouterr()
        assert bool(finished.value.code) == bool(printed.err)
        return printed.out + printed.err

    for table, where, more, refused in (
        ("public.a", "id = 1", ("--sink", "console"), "--where needs a Delta sink"),
        ("public.a", "id = 1", ("--sink", "iceberg:/lake/shop"), "--where needs a Delta sink"),
        ("public.a", "id = 1", ("--table", "public.b"), "--where is for one table"),
        ("public.a", "id = 1 or id = 2", sink, "at 'or id = 2' (character 8)"),
        ("public.a", "other = 1", sink, "column other is not one of the key of table public.a: id"),
        ("public.a", "id = 'x'", (), "none of its type, integer"),
        ("public.c", "id = 1", sink, "its last one is no longer valid: the type of column id changed"),
        ("public.d", "id = 1", (), "no snapshot of table public.d stands"),
    ):
        assert refused in asked(table, where, *more)
    assert not read_wishes(*stored).requests
    assert "repair of the rows with id >= 1 and id <= 7 requested" in asked(
        "public.a", "id between 1 and 7", *sink
    )
    assert states(*sink)["public.a"].endswith("repair asked for: id >= 1 and id <= 7")
    request(*stored, sources[0].relation.relid, "public.a")
    assert "the whole table is requested already" in asked("public.a", "id = 9", *sink)
    assert states(*sink)["public.a"].endswith("asked for")
    forget_request(*stored, sources[0].relation.relid)

    assert FULL.snapshots is not None
    table = dataclasses.replace(FULL.snapshots.tables[0], table="public.b")
    account = dataclasses.replace(
        FULL,
        run=dataclasses.replace(RUN, slot=slot),
        snapshots=dataclasses.replace(FULL.snapshots, tables=(table,)),
    )
    served = RunSocket(slot, lambda: to_json(account))
    try:
        assert states(*sink)["public.b"].endswith("reading, 38%")
    finally:
        served.close()
