"""A slot into Iceberg tables, by the command line: the rows from before, large and small transactions, and a kill.

The Spark driver of the second run dies between the manifests of a commit and the catalog. Then a mirror makes base
tables of them, and the first one dies before the manifest names any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_command_line import NEWEST, ROWS, options, run, set_up
from tests.postgres_fixtures import Database
from xidstream import ChangeLog
from xidstream.pipeline import faultpoints
from xidstream.pipeline.iceberg.catalogs import FOLDER_CATALOG

pytestmark = [pytest.mark.e2e, pytest.mark.slow]  # it starts three runs


@NEWEST
def test_a_run_fills_iceberg_tables_that_anybody_reads_and_the_next_one_goes_on_over_a_kill(
    database: Database, tmp_path: Path
) -> None:
    from pyiceberg.catalog import load_catalog

    set_up(database)
    database.execute(ROWS.format(1, 1000))
    arguments = options(
        database,
        tmp_path,
        "--available-now",
        "--create-slot",
        "--logical-decoding-work-mem",
        "64kB",
        "--buffer-memory-bytes",
        "1MB",
        sink=f"iceberg:{tmp_path}/lake/shop",
    )
    first = run(*arguments)
    assert first.returncode == 0, first.stderr
    database.execute(ROWS.format(1001, 31_000))  # streamed, and spilled into segments
    database.execute("UPDATE t SET note = 'new' WHERE id = 7")
    database.execute("DELETE FROM t WHERE id = 8")
    # The first passage is the claim of the sink, the second the large transaction's commit.
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    faults = {faultpoints.VARIABLE: "iceberg_committing:kill@2", faultpoints.TOKENS_VARIABLE: str(tokens)}
    second = run(*arguments, env=faults)
    assert second.returncode == 0, second.stderr
    assert len(list(tokens.iterdir())) == 1, "it was killed"

    def read(table: str) -> list[dict[str, Any]]:
        catalog = load_catalog(FOLDER_CATALOG, type="sql", uri=f"sqlite:///{tmp_path}/lake/catalog.db")
        found: list[dict[str, Any]] = catalog.load_table(f"shop.{table}").scan().to_arrow().to_pylist()
        return found

    rows = sorted(read("public__t"), key=lambda row: (row["_commit_lsn"], row["_seq"]))
    changes: dict[str, list[int]] = {}
    for row in rows:
        changes.setdefault(row["_change_type"], []).append(row["id"])
    assert sorted(changes.pop("snapshot")) == list(range(1, 1001))
    assert changes == {"insert": list(range(1001, 31_001)), "update_postimage": [7], "delete": [8]}
    assert [row["rows"] for row in sorted(read("_transactions"), key=lambda row: row["commit_lsn"])] == [
        30_000,
        1,
        1,
    ]
    assert [(row["table"], row["state"]) for row in read("_snapshots")] == [("public.t", "finished")]
    linked = list((tmp_path / "lake/shop/public__t").glob("data-*-segments/*.parquet"))
    assert linked, "the large transaction was linked"
    log = ChangeLog(f"iceberg:{tmp_path}/lake/shop")
    oldest = log.oldest_lsn("public.t")
    assert oldest is not None and log.readable_lsn == log.last_commit_lsn > oldest > 0
    mirror = ["mirror", "--sink", f"iceberg:{tmp_path}/lake/shop"]
    died = run(*mirror, env={faultpoints.VARIABLE: "committing_manifest:kill"})
    assert died.returncode == -9, died.stderr
    again = run(*mirror)
    assert again.returncode == 0 and again.stdout.startswith("base tables: "), again.stderr
    catalog = load_catalog(FOLDER_CATALOG, type="sql", uri=f"sqlite:///{tmp_path}/lake/catalog.db")
    (line,) = catalog.load_table("shop_current._manifest").scan().to_arrow().to_pylist()
    base = catalog.load_table("shop_current.public__t").scan(snapshot_id=line["version"]).to_arrow()
    ours = sorted((row["id"], row["note"]) for row in base.select(["id", "note"]).to_pylist())
    assert line["lsn"] == log.last_commit_lsn and ours == database.execute(
        "SELECT id, note FROM t ORDER BY id"
    )
    checked = run("check", *arguments[1:])
    assert "the catalog of iceberg:" in checked.stdout + checked.stderr, checked.stdout + checked.stderr
    assert "hold this slot's transactions up to" in checked.stdout + checked.stderr
