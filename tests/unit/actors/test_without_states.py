"""What needs more than a sink has is refused before anything is started: states, or a log in Delta tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from xidstream import Mirror
from xidstream.actors.cli.main import main
from xidstream.actors.cli.mirror import mirror_command
from xidstream.actors.cli.verify import verify_command
from xidstream.actors.runtime.signals import StopRequest
from xidstream.pipeline.errors import ConfigError, Unsupported
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.verify.settings import VerifySettings

SINK = "iceberg:/lake/shop"


def test_base_tables_are_not_made_from_iceberg_tables() -> None:
    with pytest.raises(ConfigError, match="change log of a Delta sink") as error:
        mirror_command(Config(sink=SINK), StopRequest())
    assert "delta:URI" in str(error.value.remedy)


def test_base_tables_are_refused_to_a_script_too(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="made from the change log of a Delta sink, not from iceberg:"):
        Mirror(f"iceberg:{tmp_path}/lake/shop")


def test_what_keeps_no_log_is_not_verified() -> None:
    with pytest.raises(ConfigError, match="the sink console keeps none") as error:
        verify_command(
            Config(sink="console"), StopRequest(), (), VerifySettings(), result=None, as_json=False
        )
    assert "delta:URI or iceberg:CATALOG/namespace" in str(error.value.remedy)


def test_keys_are_not_erased_from_iceberg_tables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options = [
            "--slot",
            "s",
            "--storage",
            "/segments",
            "--sink",
            SINK,
            "--table",
            "public.t",
            "--key",
            "id = 1",
        ]
        main(["erase", *options])
    assert ended.value.code == 2 and "change log of a Delta sink" in capsys.readouterr().err


def test_a_run_into_iceberg_tables_refreshes_no_base_tables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options = ["--dsn", "host=/nowhere", "--slot", "s", "--publication", "p", "--storage", "/segments"]
        main(["run", *options, "--sink", SINK, "--mirror-every", "1min"])
    assert ended.value.code == 2 and "mirror_every is for a Delta sink" in capsys.readouterr().err
