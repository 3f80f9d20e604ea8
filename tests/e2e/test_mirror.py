"""Base tables beside a stream: no reader ever sees two moments, whatever ends a refresh in the middle."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tests import transfers
from tests.e2e.conftest import Pipeline
from tests.e2e.test_command_line import XIDSTREAM, environment, options
from tests.postgres_fixtures import Database
from tests.processes import living_below
from tests.waiting import wait_until
from xidstream import ChangeStream, Mirror
from xidstream.pipeline import faultpoints
from xidstream.pipeline.faultpoints import FaultPlan
from xidstream.pipeline.pg import Lsn

pytestmark = pytest.mark.e2e

PAGE = Path(__file__).parents[2] / "docs" / "mirror.md"
FAULTS = "writing_base:error@3,base_written:error@6,base_committed:error@4,committing_manifest:error@3"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_transfers_are_never_torn_in_the_manifests_moments_nor_in_as_of_while_refreshes_fail(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.database.execute(transfers.SCHEMA)
    config = pipeline.config(snapshot="initial")
    pipeline.query = ChangeStream(config).toDelta(str(pipeline.delta)).start(pipeline.spark)
    pipeline.wait_until(
        lambda: not transfers.has_no_snapshots(pipeline.delta) and transfers.is_known(pipeline.delta)
    )
    clients = transfers.Clients(pipeline.database.connect, pause_s=0.5)
    plan = FaultPlan(FAULTS, None)
    monkeypatch.setattr(faultpoints, "_plan", plan)
    mirror = Mirror(str(pipeline.delta), file_bytes=16 << 10)
    mirror.start(pipeline.spark, every="1s")
    try:
        sums: Counter[int] = Counter()
        lsns: set[int] = set()
        pipeline.wait_until(lambda: transfers.manifest_sum(pipeline.delta) is not None)
        while len(plan._struck) < 4 or sum(sums.values()) < 20 or len(lsns) < 4:
            assert mirror.exception() is None
            for found in (
                transfers.manifest_sum(pipeline.delta),
                transfers.as_of_sum(pipeline.delta, pipeline.spark) if sum(sums.values()) % 8 == 0 else None,
            ):
                if found is not None:
                    lsns.add(found[0])
                    sums[found[1]] += 1
            time.sleep(0.1)
        assert sums == {transfers.TOTAL: sum(sums.values())}
    finally:
        mirror.stop()
        clients.stop()
    monkeypatch.setattr(faultpoints, "_plan", None)
    (lsn,) = pipeline.database.execute("select pg_current_wal_insert_lsn()::text")[0]
    pipeline.database.execute("select pg_logical_emit_message(true, 'x', '')")
    pipeline.wait_until(
        lambda: Lsn.parse(pipeline.query.lastProgress["deliveredLsn"] or "0/0") > Lsn.parse(lsn)
    )
    pipeline.query.stop()
    Mirror(str(pipeline.delta)).refresh(pipeline.spark)
    for table in ("a", "b"):
        rows = DeltaTable(str(pipeline.delta / "current" / f"public.{table}")).to_pyarrow_table().to_pylist()
        held = pipeline.database.execute(f"select id, balance, note from {table}")
        assert sorted((row["id"], row["balance"], row["note"]) for row in rows) == sorted(held), lsn
    check_examples(str(pipeline.delta), pipeline.spark)


def moments(root: Path) -> list[int]:
    folder = root / "current" / "_manifest"
    if not DeltaTable.is_deltatable(str(folder)):
        return []
    return sorted(set(DeltaTable(str(folder)).to_pyarrow_table()["lsn"].to_pylist()))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("postgres_server", [18], indirect=True)
def test_a_run_refreshes_beside_its_sink_and_the_command_goes_on_where_a_killed_run_stopped(
    database: Database, tmp_path: Path
) -> None:
    database.execute(transfers.SCHEMA)
    root, quiet = tmp_path / "delta", {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    begun = [*options(database, tmp_path, "--create-slot", "--snapshot", "initial", "--mirror-every", "1s")]
    run = subprocess.Popen([*XIDSTREAM, *begun], env=environment(), start_new_session=True, **quiet)  # type: ignore[call-overload]
    clients = None
    try:
        wait_until(lambda: run.poll() is not None or not transfers.has_no_snapshots(root), 120)
        clients = transfers.Clients(database.connect, pause_s=0.5)
        wait_until(lambda: run.poll() is not None or len(moments(root)) > 2, 120)
        assert transfers.manifest_sum(root) == (moments(root)[-1], transfers.TOTAL)
    finally:
        if clients is not None:
            clients.stop()
        run.kill()
        run.communicate()
    last = moments(root)[-1]
    command = [*XIDSTREAM, "mirror", "--sink", f"delta:{root}", "--vacuum", "--every", "1s"]
    mirror = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert mirror.stdout is not None
        told = mirror.stdout.readline()
        assert told.startswith("base tables: "), (told, mirror.stderr)
        assert not living_below(mirror.pid), "small tables need no Spark, and so no Ray"
    finally:
        mirror.send_signal(signal.SIGTERM)
        _, said = mirror.communicate(timeout=60)
    assert mirror.returncode == 0, said
    assert moments(root)[-1] >= last
    assert transfers.manifest_sum(root) == (moments(root)[-1], transfers.TOTAL)


def check_examples(uri: str, spark: Any) -> None:
    """The examples of docs/mirror.md, as they stand there."""
    found = dict(re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    assert set(found) == {"pandas", "duckdb", "spark"}
    results: dict[str, dict[str, Any]] = {}
    for name, code in found.items():
        results[name] = {"uri": uri, "spark": spark}
        exec(compile(code, f"{PAGE.name}: {name}", "exec"), results[name])
    tables = results["pandas"]["tables"]
    assert sum(int(tables[name].balance.sum()) for name in tables) == transfers.TOTAL
    assert results["duckdb"]["total"].fetchone()[0] == transfers.TOTAL
    assert results["spark"]["total"].first()[0] == transfers.TOTAL
