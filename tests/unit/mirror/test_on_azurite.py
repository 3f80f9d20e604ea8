"""Change log and base tables in Azurite: on Azure's API, what moto's S3 says nothing of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import CommitProperties

from tests.azurite import Azurite, azurite, program
from tests.spark.change_log_maker import INT8, TEXT, LogMaker, as_rows, keyed
from tests.spark.support import LocalSegments, batch_of, memory_frame, put_memory, read_memory
from tests.unit.mirror.bases import SLOT, PlainMirror, table_of
from tests.unit.mirror.test_on_s3 import (
    AT_ONCE,
    HOUR,
    base_tables,
    files_below,
    lines_of,
    no_session,
    rows_at,
)
from xidstream.pipeline.changelog.delta_bases import DeltaBases, current
from xidstream.pipeline.changelog.manifest import read_lines
from xidstream.pipeline.errors import Superseded
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.mirror import vacuum as vacuums
from xidstream.pipeline.mirror.refresh import Answer
from xidstream.pipeline.mirror.vacuum import vacuum
from xidstream.pipeline.schema.rows import UPDATE_POSTIMAGE
from xidstream.pipeline.spark.frames import SinkBatch

pytestmark = pytest.mark.skipif(
    program() is None, reason="Azurite is not here: npm install azurite, and XIDSTREAM_AZURITE=…/azurite-blob"
)
TABLES = [keyed(f"t{i}", {"id": INT8, "name": TEXT}, "id", relid=i) for i in range(10)]
FIRST = TABLES[0]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    path = program()
    assert path is not None
    with azurite(path, tmp_path_factory.mktemp("azurite")) as made:
        yield made


@pytest.fixture
def root(store: Azurite, request: pytest.FixtureRequest) -> Location:
    return Location.parse(f"{store.uri}/{abs(hash(request.node.name))}", store.options)


@pytest.fixture
def log(root: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LogMaker]:
    segments = LocalSegments(str(tmp_path / "segments"))

    def make_batch(*units: Any, number: int = 0) -> SinkBatch:
        batch = batch_of(units, segments, number)
        return SinkBatch(batch, no_session, memory_frame, segments, read_memory, put_memory, segments.storage)

    # Snapshots take no credentials from the options, and so from the environment, as each node has them.
    plain = dict(root.storage_options or {})
    for name in [name for name in plain if name.startswith("AZURE_")]:
        monkeypatch.setenv(name, plain.pop(name))
    maker = LogMaker(root.uri, None, make_batch, storage_options=plain)
    yield maker
    maker.sink.close()


def kinds(asked: list[str]) -> Counter[str]:
    """How many requests Azure bills as writes and lists, and how many as reads."""
    dear = [what for what in asked if what.startswith("PUT") or "comp=list" in what]
    return Counter(
        dear=len(dear), cheap=len([what for what in asked if not what.startswith("DELETE")]) - len(dear)
    )


def test_a_log_and_base_tables_are_written_swapped_and_named_as_in_a_folder(
    store: Azurite, root: Location, log: LogMaker
) -> None:
    for table in TABLES:
        log.snapshot(table, [{"id": i, "name": f"name {i}" * 9} for i in range(500)])
    for i in range(3):  # the first one opens the tables
        store.asked()
        log.insert(FIRST, {"id": 5_000 + i, "name": "x"})
    print("a commit of one table:", kinds(store.asked()))
    tables = base_tables(root)
    refreshed = tables.refresh(no_session)
    assert refreshed is not None and [each.answer for each in refreshed.tables] == [Answer.BUILD] * 10
    log.tables["public.t0"][70]["name"] = "new"
    log.commit((FIRST, [{"id": 70, "name": "new", "_change": UPDATE_POSTIMAGE}]))
    store.asked()
    refreshed = tables.refresh(no_session)
    print("a refresh of one row, ten tables:", kinds(store.asked()))
    assert refreshed is not None
    assert [each.answer for each in refreshed.tables] == [Answer.SWAP] + [Answer.KEEP] * 9
    tables.refresh(no_session)
    store.asked()
    assert tables.refresh(no_session) is None
    print("a look that finds nothing:", kinds(store.asked()))
    for line in lines_of(root):
        assert as_rows(rows_at(root, line)) == log.states[line.lsn][line.table], (line.table, line.lsn)


def test_of_two_commits_of_one_version_one_is_refused(root: Location) -> None:
    mirror = PlainMirror(root)
    mirror.refresh(10)
    table = table_of(root)
    behind = DeltaTable(
        table.table_uri, version=table.version() - 1, storage_options=dict(root.storage_options or {})
    )
    with pytest.raises(CommitFailedError):
        behind.create_write_transaction(
            [], "append", behind.schema(), commit_properties=CommitProperties(max_commit_retries=0)
        )
    second = PlainMirror(root)
    second.refresh(20)
    with pytest.raises(Superseded):
        mirror.refresh(30)
    assert {line.lsn for line in read_lines(DeltaBases(root))} == {10, 20}


def test_a_vacuum_takes_what_no_named_version_needs(root: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = PlainMirror(root)
    for lsn in (10, 20, 30, 40):
        mirror.refresh(lsn)
    with current(root).create("public.a/net-x/00000.parquet") as file:
        pq.write_table(pa.table({"n": [1]}), file)
    assert vacuum(root, SLOT, mirror.manifest, AT_ONCE).n_files == 0
    monkeypatch.setattr(vacuums, "GRACE", -HOUR)
    assert vacuum(root, SLOT, mirror.manifest, AT_ONCE).n_files == 3
    assert len(files_below(root)) == len(table_of(root).file_uris())
    assert [line.lsn for line in read_lines(DeltaBases(root))] == [40]
    mirror.refresh(50)
