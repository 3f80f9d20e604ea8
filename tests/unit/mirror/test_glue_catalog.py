"""Base tables in moto's Glue, which is in another process, as its S3 is: by a mirror, from the log to the entry."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber
from deltalake import DeltaTable
from moto import mock_aws

from tests.spark.change_log_maker import INT8, TEXT, LogMaker, keyed
from tests.unit.delta.test_small_files import s3 as s3
from tests.unit.mirror.test_on_s3 import log as log
from tests.unit.mirror.test_on_s3 import no_session
from tests.unit.mirror.test_on_s3 import root as root
from xidstream.actors.mirror import Mirror, MirrorLoop, _register_of
from xidstream.pipeline.errors import (
    ConfigError,
    PreconditionMissing,
    StorageFault,
    Unsupported,
    XidstreamError,
)
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.mirror.base_table import LEFT_OUT
from xidstream.pipeline.mirror.base_tables import BaseTables
from xidstream.pipeline.mirror.catalog import SLOT, CatalogTable, Registered
from xidstream.pipeline.mirror.glue_catalog import GlueCatalog, check_usable
from xidstream.pipeline.settings.catalog_names import CatalogName

SHOP = CatalogName("glue", "shop")
A = keyed("a", {"id": INT8, "name": TEXT}, "id", relid=1)
WIDER = keyed("a", {"id": INT8, "name": TEXT, "note": TEXT}, "id", relid=1)
B = keyed("Odd name", {"id": INT8, "balance": INT8}, "id", relid=2)


@pytest.fixture
def glue(root: Location, monkeypatch: pytest.MonkeyPatch) -> Any:
    assert root.storage_options is not None
    endpoint = root.storage_options["AWS_ENDPOINT_URL"]
    monkeypatch.setenv("AWS_ENDPOINT_URL_GLUE", endpoint)
    return boto3.client("glue", region_name="us-east-1", endpoint_url=endpoint)


def entries(glue: Any) -> dict[str, Any]:
    return {table["Name"]: table for table in glue.get_tables(DatabaseName="shop")["TableList"]}


def tables_of(root: Location) -> BaseTables:
    return BaseTables(root.uri, None, 1 << 20, root.storage_options, SHOP)


def test_a_refresh_registers_delta_tables_as_athena_and_trino_look_for_them(
    root: Location, log: LogMaker, glue: Any
) -> None:
    glue.create_database(DatabaseInput={"Name": "shop"})
    log.snapshot(A, [{"id": 1, "name": "x"}])
    log.snapshot(B, [{"id": 1, "balance": 5}])
    log.insert(A, {"id": 2, "name": "y"})
    tables = tables_of(root)
    assert tables.register() == Registered(), "nothing was refreshed yet"
    assert tables.refresh(no_session) is not None
    assert tables.register() == Registered(2, 2, 0)
    found = entries(glue)
    assert [name.rpartition("_")[0] for name in sorted(found)] == ["public", "public_odd_name"]
    entry = found["public_a"]
    uri = f"{root.uri}/current/public.a"
    stored = entry["StorageDescriptor"]
    assert (entry["TableType"], stored["Location"]) == ("EXTERNAL_TABLE", uri)
    assert stored["SerdeInfo"]["Parameters"]["path"] == uri
    assert entry["Parameters"]["table_type"] == "DELTA"
    assert entry["Parameters"]["spark.sql.sources.provider"] == "delta"
    assert [(c["Name"], c["Type"], c["Comment"]) for c in stored["Columns"]] == [
        ("id", "bigint", "bigint, key"),
        ("name", "string", "text"),
    ]
    # Whoever follows the entry finds the rows.
    rows = DeltaTable(stored["Location"], storage_options=root.storage_options).to_pyarrow_table().to_pylist()
    assert sorted(row["id"] for row in rows) == [1, 2]

    log.insert(A, {"id": 3, "name": "z"})
    assert tables.refresh(no_session) is not None
    assert tables.register() == Registered(2, 0, 0)
    assert tables_of(root).register() == Registered()
    other = tables_of(root)
    assert other.refresh(no_session) is None, (
        "there is nothing new, and the catalog is looked at all the same"
    )
    assert other.register() == Registered(2, 0, 0)
    log.insert(WIDER, {"id": 4, "name": "z", "note": "new"})
    assert other.refresh(no_session) is not None
    assert other.register() == Registered(2, 1, 0)
    columns = entries(glue)["public_a"]["StorageDescriptor"]["Columns"]
    assert [column["Name"] for column in columns] == ["id", "name", "note"]


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Glue in this process, for what needs no table."""
    monkeypatch.delenv("AWS_ENDPOINT_URL_GLUE", raising=False)
    mock = mock_aws()
    # What other tests of this process have in moto's servers stays: these share moto's memory.
    mock.start(reset=False)
    client = boto3.client("glue", region_name="us-east-1")
    yield client
    for database in client.get_databases()["DatabaseList"]:
        client.delete_database(Name=database["Name"])
    mock.stop(remove_data=False)


PLACE = Location("s3://bucket/shop", {"AWS_REGION": "us-east-1"})
ENTRY = CatalogTable("t", "s3://bucket/shop/current/t", "rows", (), {})


def test_an_entry_that_somebody_made_since_the_listing_is_not_overwritten(near: Any) -> None:
    near.create_database(DatabaseInput={"Name": "shop"})
    catalog = GlueCatalog(SHOP, PLACE)
    near.create_table(DatabaseName="shop", TableInput={"Name": "t", "Description": "theirs"})
    with pytest.raises(StorageFault, match="cannot register t: AlreadyExistsException"):
        catalog.put(ENTRY, instead_of=None)
    assert entries(near)["t"]["Description"] == "theirs"
    assert [table.comment for table in catalog.tables()] == ["theirs"], (
        "an entry with next to nothing is read"
    )


def test_an_entry_that_somebody_put_in_the_place_of_ours_is_neither_changed_nor_removed(near: Any) -> None:
    """The listing may be ten minutes old."""
    near.create_database(DatabaseInput={"Name": "shop"})
    catalog = GlueCatalog(SHOP, PLACE)
    ours = dataclasses.replace(ENTRY, properties={SLOT: "7/db/slot"})
    catalog.put(ours, instead_of=None)
    near.delete_table(DatabaseName="shop", Name="t")
    near.create_table(
        DatabaseName="shop",
        TableInput={"Name": "t", "Description": "theirs", "StorageDescriptor": {"Location": ours.uri}},
    )
    for change in (lambda: catalog.put(ours, instead_of=ours), lambda: catalog.remove(ours)):
        with pytest.raises(StorageFault, match="t is another's entry by now, and is left as it is"):
            change()
        assert entries(near)["t"]["Description"] == "theirs"


def test_parameters_that_somebody_added_to_an_entry_of_ours_stay_when_it_changes(near: Any) -> None:
    near.create_database(DatabaseInput={"Name": "shop"})
    catalog = GlueCatalog(SHOP, PLACE)
    ours = dataclasses.replace(ENTRY, properties={SLOT: "7/db/slot", LEFT_OUT: "{}"})
    catalog.put(ours, instead_of=None)
    parameters = {**entries(near)["t"]["Parameters"], "team": "sales", "table_type": "EXTERNAL_TABLE"}
    near.update_table(
        DatabaseName="shop",
        TableInput={"Name": "t", "Parameters": parameters, "StorageDescriptor": {"Location": ours.uri}},
    )
    wanted = dataclasses.replace(ours, comment="refreshed again", properties={SLOT: "7/db/slot"})
    catalog.put(wanted, instead_of=ours)
    assert catalog.tables() == [wanted]
    changed = entries(near)["t"]["Parameters"]
    assert (changed["team"], changed["table_type"]) == ("sales", "DELTA")


def test_what_is_gone_already_is_removed_and_what_was_removed_is_made_again(near: Any) -> None:
    near.create_database(DatabaseInput={"Name": "shop"})
    catalog = GlueCatalog(SHOP, PLACE)
    catalog.remove(ENTRY)
    catalog.put(ENTRY, instead_of=ENTRY)
    assert catalog.tables() == [ENTRY]
    catalog.remove(ENTRY)
    assert catalog.tables() == []


def test_a_database_that_is_not_there_and_a_service_that_fails_are_told_apart(near: Any) -> None:
    with pytest.raises(
        PreconditionMissing, match="cannot list its tables: there is no such database"
    ) as missing:
        GlueCatalog(SHOP, PLACE).tables()
    assert "aws glue create-database --database-input Name=shop" in missing.value.remedy
    catalog = GlueCatalog(SHOP, PLACE)
    with Stubber(catalog._client) as stub:
        stub.add_client_error("get_table", "ThrottlingException")
        with pytest.raises(StorageFault, match="glue:shop cannot register t: ThrottlingException"):
            catalog.put(ENTRY, instead_of=ENTRY)
        stub.add_client_error("create_table", "ValidationException")
        with pytest.raises(Unsupported, match="glue:shop takes no such table: ValidationException"):
            catalog.put(ENTRY, instead_of=None)
        found = {"Name": "t", "StorageDescriptor": {"Location": ENTRY.uri}}
        stub.add_response("get_table", {"Table": found})
        stub.add_client_error("delete_table", "AccessDeniedException")
        with pytest.raises(StorageFault, match="glue:shop cannot remove t: AccessDeniedException"):
            catalog.remove(ENTRY)


class Told:
    """Base tables whose catalog gives these answers, one after the other."""

    catalog = "glue:shop"

    def __init__(self, *answers: Registered | XidstreamError) -> None:
        self.answers = list(answers)

    def register(self, is_cancelled: Any) -> Registered:
        answer = self.answers.pop(0)
        if isinstance(answer, XidstreamError):
            raise answer
        return answer


def test_what_is_wrong_with_a_catalog_is_told_once_as_long_as_it_stays_the_same() -> None:
    away, refused = (
        StorageFault("it is away", remedy="wait"),
        Registered(2, 0, 0, {"public.a": "its name is taken"}),
    )
    tables: Any = Told(away, away, Registered(3, 2, 1), away, refused, refused, Registered(3))
    told: list[tuple[str, bool]] = []
    register = _register_of(tables, lambda text, is_fault: told.append((text, is_fault)))
    assert register is not None
    while tables.answers:
        register.now()
    first = ("it is away (wait); the next refresh tries again", True)
    assert told == [
        first,
        ("glue:shop: 3 tables, 2 of them new or changed, 1 removed", False),
        first,
        ("some base tables are not registered\n  not in glue:shop: public.a: its name is taken", True),
    ]


class Hangs:
    """Base tables whose catalog does not answer."""

    catalog = "glue:shop"

    def __init__(self) -> None:
        self.n_refreshes = 0
        self.n_registers = 0
        self.may_answer = threading.Event()
        self.refreshed = threading.Semaphore(0)

    def refresh(self, *whatever: Any) -> None:
        self.n_refreshes += 1
        self.refreshed.release()

    def register(self, is_cancelled: Any) -> Registered:
        self.n_registers += 1
        assert self.may_answer.wait(60)
        return Registered()


@pytest.fixture
def hanging() -> Iterator[Hangs]:
    tables = Hangs()
    yield tables
    tables.may_answer.set()


def test_refreshes_go_on_while_the_catalog_does_not_answer(hanging: Any) -> None:
    class Session:
        get = None

        def cancel_jobs(self) -> None:
            pass

    register = _register_of(hanging, lambda text, is_fault: None)
    loop = MirrorLoop(hanging, Session(), every_s=0.01, register=register)  # type: ignore[arg-type]
    thread = threading.Thread(target=loop.run)
    thread.start()
    for _ in range(20):
        assert hanging.refreshed.acquire(timeout=60)
    loop.stop()
    thread.join(60)
    assert not thread.is_alive() and loop.failure is None
    assert hanging.n_registers == 1


def test_in_python_a_refresh_registers_and_a_failure_is_a_warning(
    root: Location, log: LogMaker, glue: Any
) -> None:
    log.snapshot(A, [{"id": 1, "name": "x"}])
    log.insert(A, {"id": 2, "name": "y"})
    mirror = Mirror(root.uri, storage_options=root.storage_options, catalog="glue:shop")
    spark: Any = None
    with pytest.warns(RuntimeWarning, match="there is no such database"):
        assert mirror.refresh(spark) is not None
    glue.create_database(DatabaseInput={"Name": "shop"})
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert mirror.refresh(spark) is None
    assert set(entries(glue)) == {"public_a"}


def test_glue_is_for_tables_in_s3_and_needs_boto3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="glue:shop is for tables in S3"):
        check_usable(SHOP, Location.parse(str(tmp_path)))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs boto3"):
        check_usable(SHOP, Location.parse("s3://bucket/shop"))
