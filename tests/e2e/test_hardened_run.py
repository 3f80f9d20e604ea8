"""One run as in production: TLS with verify-full, SCRAM, a role that may only replicate, S3, and then poison.

The database checks no encoding (SQL_ASCII), so that a change which cannot be decoded can be made at the end.
"""

from __future__ import annotations

import json
import secrets
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from deltalake import DeltaTable
from psycopg import sql

from tests.e2e.test_command_line import XIDSTREAM, ask_for_spark, environment, wait_until
from tests.processes import living_below
from tests.proxies import TlsProxy, make_certificate
from tests.s3_server import S3Server
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CONFIRMED = "(select confirmed_flush_lsn from pg_replication_slots where slot_name = 'shop')"
ROW_SECRET = "a-value-of-a-row-4711"


@pytest.fixture
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def owned(postgres_server: EmbeddedPostgres) -> Iterator[tuple[str, str, psycopg.Connection[Any]]]:
    """The runtime role, its password, and a connection of the owner, who made tables, publication and slot."""
    owner, reader, password, name = "shop_owner", "shop_reader", secrets.token_hex(16), "shop"
    with psycopg.connect(postgres_server.conninfo(), autocommit=True) as admin:
        admin.execute(
            sql.SQL("create role {} login replication; create role {} login replication password {}").format(
                sql.Identifier(owner), sql.Identifier(reader), sql.Literal(password)
            )
        )
        admin.execute(
            f"create database {name} owner {owner} encoding 'SQL_ASCII' template template0 "
            "lc_collate 'C' lc_ctype 'C'".encode()
        )
        try:
            dsn = postgres_server.conninfo(name, user=owner, client_encoding="SQL_ASCII")
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute("create table t (id int primary key, note text)")
                connection.execute("revoke all on t from public")
                connection.execute("create publication p for table t")
                connection.execute("select pg_create_logical_replication_slot('shop', 'pgoutput')")
                yield reader, password, connection
        finally:
            admin.execute(
                "select pg_terminate_backend(active_pid, 10000) from pg_replication_slots where slot_name = 'shop'"
            )
            admin.execute("select pg_drop_replication_slot('shop')")
            admin.execute(f"drop database {name} with (force)".encode())
            admin.execute(f"drop role {owner}; drop role {reader}".encode())


@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_a_hardened_run_tells_no_secret_anywhere_and_ends_with_status_4_on_poison(
    postgres_server: EmbeddedPostgres,
    owned: tuple[str, str, psycopg.Connection[Any]],
    s3: S3Server,
    tmp_path: Path,
) -> None:
    reader, password, owner = owned
    with psycopg.connect(postgres_server.conninfo("shop")) as admin:
        rights = admin.execute(
            "select rolsuper, has_table_privilege(rolname, 'public.t', 'select, insert, update, delete'), "
            "has_database_privilege(rolname, 'shop', 'create') from pg_roles where rolname = %s",
            (reader,),
        ).fetchone()
    assert rights == (False, False, False)

    certificate = make_certificate(tmp_path / "server.pem")
    proxy = TlsProxy(postgres_server.port, certificate)
    ui_port = free_port()
    (tmp_path / "shop.toml").write_text(
        f'dsn = "host=localhost port={proxy.port} dbname=shop user={reader} password={password} '
        f'sslmode=verify-full sslrootcert={certificate} require_auth=scram-sha-256"\n'
        f'slot = "shop"\npublication = "p"\nstorage = "{s3.uri("segments")}"\n'
        f'sink = "delta:s3://{s3.bucket}/delta"\nlogical_decoding_work_mem = "64kB"\nbuffer_memory_bytes = "1MB"\n'
        f'[spark_conf]\n"spark.ui.enabled" = "true"\n"spark.ui.port" = "{ui_port}"\n'
    )
    s3_settings = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3.port}",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    process = subprocess.Popen(
        [*XIDSTREAM, "--debug", "run", "--config", str(tmp_path / "shop.toml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment(s3_settings),
    )
    try:
        wait_until(lambda: is_read(owner) or process.poll() is not None)
        owner.execute("begin")
        owner.execute(f"insert into t select i, '{ROW_SECRET}' from generate_series(1, 40000) i".encode())
        wait_until(lambda: s3.keys("segments", ".parquet") or process.poll() is not None)
        owner.execute("commit")
        wait_until(
            lambda: len(delta_rows(s3, "public.t", s3_settings)) == 40_000 or process.poll() is not None
        )
        # The batch ends with its line: an outage in its midst is the sink's, and ends the run.
        wait_until(
            lambda: (
                len(delta_rows(s3, "_transactions", s3_settings, "commit_lsn")) == 1
                or process.poll() is not None
            )
        )
        assert process.poll() is None, process.communicate()[0]

        s3.failing, asked = True, s3.n_requests
        outage_lsn = lsn_of(owner, "pg_current_wal_lsn()")
        owner.execute("insert into t values (40001, 'in an outage')")
        wait_until(lambda: s3.n_requests > asked + 10 or process.poll() is not None)
        assert lsn_of(owner, CONFIRMED) <= outage_lsn
        s3.failing = False
        wait_until(
            lambda: len(delta_rows(s3, "public.t", s3_settings)) == 40_001 or process.poll() is not None, 150
        )
        assert process.poll() is None, process.communicate()[0]
        others = ask_for_spark(owner.execute, 100_000, ROW_SECRET)
        n_rows = 40_001 + len(others)
        wait_until(
            lambda: len(delta_rows(s3, "public.t", s3_settings)) == n_rows or process.poll() is not None, 150
        )
        assert process.poll() is None, process.communicate()[0]
        ui = spark_ui(ui_port)
        commands = [" ".join(p.command) for p in living_below(process.pid)]
        (session,) = {a for c in commands for a in [session_of(c)] if a}

        xid = owner.execute("select txid_current() + 1").fetchone()
        owner.execute(rb"insert into t values (50000, E'caf\xe9 hunter2')")
        owner.execute("insert into t values (50001, 'after')")
        output, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=90)
        proxy.close()

    assert process.returncode == 4, output
    said = next(line for line in output.splitlines() if line.startswith("xidstream: "))
    assert xid is not None and f"xid {xid[0]}, LSN " in said and "public.t column note" in said, said
    assert [r["id"] for r in delta_rows(s3, "public.t", s3_settings)] == [*range(1, 40_002), *others]

    stored = s3.contents()
    places = {"output": output, "Spark's interface": ui, "command lines": "\n".join(commands)}
    for place, text in places.items():
        assert password not in text and ROW_SECRET not in text and "hunter2" not in text, place
    kept = Path(session).parents[1] / "logs"
    assert f"the logs of this run's processes are kept in {kept}" in output
    logs = [p for p in kept.rglob("*") if p.is_file()]
    assert len(logs) > 5
    for secret in (password, ROW_SECRET, "hunter2"):
        assert not [str(p) for p in logs if secret.encode() in p.read_bytes()]
    assert not [key for key, content in stored.items() if password.encode() in content]
    # A pickle begins with its protocol's opcode; Arrow, Parquet and JSON do not.
    assert {key.rpartition(".")[2] for key in stored} <= {"json", "parquet", "arrow"}, stored.keys()
    assert not [key for key, content in stored.items() if content[:1] == b"\x80"]


def lsn_of(owner: psycopg.Connection[Any], expression: str) -> int:
    row = owner.execute(f"select ({expression} - '0/0')::bigint".encode()).fetchone()
    assert row is not None
    return int(row[0])


def is_read(owner: psycopg.Connection[Any]) -> bool:
    row = owner.execute("select active from pg_replication_slots where slot_name = 'shop'").fetchone()
    return bool(row and row[0])


def delta_rows(
    s3: S3Server, table: str, settings: dict[str, str], column: str = "id"
) -> list[dict[str, Any]]:
    if not s3.keys(f"delta/{table}/_delta_log", ".json"):
        return []
    options = {**settings, "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    rows = DeltaTable(f"s3://{s3.bucket}/delta/{table}", storage_options=options).to_pyarrow_table(
        columns=[column]
    )
    return sorted(rows.to_pylist(), key=lambda r: r[column])


def spark_ui(port: int) -> str:
    """All that Spark's interface shows of the application."""
    root = f"http://127.0.0.1:{port}/api/v1/applications"
    (application,) = json.loads(fetch(root))
    below = f"{root}/{application['id']}"
    pages = [
        "environment",
        "jobs",
        "stages?details=true",
        "sql?details=true&planDescription=true",
        "allexecutors",
    ]
    texts = [fetch(f"{below}/{page}") for page in pages]
    assert len(json.loads(texts[1])) > 1, "the jobs of the sink are there"
    return "\n".join(texts)


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def session_of(command: str) -> str | None:
    """Ray's session folder, from the command line of its gcs_server or raylet."""
    for argument in command.split():
        name, _, value = argument.partition("=")
        if name.strip("-") in ("session-dir", "session_dir"):
            return value
    return None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
