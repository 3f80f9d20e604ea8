"""Snapshots into an object store: nodes' own credentials, multipart uploads, and the same fold. And snapshots that wait
there for a function, of a run that is killed."""

from __future__ import annotations

import json
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.delivered import delivered_lsn
from tests.e2e.test_command_line import XIDSTREAM, environment, options
from tests.fold import Log, standing_generations
from tests.postgres_fixtures import Database
from tests.s3_server import S3Server
from tests.waiting import wait_until
from tests.waiting_rows import waiting_rows
from xidstream.pipeline.pg import Lsn

pytestmark = pytest.mark.e2e

TABLES = {"accounts": "id, note", "history": "id, delta", "documents": "id, title, body", "empty": "id"}
SCHEMA = """
    create table accounts (id bigint primary key, note text);
    create table history (id int, delta int);
    alter table history replica identity full;
    create table documents (id int primary key, title text, body text);
    alter table documents alter body set storage external;
    create table empty (id int primary key);
    insert into accounts select i, repeat(md5(i::text), 4) from generate_series(1, 150000) i;
    insert into history select i % 100, i % 7 from generate_series(1, 5000) i;
    insert into documents select i, 'title ' || i, repeat(md5(i::text), 400) from generate_series(1, 60) i;
    create publication p for table accounts, history, documents, empty;
"""


@pytest.fixture
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_snapshots_into_an_object_store_and_the_changes_behind_them_fold_to_the_source(
    database: Database, s3: S3Server, tmp_path: Path
) -> None:
    database.execute(SCHEMA)
    settings = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3.port}",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
    }
    root = f"s3://{s3.bucket}/delta"
    arguments = options(database, tmp_path, "--create-slot", "--snapshot", "initial", sink=f"delta:{root}")
    arguments[arguments.index("--storage") + 1] = s3.uri("segments")
    process = subprocess.Popen(
        [*XIDSTREAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment(settings),
    )

    def taken() -> bool:
        assert process.poll() is None
        is_there = bool(s3.keys("delta/_snapshots/_delta_log", ".json"))
        return is_there and len(standing_generations(root, settings)) == len(TABLES)

    try:
        wait_until(taken, 180)
        database.execute("update accounts set note = 'new' where id % 1000 = 7")
        database.execute("update documents set title = title || '.' where id < 20")
        database.execute("delete from history where id = 5")
        ((text,),) = database.execute("select pg_current_wal_insert_lsn()::text")
        database.execute("insert into empty values (1)")
        end = Lsn.parse(text)
        slot = database.execute(
            "select slot_name from pg_replication_slots where database = %s", database.name
        )[0][0]
        wait_until(lambda: delivered_lsn(s3.uri("segments"), slot) > end or process.poll() is not None)
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    database.execute("delete from empty")
    for table, columns in TABLES.items():
        log = Log(root, "public", table, settings)
        assert log.at(end) == Counter(database.execute(f"select {columns} from {table}")), table
    assert Log(root, "public", "accounts", settings).n_snapshot_rows == 150_000


HANDLE = """
import json, time
from pathlib import Path

FOLDER = Path({folder!r})

def handle(batch):
    assert batch.snapshot is not None
    for table in batch.tables:
        if table == "public.documents" and not (FOLDER / "stands").exists():
            (FOLDER / "stands").touch()
            time.sleep(3600)
        rows = [json.dumps([row[name] for name in {columns!r}[table]]) for row in batch.dataframe(table).collect()]
        with (FOLDER / table).open("a") as out:
            out.write(json.dumps(rows) + "\\n")
"""


@pytest.mark.nightly
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_a_run_that_is_killed_with_a_table_in_a_functions_hands_leaves_what_the_next_one_removes(
    database: Database, s3: S3Server, tmp_path: Path
) -> None:
    database.execute(SCHEMA)
    columns = {f"public.{table}": names.split(", ") for table, names in TABLES.items()}
    (tmp_path / "kept.py").write_text(HANDLE.format(folder=str(tmp_path), columns=columns))
    storage = s3.uri("segments")
    arguments = options(
        database,
        tmp_path,
        "--create-slot",
        "--snapshot",
        "initial",
        "--available-now",
        sink="foreach:kept:handle",
    )
    arguments[arguments.index("--storage") + 1] = storage
    command: dict[str, Any] = {
        "args": [*XIDSTREAM, *arguments],
        "stdin": subprocess.DEVNULL,
        "text": True,
        "env": environment({"PYTHONPATH": str(tmp_path)}),
    }
    with (tmp_path / "killed.log").open("w") as log:
        killed = subprocess.Popen(**command, stdout=log, stderr=log)
        try:
            wait_until((tmp_path / "stands").exists, 180)
            wait_until(lambda: len(waiting_rows(storage)) > 0, 30)
        finally:
            killed.kill()
            killed.wait()
    left = set(waiting_rows(storage))
    assert any(key.rpartition("/rows/")[2].startswith(f"{relid_of(database, 'documents')}-") for key in left)
    ended = subprocess.run(**command, capture_output=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert waiting_rows(storage) == []
    for table, names in TABLES.items():
        got = [json.loads(line) for line in (tmp_path / f"public.{table}").read_text().splitlines()]
        assert len(got) == 1, "each table once: the killed run's last was not given"
        rows = Counter(tuple(json.loads(row)) for row in got[0])
        assert rows == Counter(database.execute(f"select {names} from {table}")), table


def relid_of(database: Database, table: str) -> int:
    ((relid,),) = database.execute("select %s::regclass::oid::bigint", table)
    return int(relid)
