"""What reads states is refused for a sink whose log has none to read, before anything is started."""

from __future__ import annotations

import pytest

from xidstream.actors.cli.main import main
from xidstream.actors.cli.mirror import mirror_command
from xidstream.actors.cli.verify import verify_command
from xidstream.actors.runtime.signals import StopRequest
from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.verify.settings import VerifySettings

SINK = "iceberg:/lake/shop"


def test_base_tables_are_not_made_from_iceberg_tables() -> None:
    with pytest.raises(ConfigError, match="change log of a Delta sink") as error:
        mirror_command(Config(sink=SINK), StopRequest())
    assert "delta:URI" in str(error.value.remedy)


def test_iceberg_tables_are_not_verified() -> None:
    with pytest.raises(ConfigError, match="verify reads the change log of a Delta sink") as error:
        verify_command(Config(sink=SINK), StopRequest(), (), VerifySettings(), result=None, as_json=False)
    assert "delta:URI" in str(error.value.remedy)


def test_a_run_into_iceberg_tables_refreshes_no_base_tables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options = ["--dsn", "host=/nowhere", "--slot", "s", "--publication", "p", "--storage", "/segments"]
        main(["run", *options, "--sink", SINK, "--mirror-every", "1min"])
    assert ended.value.code == 2 and "mirror_every is for a Delta sink" in capsys.readouterr().err
