"""A run that refreshes base tables in moto's S3 and registers them in moto's Glue, which is down at first."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from deltalake import DeltaTable

from tests.e2e.test_command_line import XIDSTREAM, environment, options
from tests.postgres_fixtures import Database
from tests.s3_server import CountedS3, S3Server, counted_s3
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def store() -> Iterator[CountedS3]:
    with counted_s3() as made:
        yield made


@pytest.fixture
def glue_server() -> Iterator[S3Server]:
    """moto answers for Glue at the same port. A server of its own, because it fails and the store does not."""
    server = S3Server()
    yield server
    server.stop()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_a_catalog_that_is_down_holds_up_nothing_and_has_the_tables_when_it_is_back(
    database: Database, store: CountedS3, glue_server: S3Server, tmp_path: Path
) -> None:
    endpoint = f"http://127.0.0.1:{glue_server.port}"
    glue = boto3.client("glue", region_name="us-east-1", endpoint_url=endpoint)
    glue.create_database(DatabaseInput={"Name": "shop"})
    database.execute("create table a (id bigint primary key, note text)")
    database.execute("create table b (id bigint primary key, balance numeric(10, 2))")
    database.execute("insert into a select i, 'note ' || i from generate_series(1, 100) i")
    database.execute("insert into b values (1, 1.25)")
    database.execute("create publication p for table a, b")
    root = f"{store.uri}/delta"
    keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    settings = {**store.options, **keys, "AWS_ENDPOINT_URL_GLUE": endpoint}
    mirror = ("--mirror-every", "1s", "--mirror-catalog", "glue:shop")
    more = ("--create-slot", "--snapshot", "initial", *mirror)
    log = tmp_path / "run.log"

    def rows(table: str) -> int:
        """Of a base table; -1 where there is none."""
        place, about = f"{root}/current/public.{table}", {**store.options, **keys}
        if not DeltaTable.is_deltatable(place, about):
            return -1
        return int(DeltaTable(place, storage_options=about).to_pyarrow_table().num_rows)

    def entries() -> list[str]:
        return sorted(table["Name"] for table in glue.get_tables(DatabaseName="shop")["TableList"])

    glue_server.failing = True
    with log.open("w") as out:
        process = subprocess.Popen(
            [*XIDSTREAM, *options(database, tmp_path, *more, sink=f"delta:{root}")],
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            env=environment(settings),
        )
        try:
            wait_until(lambda: rows("a") == 100 and rows("b") == 1, 240)
            n_asked = glue_server.n_requests
            database.execute("insert into a select i, 'later' from generate_series(101, 150) i")
            wait_until(lambda: rows("a") == 150, 120)
            wait_until(lambda: glue_server.n_requests > n_asked + 3, 120)
            glue_server.failing = False
            wait_until(lambda: entries() == ["public_a", "public_b"], 120)
            database.execute("alter table b add note text")
            database.execute("insert into b values (2, 2.5, 'wider')")

            def columns() -> list[str]:
                found = glue.get_table(DatabaseName="shop", Name="public_b")["Table"]
                return [column["Name"] for column in found["StorageDescriptor"]["Columns"]]

            wait_until(lambda: columns() == ["id", "balance", "note"], 120)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=120)
    said = log.read_text()
    assert process.returncode == 0, said
    assert said.count("glue:shop cannot list its tables") == 1, "told once, and tried again"
    assert "glue:shop: 2 tables, 2 of them new or changed, 0 removed" in said
    assert "Traceback" not in said
