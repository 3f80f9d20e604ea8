"""examples/auto_cdc.py, as a person runs it: ``spark-pipelines`` over a log that the real sink wrote.

AUTO CDC writes by MERGE, and neither Iceberg nor Delta has a jar for Spark 4.3 on a package index. So the targets are
tables of a catalog of our own (row_level/RowLevelCatalog.java), which Janino compiles, the compiler among Spark's jars.
The expected rows are the source's, and the expected histories are folded here from the changes that the source made.

Spark has AUTO CDC from 4.3 on: with an older one the file is skipped. ``make test-spark43`` runs it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import runpy
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.spark.change_log_maker import INT8, TEXT, LogMaker, Row, keyed, random_value
from xidstream.actors.runtime.spark_version import spark_version
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.schema.rows import DELETE, INSERT, TRUNCATE, UPDATE_POSTIMAGE, UPDATE_PREIMAGE

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(
        (spark_version().major, spark_version().minor) < (4, 3), reason="Spark has AUTO CDC from 4.3 on"
    ),
]

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
PAGE = REPOSITORY / "docs" / "spark-source.md"
ORDERS = keyed("orders", {"id": INT8, "note": TEXT}, "id", relid=1)
# PostgreSQL marks every column as a key's under REPLICA IDENTITY FULL.
ITEMS = RelationVersion(
    2,
    "public",
    "items",
    ReplicaIdentity.FULL,
    (Column("id", INT8, -1, True), Column("name", TEXT, -1, True), Column("size", INT8, -1, True)),
)
TABLES = {"public.orders": ["id"], "public.items": ["id"]}
TRUNCATED = "spark.cdc.truncated"
"""The one setting that the page's spec does not have."""
N_KEYS = 12
Place = tuple[int, int]
"""(commit LSN, seq)"""


@dataclass
class RecordingMaker(LogMaker):
    """``changes``: table → each change's place and row, in order."""

    changes: dict[str, list[tuple[Place, Row]]] = field(default_factory=dict)

    def commit(self, *changes: tuple[RelationVersion, Sequence[Row]], **more: Any) -> int:
        lsn = super().commit(*changes, **more)
        seq = itertools.count()
        for relation, rows in changes:
            self.changes.setdefault(relation.name, []).extend(((lsn, next(seq)), row) for row in rows)
        return lsn

    def commit_to_both(self, dice: random.Random) -> None:
        """Some changes in both tables; a row of ``items`` may change several times."""
        items = [row for _ in range(dice.randint(1, 5)) for row in self._change_of_item(dice)]
        orders = [row for _ in range(dice.randint(1, 5)) for row in self._random_change(dice, ORDERS, N_KEYS)]
        self.commit(*[(t, rows) for t, rows in ((ITEMS, items), (ORDERS, orders)) if rows])

    def _change_of_item(self, dice: random.Random) -> list[Row]:
        held = self.tables[ITEMS.name]
        new = {c.name: random_value(dice, c, N_KEYS) for c in ITEMS.columns}
        kind = dice.choice(["insert", "update", "rewrite", "move", "delete"])
        is_new = all(row["id"] != new["id"] for row in held)
        if not held or kind == "insert":
            held += [new] if is_new else []
            return [{**new, "_change": INSERT}] if is_new else []
        row = dice.choice(held)
        before = {**row, "_change": UPDATE_PREIMAGE}
        if kind == "delete":
            held.remove(row)
            return [{**row, "_change": DELETE}]
        if kind == "update":
            row.update(new, id=row["id"], name=dice.choice([None, new["name"]]))
        if kind == "move" and is_new:
            row["id"] = new["id"]
        return [before, {**row, "_change": UPDATE_POSTIMAGE}]


def history(first: Sequence[Row], since: int, changes: Sequence[tuple[Place, Row]]) -> list[Any]:
    """Each version of each row: its values, from where on and up to where it was (None: still)."""
    versions: list[Any] = []
    open_: dict[int, tuple[Row, Place]] = {}
    for place, row in [((since, -1), row) for row in first] + [c for c in changes if c[0][0] > since]:
        if row.get("_change") == TRUNCATE:
            versions += [(*open_.pop(key), place) for key in list(open_)]
            continue
        values = {name: value for name, value in row.items() if name != "_change"}
        gone = row.get("_change") in (DELETE, UPDATE_PREIMAGE)
        if row["id"] in open_ and (gone or open_[row["id"]][0] != values):
            versions.append((*open_.pop(row["id"]), place))
        if not gone and row["id"] not in open_:
            open_[row["id"]] = (values, place)
    return in_order([*versions, *((*each, None) for each in open_.values())])


def in_order(rows: Sequence[Any]) -> list[Any]:
    return sorted(rows, key=repr)


@pytest.fixture(scope="module")
def catalog(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the compiled catalog."""
    import pyspark

    jvm, gateway = spark._jvm, spark.sparkContext._gateway
    folder = tmp_path_factory.mktemp("catalog")

    def files(paths: Sequence[Path]) -> Any:
        array = gateway.new_array(jvm.java.io.File, len(paths))
        for i, path in enumerate(paths):
            array[i] = jvm.java.io.File(str(path))
        return array

    compiler = jvm.org.codehaus.janino.Compiler()
    compiler.setDestinationDirectory(jvm.java.io.File(str(folder)), False)
    compiler.setClassPath(files(sorted((Path(pyspark.__file__).parent / "jars").glob("*.jar"))))
    compiler.compile(files([Path(__file__).parent / "row_level" / "RowLevelCatalog.java"]))
    return folder


@dataclass
class Pipeline:
    """The example in a folder of its own: its definition, and the page's spec but for the catalog and the places."""

    folder: Path
    configuration: dict[str, str]
    conf: list[str]
    """Settings that Spark takes at its start alone, which cannot stand in a pipeline's spec."""

    def __call__(self, command: str) -> subprocess.CompletedProcess[str]:
        import pyspark

        home = Path(pyspark.__file__).parent
        self.folder.mkdir(exist_ok=True)
        (text,) = re.findall(r"<!-- example: auto_cdc -->\n```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
        spec = yaml.safe_load(text)
        assert spec["configuration"].keys() >= {
            s for s in self.configuration if s.startswith("spark.cdc.")
        } - {TRUNCATED}
        spec |= {
            "storage": (self.folder / "checkpoints").as_uri(),
            "configuration": self.configuration,
        }
        (self.folder / "spark-pipeline.yml").write_text(yaml.safe_dump(spec))
        shutil.copy(EXAMPLES / "auto_cdc.py", self.folder)
        return subprocess.run(
            [
                home / "bin" / "spark-pipelines",
                command,
                "--spec",
                str(self.folder / "spark-pipeline.yml"),
                *self.conf,
            ],
            env={**os.environ, "SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=500,
            cwd=self.folder,
        )

    def update(self) -> None:
        done = self("run")
        assert done.returncode == 0 and "Run is COMPLETED" in done.stdout, done.stdout

    def failure(self) -> str:
        done = self("run")
        assert done.returncode != 0, done.stdout
        return done.stdout

    def rows(self, table: str) -> list[Any]:
        lines = (self.folder / "tables" / f"{table}.json").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [{c: v for c, v in row.items() if not c.startswith("__spark")} for row in rows]

    def histories(self, table: str) -> list[Any]:
        def place(row: Row, column: str) -> Place | None:
            at = row.pop(column)
            return at and (at["_commit_lsn"], at["_seq"])

        rows = self.rows(f"{table}_history")
        return in_order([(row, place(row, "__START_AT"), place(row, "__END_AT")) for row in rows])

    def batches(self) -> dict[Path, int]:
        """Each flow's checkpoint, and how many batches it has had."""
        flows = (self.folder / "checkpoints").glob("**/commits")
        return {flow: len(list(flow.glob("[0-9]*"))) for flow in flows}


@pytest.fixture
def pipeline(catalog: Path, tmp_path: Path) -> Pipeline:
    folder = tmp_path / "pipeline"
    return Pipeline(
        folder,
        {
            "spark.sql.catalog.lake": "RowLevelCatalog",
            "spark.sql.catalog.lake.folder": str(folder / "tables"),
            # Spark gives its Python ten seconds to start, and tries a flow again: after one second here, not five.
            "spark.sql.pipelines.execution.watchdog.minRetryTime": "1s",
            "spark.sql.pipelines.execution.watchdog.maxRetryTime": "1s",
            "spark.sql.shuffle.partitions": "2",
            "spark.cdc.root": str(tmp_path / "log"),
            "spark.cdc.tables": json.dumps(TABLES),
        },
        [
            *("--conf", f"spark.driver.extraClassPath={catalog}"),
            *("--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1"),
            *("--conf", "spark.ui.enabled=false"),
        ],
    )


def example(name: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """What the program prints for the pipeline's spec."""
    capsys.readouterr()
    runpy.run_path(str(EXAMPLES / f"auto_cdc_{name}.py"))["main"](*arguments)
    lines: dict[str, str] = yaml.safe_load(capsys.readouterr().out)
    return lines


@pytest.mark.timeout(1800)
def test_the_tables_are_the_sources_and_the_histories_what_the_source_did(
    spark: Any, make_batch: Any, tmp_path: Path, pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    dice = random.Random(4)
    root, state = str(tmp_path / "log"), str(tmp_path / "state")
    log = RecordingMaker(root, spark, make_batch)
    log.snapshot(ORDERS, [{"id": i, "note": f"first {i}"} for i in range(0, N_KEYS, 2)])
    log.snapshot(ITEMS, [{"id": i, "name": None, "size": i} for i in range(0, N_KEYS, 3)])
    for _ in range(4):
        log.commit_to_both(dice)
    since = log.lsn
    first = {name: [dict(row) for row in rows] for name, rows in log.tables.items()}
    pipeline.configuration |= example("first_state", capsys, root, state, ",".join(TABLES))

    def compare(table: str) -> None:
        name = table.removeprefix("public.")
        assert in_order(pipeline.rows(name)) == in_order(log.tables[table])
        assert pipeline.histories(name) == history(first[table], since, log.changes[table])

    batches: dict[Path, int] = {}
    for _ in range(2):
        for _ in range(8):
            log.commit_to_both(dice)
        pipeline.update()
        for table in TABLES:
            compare(table)
        before, batches = batches, pipeline.batches()
        assert len(batches) == 4
    assert all(batches[flow] > before[flow] for flow in batches), "the second update did not go on"

    # What AUTO CDC cannot have ends the update, and changes no table.
    unchanged = log.commit(
        (ITEMS, [{"_change": UPDATE_POSTIMAGE, "id": 1, "_unchanged": ["name"], "size": 0}])
    )
    rows = [{"id": 1, "note": "gone at once"}, {"_change": TRUNCATE}, {"id": 2, "note": "new"}]
    held = {name: pipeline.rows(name) for name in ("orders", "orders_history", "items", "items_history")}
    truncated = log.commit((ORDERS, rows))
    log.tables[ORDERS.name] = rows[2:]
    # Each alone: the first flow that fails ends the update, and with it the other flows.
    for table, why in (
        (ORDERS, f"there is a TRUNCATE: public.orders, commit LSN {truncated}"),
        (ITEMS, f"a large value was not sent: public.items, commit LSN {unchanged}"),
    ):
        pipeline.configuration["spark.cdc.tables"] = json.dumps({table.name: ["id"]})
        said = pipeline.failure()
        assert why in said, said
    assert held == {name: pipeline.rows(name) for name in held}

    arguments = (root, state, ORDERS.name, "id", str(truncated))
    lines = example("truncated", capsys, *arguments)
    deletes = spark.read.parquet(f"{state}/{ORDERS.name}").filter("_change_type = 'delete'")
    n_deletes = deletes.count()
    assert n_deletes and example("truncated", capsys, *arguments) == lines
    assert spark.read.parquet(f"{state}/{ORDERS.name}").filter("_change_type = 'delete'").count() == n_deletes
    with pytest.raises(Exception, match="PATH_ALREADY_EXISTS"):
        example("first_state", capsys, root, state, ORDERS.name)
    pipeline.configuration |= lines
    pipeline.configuration["spark.cdc.tables"] = json.dumps({ORDERS.name: ["id"]})
    log.insert(ORDERS, {"id": 3, "note": "later"})
    pipeline.update()
    compare(ORDERS.name)
