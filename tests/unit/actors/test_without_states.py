"""What needs more than a sink has is refused before anything is started: states, or a log in Delta tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from xidstream import ChangeLog, Mirror
from xidstream.actors.cli.main import main
from xidstream.actors.cli.mirror import mirror_command
from xidstream.actors.cli.verify import verify_command
from xidstream.actors.runtime.signals import StopRequest
from xidstream.pipeline.errors import ConfigError, Unsupported, UsageError
from xidstream.pipeline.iceberg.catalogs import IcebergAddress
from xidstream.pipeline.iceberg.iceberg_tables import IcebergTables
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.locations import TRANSACTIONS
from xidstream.pipeline.schema.rows import TRANSACTIONS_SCHEMA
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.verify.settings import VerifySettings

SINK = "iceberg:/lake/shop"


def test_base_tables_are_not_made_from_what_keeps_no_log() -> None:
    with pytest.raises(ConfigError, match="change log of a Delta or Iceberg sink") as error:
        mirror_command(Config(sink="console"), StopRequest())
    assert "iceberg:CATALOG/namespace" in str(error.value.remedy)


def test_a_mirror_of_iceberg_tables_that_are_not_there_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no change log at iceberg:"):
        Mirror(f"iceberg:{tmp_path}/lake/shop").refresh(None)  # type: ignore[arg-type]


def test_what_keeps_no_log_is_not_verified() -> None:
    with pytest.raises(ConfigError, match="the sink console keeps none") as error:
        verify_command(
            Config(sink="console"), StopRequest(), (), VerifySettings(), result=None, as_json=False
        )
    assert "delta:URI or iceberg:CATALOG/namespace" in str(error.value.remedy)


def test_keys_are_not_erased_from_what_keeps_no_log(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options = [
            "--slot",
            "s",
            "--storage",
            "/segments",
            "--sink",
            "console",
            "--table",
            "public.t",
            "--key",
            "id = 1",
        ]
        main(["erase", *options])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and "the sink console keeps none" in told and "iceberg:CATALOG" in told


def test_a_log_in_iceberg_tables_is_shortened_by_age_size_or_base_tables() -> None:
    for text in ("base", "public.a=base, 30d", "public.a=100 GB, 30d"):
        Config(sink=SINK, log_retention=text)


def test_consumers_of_iceberg_tables_are_told_to_keep_their_own_place(tmp_path: Path) -> None:
    log = _log(tmp_path)
    for ask in (lambda: log.consumer("billing"), log.consumers):
        with pytest.raises(
            Unsupported, match="positions of consumers need a change log in Delta tables"
        ) as error:
            ask()
        assert "changes(since=LSN)" in error.value.remedy


def _log(root: Path) -> ChangeLog:
    """Of a slot that has written nothing but its tables."""
    address = IcebergAddress.parse(f"{root}/lake/shop")
    tables = IcebergTables(address, makes=True)
    columns = [TableColumn(field.name, field.type, field.name) for field in TRANSACTIONS_SCHEMA]
    about = tables.about_own(TRANSACTIONS)
    tables.open_or_create(TRANSACTIONS, TRANSACTIONS, columns, about).commit(
        [], {"7/shop/s": 100}, marks={"7/shop/s/owner": 1}
    )
    return ChangeLog(f"iceberg:{address.argument}")


def test_a_run_that_keeps_no_log_refreshes_no_base_tables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options = ["--dsn", "host=/nowhere", "--slot", "s", "--publication", "p", "--storage", "/segments"]
        main(["run", *options, "--sink", "console", "--mirror-every", "1min"])
    assert ended.value.code == 2 and "mirror_every is for a Delta or Iceberg sink" in capsys.readouterr().err
