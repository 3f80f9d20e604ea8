"""Which catalog the setting names, and that whoever only looks makes nothing. SQLite is the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.iceberg.test_iceberg_table import A, columns_of, opened
from xidstream.pipeline.errors import ConfigError, StorageFault, Unsupported
from xidstream.pipeline.exchange import SlotIdentity
from xidstream.pipeline.findings import Status
from xidstream.pipeline.iceberg.catalogs import FOLDER_CATALOG, IcebergAddress
from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables, table_name
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.sink_settings import DEFAULT_SETTINGS
from xidstream.pipeline.settings.slot_list import configs_of
from xidstream.pipeline.sinks.sink import check_sink_spec, make_root, sink_type


@pytest.fixture
def prod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A catalog that pyiceberg's own configuration names. Its address has a word that nobody may see."""
    monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path))
    (tmp_path / ".pyiceberg.yaml").write_text(
        f"catalog:\n  prod:\n    type: sql\n    uri: sqlite:///{tmp_path}/hunter2.db\n"
        f"    warehouse: file://{tmp_path}/warehouse\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("argument", "catalog", "namespace"),
    [
        ("/lake/shop", "/lake", "shop"),
        ("file:///lake/shop", "/lake", "shop"),
        ("/lake/a b/shop.eu", "/lake/a b", "shop.eu"),
        ("prod/shop", "prod", "shop"),
        ("prod/shop.eu", "prod", "shop.eu"),
    ],
)
def test_a_catalog_is_a_folder_or_a_name_and_the_namespace_stands_behind_the_last_slash(
    argument: str, catalog: str, namespace: str
) -> None:
    address = IcebergAddress.parse(argument)
    assert (address.catalog, address.namespace) == (catalog, namespace)
    assert address.is_folder is catalog.startswith("/")


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("shop", "names no catalog and namespace"),
        ("/shop", "names no catalog and namespace"),
        ("/lake/", "names no catalog and namespace"),
        ("/lake/a..b", "names no catalog and namespace"),
        ("prod/two/shop", "neither a folder nor the name"),
        ("s3://bucket/lake/shop", "can only be in a folder"),
        ("/la?ke/shop", r"cannot hold \? or #"),
        ("/la%ke/shop", "cannot hold %"),
    ],
)
def test_what_is_no_catalog_and_namespace_is_refused_with_a_remedy(argument: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        IcebergAddress.parse(argument)
    assert error.value.remedy


def test_a_setting_keeps_a_catalogs_name_and_makes_a_folder_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Config(sink="iceberg:./lake/shop").sink == f"iceberg:{tmp_path}/lake/shop"
    assert Config(sink="iceberg:prod/shop").sink == "iceberg:prod/shop"
    assert check_sink_spec("iceberg:prod/shop") == "iceberg:prod/shop"
    for sink in ("iceberg:prod/shop", "iceberg:./lake/shop"):
        with pytest.raises(ConfigError, match="the same sink"):
            configs_of({"slots": [{"slot": "a", "sink": sink}, {"slot": "b", "sink": sink}]}, {})


def test_a_folder_is_a_warehouse_with_a_catalog_of_its_own_that_others_open_by_name(tmp_path: Path) -> None:
    from pyiceberg.catalog import load_catalog

    tables = opened(tmp_path)
    tables.open_or_create(tables.key_of("public", "a"), "public.a", columns_of(A), tables.about(A))
    found = load_catalog(FOLDER_CATALOG, type="sql", uri=f"sqlite:///{tmp_path}/lake/catalog.db")
    assert found.list_tables("shop") == [("shop", "public__a")]
    assert found.load_table("shop.public__a").location() == f"file://{tmp_path}/lake/shop/public__a"


def test_whoever_only_looks_makes_nothing(tmp_path: Path) -> None:
    tables = IcebergTables(IcebergAddress.parse(f"{tmp_path}/lake/shop"))
    assert tables.open("public__a", "public.a") is None
    assert sink_type(f"iceberg:{tmp_path}/lake/shop").holds("slot") == (0, 0)
    (finding,) = sink_type(f"iceberg:{tmp_path}/lake/shop").check("")(None)[:1]
    assert finding.status is not Status.FAILED, finding
    told = sink_type(f"iceberg:{tmp_path}/lake/shop").check(f"{tmp_path}/segments")(None)
    assert "large transactions reach the Iceberg tables by hard links" in [each.statement for each in told]
    assert os.listdir(tmp_path) == []


def test_whoever_only_looks_at_a_configured_catalog_makes_no_table_in_its_database(prod: Path) -> None:
    (prod / "warehouse").mkdir()
    assert sink_type("iceberg:prod/shop").holds("slot") == (0, 0)
    found = sink_type("iceberg:prod/shop").check("")(None)
    assert found[0].status is Status.OK, found
    assert (prod / "hunter2.db").stat().st_size == 0


def test_a_configured_catalog_is_used_as_it_is_and_its_address_is_shown_nowhere(prod: Path) -> None:
    sink = sink_type("iceberg:prod/shop")
    assert sink.local_root() == f"{prod}/warehouse"
    make_root("iceberg:prod/shop")
    assert (prod / "warehouse").is_dir()
    assert sink.may_take_segments(f"{prod}/segments")
    tables = IcebergTables(IcebergAddress.parse("prod/shop"), makes=True)
    table = tables.open_or_create("public__a", "public.a", columns_of(A), tables.about(A))
    assert table.location.uri == f"{prod}/warehouse/shop/public__a"
    shown = f"{tables!r} {tables.root} {table.title} {table!r} {tables.address!r}"
    assert "hunter2" not in shown and "sqlite" not in shown


def test_a_catalog_that_does_not_answer_is_a_fault_that_is_tried_again_without_its_address(
    prod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__URI", "sqlite:////no/such/folder/hunter2.db")
    tables = IcebergTables(IcebergAddress.parse("prod/shop"))
    with pytest.raises(StorageFault, match="does not answer") as error:
        tables.open("public__a", "public.a")
    assert "hunter2" not in str(error.value)
    (finding,) = sink_type("iceberg:prod/shop").check("")(None)
    assert finding.status is Status.FAILED and "hunter2" not in str(finding)


@pytest.mark.parametrize(
    ("warehouse", "secret", "says"),
    [
        ("s3://lake/a%20b", "", r"warehouse of iceberg:prod/shop has a % in its path"),
        ("gs://bucket/lake", "", "in folders and in S3 alone"),
        ("s3://bucket/lake", "hunter2", "no credentials are sent"),
    ],
)
def test_a_warehouse_that_the_sink_cannot_write_to_is_refused_before_anything_is_started(
    prod: Path, monkeypatch: pytest.MonkeyPatch, warehouse: str, secret: str, says: str
) -> None:
    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__WAREHOUSE", warehouse)
    if secret:
        monkeypatch.setenv("PYICEBERG_CATALOG__PROD__S3__SECRET_ACCESS_KEY", secret)
    sink = sink_type("iceberg:prod/shop")
    with pytest.raises(Unsupported, match=says) as error:
        sink.make(SlotIdentity(7, "shop", "orders"), DEFAULT_SETTINGS)
    (finding,) = sink.check("")(None)
    assert finding.status is Status.FAILED and says in finding.statement
    assert "hunter2" not in f"{error.value} {error.value.remedy} {finding}"


def test_a_warehouse_in_s3_takes_segments_of_a_storage_in_s3(
    prod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__WAREHOUSE", "s3://bucket/lake")
    sink = sink_type("iceberg:prod/shop")
    assert sink.may_take_segments("s3://bucket/segments") and not sink.may_take_segments("/segments")
    assert sink.local_root() is None


def test_without_pyiceberg_the_extra_is_named() -> None:
    """In a process of its own, which cannot import it."""
    code = (
        "import sys; sys.modules['pyiceberg'] = None\n"
        "from xidstream.pipeline.sinks.sink import check_sink_spec\n"
        "check_sink_spec('delta:/tables')\n"
        "try: check_sink_spec('iceberg:/lake/shop')\n"
        "except Exception as error: print(type(error).__name__, error.remedy)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "ConfigError pip install 'xidstream[iceberg]'"


def test_a_catalog_that_nobody_configured_is_named_with_what_to_do(prod: Path) -> None:
    with pytest.raises(ConfigError, match="no catalog 'prd'") as error:
        sink_type("iceberg:prd/shop").local_root()
    assert sink_type("iceberg:prd/shop").may_take_segments("/segments"), "the driver may know it"
    assert "PYICEBERG_CATALOG__PRD__URI" in str(error.value.remedy)


def test_a_configuration_that_makes_no_catalog_is_told_without_its_values(
    prod: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYICEBERG_CATALOG__PROD__TYPE", "hunter2")
    with pytest.raises(ConfigError, match="makes no catalog") as error:
        IcebergTables(IcebergAddress.parse("prod/shop")).open("public__a", "public.a")
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (("public", "orders"), "public__orders"),
        (("public", "order lines"), "public__order~20lines"),
        (("a_b", "c_d"), "a_b__c_d"),
        (("a_", "b"), "a~5F__b"),
        (("a", "_b"), "a__~5Fb"),
        (("a__b", "c"), "a_~5Fb__c"),
        (("é", "T"), "~C3~A9__T"),
    ],
)
def test_a_tables_name_needs_no_quotes_where_its_sources_needs_none(
    source: tuple[str, str], name: str
) -> None:
    assert table_name(*source) == name


def test_no_two_tables_have_one_name() -> None:
    parts = ("a", "a_", "_a", "_", "__", "a__", "a_b", "a__b", "~5F", "a~5F")
    names = {table_name(schema, table) for schema in parts for table in parts}
    assert len(names) == len(parts) ** 2
    assert len(table_name("é" * 31, "é" * 31)) <= 255 and len(table_name("\U0001f600" * 15, "ж" * 31)) <= 255
