"""A primary that dies under load, its standby promoted, and one run that goes on there."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from deltalake import DeltaTable

from tests.standbys import PHYSICAL_SLOT, standby_of
from tests.waiting import wait_until
from xidstream import ChangeStream
from xidstream.actors.cli.checks import create_slot_command
from xidstream.actors.demo.embedded_postgres import EmbeddedPostgres
from xidstream.pipeline.errors import ConnectionLost
from xidstream.pipeline.findings import Status
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.postgres.admin import current_flush_lsn, describe_slot
from xidstream.pipeline.postgres.opening import connect_slot, slot_settings
from xidstream.pipeline.postgres.preflight import server_findings
from xidstream.pipeline.settings.config import Config

pytestmark = pytest.mark.e2e


class Writer:
    """Commits one row after the other, with their numbers as ids, to whichever server can be written to."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self.n = 0
        self._thread.start()

    def _write(self) -> None:
        while not self._over.is_set():
            with suppress(psycopg.Error), psycopg.connect(self._dsn, autocommit=True) as session:
                while not self._over.is_set():
                    self.n += 1
                    session.execute("insert into t values (%s)", (self.n,))
                    time.sleep(0.01)
            time.sleep(0.05)

    def stop(self) -> None:
        self._over.set()
        self._thread.join(30)


def on(server: EmbeddedPostgres, *statements: str) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    with psycopg.connect(server.conninfo(), autocommit=True) as session:
        for statement in statements:
            cursor = session.execute(statement.encode())
            rows = cursor.fetchall() if cursor.description else []
    return rows


def advice(config: Config) -> list[str]:
    findings = server_findings(slot_settings(config))
    return [
        f.statement
        for f in findings
        if f.check in ("failover", "target_session_attrs") and f.status is not Status.OK
    ]


@pytest.mark.slow
def test_a_promotion_under_load_loses_nothing_repeats_nothing_and_needs_no_person(
    spark: Any, own_postgres: Callable[..., EmbeddedPostgres], tmp_path: Path
) -> None:
    """Committed, prepared and open transactions; the slot was made without failover, and the run turns it on."""
    primary = own_postgres()
    on(primary, "create table t (id int primary key)", "create publication p for table t")
    dsn = primary.conninfo()
    config = Config(
        dsn=dsn,
        slot="s",
        publication=("p",),
        storage=str(tmp_path / "segments"),
        two_phase=True,
        buffers_max=2,
        logical_decoding_work_mem="64kB",
        heartbeat_interval_s=0.2,
    )
    with standby_of(primary) as standby:
        # After the standby's beginning: else its copy is complete only when the slot has moved.
        create_slot_command(config)
        wait_until(
            lambda: on(primary, "select 1 from pg_replication_slots where slot_type = 'physical' and active")
        )
        (said,) = advice(config)
        assert "no failover slot" in said and PHYSICAL_SLOT in said
        hosts = f"{primary.socket_dir},{standby.socket_dir}"
        config = Config.of({**vars(config), "dsn": primary.conninfo(host=hosts), "failover": True})
        assert [a.split(":")[0] for a in advice(config)] == [
            "the dsn names several hosts, and the first that answers is taken, a standby as well",
            "slot s was made without failover; the run will turn it on for good",
            "synchronized_standby_slots is empty",
            f"standby {standby.socket_dir}",
        ]
        on(
            primary,
            f"alter system set synchronized_standby_slots = '{PHYSICAL_SLOT}'",
            "select pg_reload_conf()",
        )
        dsn = primary.conninfo(host=hosts, target_session_attrs="read-write")
        config = Config.of({**vars(config), "dsn": dsn})
        root = str(tmp_path / "delta")
        query = ChangeStream(config).toDelta(root).start(spark)
        writer = Writer(dsn)
        try:
            synced = "select 1 from pg_replication_slots where slot_name = 's' and synced and not temporary"
            wait_until(lambda: on(standby, synced))
            assert advice(config) == []
            with pytest.raises(ConnectionLost, match="after the promotion"):
                connect_slot(
                    slot_settings(Config.of({**vars(config), "dsn": standby.conninfo()})), create=False
                )
            on(primary, "begin; insert into t values (-1); prepare transaction 'early'")
            prepared_lsn = current_flush_lsn(primary.conninfo())
            wait_until(lambda: confirmed_on(standby) >= prepared_lsn)
            opened = psycopg.connect(primary.conninfo())
            opened.execute("insert into t select generate_series(-20000, -10000)")
            on(primary, "begin; insert into t values (-2); prepare transaction 'late'")
            primary.kill()
            wait_until(lambda: not primary.is_running)
            opened.close()
            on(standby, "select pg_promote()")
            promoted_s, n_written = time.monotonic(), writer.n
            wait_until(lambda: query.exception() or n_written + 10 < max(ids(root)))
            took_s = time.monotonic() - promoted_s
            on(standby, "commit prepared 'early'")
            with suppress(psycopg.errors.UndefinedObject):
                # It may not have reached the standby.
                on(standby, "commit prepared 'late'")
        finally:
            writer.stop()
        source = {row[0] for row in on(standby, "select id from t")}
        assert -1 in source and not source & set(range(-20000, -9999))
        wait_until(lambda: query.exception() or {max(source), -1} <= set(ids(root)))
        end_lsn = current_flush_lsn(standby.conninfo())
        wait_until(lambda: query.exception() or confirmed_on(standby) >= end_lsn)
        query.stop()
        print(f"the first rows behind the promotion were in the sink after {took_s:.1f} s")
        assert query.exception() is None
        assert Counter(ids(root)) == Counter(source)
        assert DeltaTable(f"{root}/_messages").version() == 0, "heartbeats make no commit"
        transactions = DeltaTable(f"{root}/_transactions").to_pyarrow_table()
        assert min(transactions["rows"].to_pylist()) == 1


def confirmed_on(server: EmbeddedPostgres) -> Lsn:
    return describe_slot(server.conninfo(), "s").confirmed_flush or INVALID_LSN


def ids(root: str) -> list[int]:
    found: list[int] = DeltaTable(f"{root}/public.t").to_pyarrow_table(columns=["id"])["id"].to_pylist()
    return found
