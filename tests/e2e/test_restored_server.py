"""A server that is set back to an older copy of its disk, and a Delta root that has more than it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from deltalake import DeltaTable

from tests.waiting import wait_until
from xidstream import ChangeStream
from xidstream.actors.cli.checks import create_slot_command, drop_slot_command
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.config import Config
from xidstream.pipeline.errors import SinkDiverged, SlotLost
from xidstream.pipeline.slot.admin import describe_slot

pytestmark = pytest.mark.e2e


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

    def copy(self) -> None:
        self.server.stop()
        subprocess.run(["cp", "-a", self.server.data_dir, self.server.data_dir.with_name("copy")], check=True)
        self.server.start()

    def set_back(self) -> None:
        self.server.stop()
        subprocess.run(["rm", "-rf", self.server.data_dir], check=True)
        subprocess.run(["cp", "-a", self.server.data_dir.with_name("copy"), self.server.data_dir], check=True)
        self.server.start()

    def run(self) -> None:
        stream = ChangeStream(self.config()).toDelta(str(self.root)).trigger(availableNow=True)
        query = stream.start(self._spark)
        assert query.awaitTermination(180), query.lastProgress

    def ids(self) -> list[int]:
        return sorted(DeltaTable(str(self.root / "public.t")).to_pyarrow_table()["id"].to_pylist())


@pytest.fixture
def restored(own_postgres: Callable[..., EmbeddedPostgres], tmp_path: Path, spark: Any) -> Restored:
    made = Restored(own_postgres(), tmp_path, spark)
    made.execute("create table t (id int primary key)", "create publication p for table t")
    create_slot_command(made.config(), failover=False)
    made.execute("insert into t values (1)")
    made.run()
    made.copy()
    made.execute("insert into t values (2)", "insert into t select generate_series(100, 400)")
    made.run()
    assert len(made.ids()) == 303
    made.set_back()
    return made


def test_after_a_restore_the_old_root_is_refused_and_another_one_gets_everything(restored: Restored) -> None:
    """By the remedy of docs/faults.md alone, all that committed below the old watermark was skipped and confirmed."""
    with pytest.raises(SlotLost, match="was restored"):
        restored.run()
    # The walsender of the run that ended needs a moment to notice.
    wait_until(lambda: not describe_slot(restored.server.conninfo(), "s").active)
    drop_slot_command(restored.config())
    create_slot_command(restored.config(), failover=False)
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
