"""A run of this xidstream goes on where each released one has stopped: ``tests.release_state`` has what that left."""

from __future__ import annotations

import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tests.release_state import GID, RELEASES, Left, left
from xidstream import ChangeLog, Mirror
from xidstream.actors.demo.server_account import ServerAccount

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ARCHIVES = sorted(RELEASES.glob("*.tar.xz"))
TABLES = {"orders": "id, customer, note, amount", "customers": "id, name, mail"}


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def released(request: pytest.FixtureRequest) -> Iterator[Left]:
    # Not below pytest's folder, to which the server's own account may lose its way.
    with tempfile.TemporaryDirectory(prefix="xs-release-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with tarfile.open(request.param) as archive:
            archive.extractall(folder, filter="data")
        account = ServerAccount.choose()
        for path in [folder / "data", *(folder / "data").rglob("*")]:
            account.give(path)
            path.chmod(0o700 if path.is_dir() else 0o600)
        account.open_way_to(folder / "data")
        with left(folder) as state:
            yield state


def test_there_is_an_archive() -> None:
    assert ARCHIVES


@pytest.mark.timeout(400)
def test_a_run_delivers_what_a_released_one_had_in_its_journal_and_prepared_and_each_row_once(
    released: Left, spark: Any
) -> None:
    root = str(released.root)
    before = ChangeLog(root).last_commit_lsn
    assert released.execute("select gid from pg_prepared_xacts") == [(GID,)]
    released.execute(f"commit prepared '{GID}'")
    released.execute("insert into customers values (2000, 'new', null)")
    released.deliver()

    log = ChangeLog(root)
    kinds = Counter(row["note"] for row in log.changes(spark, "public.orders", since=before).collect())
    assert (kinds["captured"], kinds["prepared"]) == (100, 5000)
    told = DeltaTable(f"{root}/_transactions").to_pyarrow_table()
    assert told["gid"].to_pylist().count(GID) == 1
    Mirror(root).refresh(spark)
    for table, columns in TABLES.items():
        source = sorted(map(repr, released.execute(f"select {columns} from {table}")))
        base = DeltaTable(f"{root}/current/public.{table}").to_pyarrow_table()
        for found in (log.as_of(spark)[f"public.{table}"], spark.createDataFrame(base.to_pandas())):
            assert sorted(repr(tuple(row)) for row in found.select(*columns.split(", ")).collect()) == source
