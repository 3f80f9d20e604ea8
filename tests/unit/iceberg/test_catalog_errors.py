"""What a run makes of the errors of Glue's client and of REST's: tried again, or ended with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyiceberg.catalog.glue
import pyiceberg.exceptions
import pytest
from botocore.stub import Stubber
from pyiceberg.catalog.glue import GlueCatalog

from tests.unit.iceberg.test_iceberg_table import SLOT, ids, table_of, written
from xidstream.pipeline.errors import PreconditionMissing, SinkFailed, StorageFault
from xidstream.pipeline.findings import Status
from xidstream.pipeline.iceberg.catalog_errors import answering
from xidstream.pipeline.iceberg.catalogs import IcebergAddress
from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables
from xidstream.pipeline.sinks.sink import sink_type
from xidstream.pipeline.spark_errors import fault_of

BUSY = [("ThrottlingException", 400), ("InternalServiceException", 500), ("Whatever", 503)]
DENIED = [
    ("AccessDeniedException", 400),
    ("ExpiredTokenException", 400),
    ("UnrecognizedClientException", 400),
]


@pytest.fixture
def glue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The catalog ``prod`` is Glue's, at an address where nobody is, and asks once."""
    for name, value in {
        "TYPE": "glue",
        "GLUE__ENDPOINT": "http://127.0.0.1:9",
        "GLUE__REGION": "us-east-1",
        "WAREHOUSE": f"file://{tmp_path}",
    }.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__PROD__{name}", value)
    monkeypatch.setattr(pyiceberg.catalog.glue, "MAX_RETRIES", 0)  # no setting of the environment says so
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    return monkeypatch


def answered(tables: IcebergTables, operation: str, code: str, status: int) -> Stubber:
    """The next answer to ``operation``, by botocore's own stub of the client."""
    catalog = tables._catalog()
    assert isinstance(catalog, GlueCatalog)
    stubber = Stubber(catalog.glue)
    stubber.add_client_error(operation, code, "user hunter2 may not", status)
    stubber.activate()
    return stubber


@pytest.mark.parametrize(("code", "status"), BUSY)
def test_a_glue_that_has_too_much_to_do_is_asked_again_later(
    glue: pytest.MonkeyPatch, code: str, status: int
) -> None:
    tables = IcebergTables(IcebergAddress.parse("prod/shop"))
    with answered(tables, "get_table", code, status), pytest.raises(StorageFault, match=code) as error:
        tables.open("public__a", "public.a")
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(("code", "status"), DENIED)
def test_a_glue_that_lets_nobody_in_ends_the_run_with_a_remedy(
    glue: pytest.MonkeyPatch, code: str, status: int
) -> None:
    tables = IcebergTables(IcebergAddress.parse("prod/shop"))
    with answered(tables, "get_table", code, status), pytest.raises(PreconditionMissing) as error:
        tables.open("public__a", "public.a")
    assert f"{code} for GetTable" in error.value.message and "credentials" in error.value.remedy
    assert "hunter2" not in f"{error.value} {error.value.remedy}"


def test_what_glue_refuses_for_another_reason_stops_the_run_by_its_name(glue: pytest.MonkeyPatch) -> None:
    tables = IcebergTables(IcebergAddress.parse("prod/shop"))
    with answered(tables, "get_table", "InvalidInputException", 400), pytest.raises(Exception) as error:
        tables.open("public__a", "public.a")
    ours = fault_of(error.value, "writing Iceberg table public.a")
    assert ours.message == "writing Iceberg table public.a: InvalidInputException"


def test_a_commit_that_glue_throttles_is_done_again_by_the_next_attempt(
    glue: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The table is SQLite's, and its commits ask Glue first: the row is in it once."""
    tables = IcebergTables(IcebergAddress.parse("prod/shop"))
    table = table_of(tmp_path)
    of_sqlite = table.loaded.catalog.commit_table

    def throttled(*arguments: Any) -> Any:
        catalog = tables._catalog()
        assert isinstance(catalog, GlueCatalog)
        catalog.glue.get_table(DatabaseName="shop", Name="public__a")
        return of_sqlite(*arguments)

    with answered(tables, "get_table", "ThrottlingException", 400):
        glue.setattr(table.loaded.catalog, "commit_table", throttled)
        with pytest.raises(StorageFault, match="ThrottlingException"):
            table.commit(written(table, 100, 1), {SLOT: 100})
    again = table_of(tmp_path)
    again.commit(written(again, 100, 1), {SLOT: 100})
    assert ids(tmp_path) == [1]


def test_a_glue_that_is_not_there_is_a_fault_that_passes_and_no_credentials_are_not(
    glue: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(StorageFault, match="EndpointConnectionError"):
        IcebergTables(IcebergAddress.parse("prod/shop")).open("public__a", "public.a")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        glue.delenv(name, raising=False)
    glue.setenv("AWS_SHARED_CREDENTIALS_FILE", "/no/such/file")
    glue.setenv("AWS_CONFIG_FILE", "/no/such/file")
    glue.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(PreconditionMissing, match="NoCredentialsError"):
        IcebergTables(IcebergAddress.parse("prod/shop")).open("public__a", "public.a")
    (finding,) = sink_type("iceberg:prod/shop").check("")(None)
    assert finding.status is Status.FAILED and "does not let this run in" in finding.statement


@pytest.mark.parametrize("name", ["UnauthorizedError", "ForbiddenError", "OAuthError"])
def test_a_rest_catalog_that_lets_nobody_in_ends_the_run_with_a_remedy(name: str) -> None:
    with pytest.raises(PreconditionMissing, match=name), answering("iceberg:prod/shop"):
        raise getattr(pyiceberg.exceptions, name)("hunter2")


@pytest.mark.parametrize("name", ["RESTError", "BadRequestError"])
def test_a_rest_catalog_that_takes_a_request_for_invalid_is_said_to_know_why(name: str) -> None:
    with pytest.raises(SinkFailed, match=f"for invalid .{name}") as error, answering("iceberg:prod/shop"):
        raise getattr(pyiceberg.exceptions, name)("hunter2")
    assert "field ids" in error.value.remedy and "hunter2" not in str(error.value)


def test_a_table_that_is_not_there_and_a_lost_race_are_no_faults() -> None:
    for name in ("NoSuchTableError", "NoSuchNamespaceError", "CommitFailedException"):
        with pytest.raises(getattr(pyiceberg.exceptions, name)), answering("iceberg:prod/shop"):
            raise getattr(pyiceberg.exceptions, name)("it")
