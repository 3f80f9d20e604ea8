"""Snapshots into an object store: nodes' own credentials, multipart uploads, and the same fold."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.delivered import delivered_lsn
from tests.e2e.test_command_line import XIDSTREAM, environment, options
from tests.fold import Log, standing_generations
from tests.postgres_fixtures import Database
from tests.s3_server import S3Server
from tests.waiting import wait_until
from xidstream.pipeline.pg import Lsn

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

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
