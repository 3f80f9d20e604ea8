"""The recipes that read a table's changes, and a base table, with Ray Data, as they stand in docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.typed_table import ROWS, make_base_tables
from xidstream.pipeline.delta.delta_table import DeltaTableWriter
from xidstream.pipeline.log_tables import locations
from xidstream.pipeline.log_tables.columns import TableColumn
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.log_tables.parquet_files import ParquetFiles
from xidstream.pipeline.schema.rows import TRANSACTIONS_SCHEMA

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "spark-source.md"
SLOT = "1/shop/orders"
ID = TableColumn("id", pa.int64(), "id")
NOTE = TableColumn("note", pa.string(), "note")
LSN = TableColumn("_commit_lsn", pa.int64(), "_commit_lsn")


def append(root: Location, directory: str, lsn_column: str, rows: list[dict[str, Any]], columns: Any) -> None:
    """One commit with these rows, and the columns as the table's."""
    location = root.child(directory)
    writer = DeltaTableWriter.open_or_create(location, directory, columns)
    known = {column.name for column in writer.columns}
    writer.add_columns([column for column in columns if column.name not in known])
    lsn = max(row[lsn_column] for row in rows)
    schema = pa.schema([column.field for column in columns])
    files = ParquetFiles(location, f"data-{lsn}", schema, lsn_column)
    files.write(pa.RecordBatch.from_pylist(rows, schema=schema))
    writer.commit(files.close(), {SLOT: lsn}, lsn_column, marks={f"{SLOT}/owner": 1})


def test_the_recipe_reads_whole_commits_also_of_a_table_that_got_a_column(tmp_path: Path) -> None:
    root = Location.parse(str(tmp_path))
    append(root, "public.orders", "_commit_lsn", [{"id": 1, "_commit_lsn": 100}], [ID, LSN])
    wide = [ID, LSN, NOTE]
    append(root, "public.orders", "_commit_lsn", [{"id": 2, "_commit_lsn": 200, "note": "new"}], wide)
    columns = [TableColumn(field.name, field.type, field.name) for field in TRANSACTIONS_SCHEMA]
    append(root, locations.TRANSACTIONS, "commit_lsn", [{"commit_lsn": 200}], columns)
    # The table is ahead for a moment.
    append(root, "public.orders", "_commit_lsn", [{"id": 3, "_commit_lsn": 300, "note": "not yet"}], wide)
    (code,) = re.findall(r"<!-- example: ray -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"root": str(tmp_path)}
    exec(compile(code, PAGE.name, "exec"), names)
    found = sorted(names["changes"].take_all(), key=lambda row: int(row["id"]))
    assert [(row["id"], row["note"], row["_commit_lsn"]) for row in found] == [
        (1, None, 100),
        (2, "new", 200),
    ]


def test_the_recipe_of_base_tables_finds_what_the_source_has(tmp_path: Path) -> None:
    make_base_tables(tmp_path / "root", tmp_path / "segments")
    page = (DOCS / "recipes.md").read_text()
    names: dict[str, Any] = {"uri": str(tmp_path / "root")}
    for name in ("moment", "ray"):
        (code,) = re.findall(rf"<!-- example: {name} -->\n```python\n(.*?)```", page, re.DOTALL)
        exec(compile(code, f"recipes.md: {name}", "exec"), names)
    assert sorted(names["orders"].take_all(), key=lambda row: int(row["id"])) == ROWS
