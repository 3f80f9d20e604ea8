"""A server that is set back to an older copy of its disk, and a Delta root that has more than it."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from deltalake import DeltaTable

from tests.postgres_fixtures import FAST
from tests.waiting import wait_until
from xidstream import ChangeStream
from xidstream.actors.cli.checks import create_slot_command, drop_slot_command
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.errors import SinkDiverged, SlotLost
from xidstream.pipeline.postgres.admin import describe_slot
from xidstream.pipeline.settings.config import Config

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


class Restored:
    """A server with a slot, of which a cold copy was taken; its rows go to a Delta root."""

    def __init__(self, server: EmbeddedPostgres, folder: Path, spark: Any) -> None:
        self.server, self.folder, self._spark = server, folder, spark
        self.root = folder / "delta"

    def config(self) -> Config:
        return Config(
            dsn=self.server.conninfo(),
            slot="s",
            publication=("p",),
            storage=str(self.folder / "segments"),
            buffers_max=2,
        )

    def execute(self, *statements: str) -> None:
        with psycopg.connect(self.server.conninfo(), autocommit=True) as session:
            for statement in statements:
                session.execute(statement.encode())

    def keep_server(self) -> None:
        """A cold copy."""
        self.server.stop()
        _copy(self.server.data_dir, self.server.data_dir.with_name("copy"))
        self.server.start()

    def keep_sink(self) -> None:
        _copy(self.folder, self.folder.with_name("later"))

    def set_back(self) -> None:
        """The server is as it was when it was copied; Delta root and storage are those of later."""
        self.server.stop()
        _copy(self.server.data_dir.with_name("copy"), self.server.data_dir)
        self.server.start()
        _copy(self.folder.with_name("later"), self.folder)
        self.root = self.folder / "delta"

    def run(self) -> None:
        stream = ChangeStream(self.config()).toDelta(str(self.root)).trigger(availableNow=True)
        query = stream.start(self._spark)
        assert query.awaitTermination(180), query.lastProgress

    def ids(self) -> list[int]:
        return sorted(DeltaTable(str(self.root / "public.t")).to_pyarrow_table()["id"].to_pylist())


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["rm", "-rf", target], check=True)
    subprocess.run(["cp", "-a", source, target], check=True)


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory, spark: Any) -> Iterator[Restored]:
    """Their server was copied after the first."""
    # Not below pytest's folder, to which the server's own account may lose its way.
    with (
        tempfile.TemporaryDirectory(prefix="xs-pg18-") as folder,
        EmbeddedPostgres(Path(folder) / "data", settings=FAST) as server,
    ):
        made = Restored(server, tmp_path_factory.mktemp("sink") / "now", spark)
        made.execute("create table t (id int primary key)", "create publication p for table t")
        create_slot_command(made.config())
        made.execute("insert into t values (1)")
        made.run()
        made.keep_server()
        made.execute("insert into t values (2)", "insert into t select generate_series(100, 400)")
        made.run()
        assert len(made.ids()) == 303
        made.keep_sink()
        yield made


@pytest.fixture
def restored(two_runs: Restored) -> Restored:
    """All as it was after the two runs, but for the server, which is as it was after the first."""
    two_runs.set_back()
    return two_runs


def test_after_a_restore_the_old_root_is_refused_and_another_one_gets_everything(restored: Restored) -> None:
    """By the remedy of docs/faults.md alone, all that committed below the old watermark was skipped and confirmed."""
    with pytest.raises(SlotLost, match="was restored"):
        restored.run()
    # The walsender of the run that ended needs a moment to notice.
    wait_until(lambda: not describe_slot(restored.server.conninfo(), "s").active)
    drop_slot_command(restored.config(), discard_journal=False)
    create_slot_command(restored.config())
    restored.execute("insert into t values (1000)")
    with pytest.raises(SinkDiverged, match="was restored") as refused:
        restored.run()
    assert str(restored.root) in refused.value.remedy
    restored.root = restored.folder / "another"
    restored.run()
    assert restored.ids() == [1000]


def test_a_server_set_back_whose_wal_has_grown_past_the_record_again_loses_nothing_silently(
    restored: Restored,
) -> None:
    """No position tells it, on the same timeline: its transactions were dropped as repetitions."""
    restored.execute(
        "insert into t values (1000)",
        *["select pg_switch_wal()", "insert into t values (1001)"],
        "checkpoint",
    )
    with pytest.raises(SinkDiverged, match=r"transaction \d+, with its commit at") as refused:
        restored.run()
    assert str(restored.root) in refused.value.remedy
    assert len(restored.ids()) == 303
