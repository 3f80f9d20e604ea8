"""The recipes of docs/recipes.md, as they stand there: each engine finds what the source has, at one moment."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyarrow import fs

from tests.s3_server import counted_s3
from tests.typed_table import LINES, ROWS, make_base_tables

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"
EXAMPLES = dict(re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
TO_ARROW: dict[str, Callable[[Any], pa.Table]] = {
    "pandas": lambda found: pa.Table.from_pandas(found, preserve_index=False),
    "deltalake": pa.table,
    "duckdb": lambda found: found.to_arrow_table(),
    "polars": lambda found: found.to_arrow(),
}


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("recipes")
    make_base_tables(folder / "root", folder / "segments")
    return str(folder / "root")


def run(name: str, **names: Any) -> dict[str, Any]:
    exec(compile(EXAMPLES[name], f"{PAGE.name}: {name}", "exec"), names)
    return names


def test_every_recipe_of_the_page_has_a_test() -> None:
    assert set(EXAMPLES) == {*TO_ARROW, "moment", "ray", "store"}, (
        "tests/ray/test_ray_data.py runs that of Ray"
    )


def test_the_manifest_names_the_versions_of_one_moment(uri: str) -> None:
    moment = run("moment", uri=uri)["moment"]
    assert set(moment) == {"public.orders", "public.order lines"}
    path, version = moment["public.order lines"]
    assert path.endswith("/public.order~20lines")
    assert DeltaTable(path, version=version).to_pyarrow_table().to_pylist() == LINES
    assert DeltaTable(path, version=version - 1).to_pyarrow_table().to_pylist() == LINES[:1]


def test_a_base_table_says_its_key_and_which_types_its_columns_have_in_postgresql(uri: str) -> None:
    said = DeltaTable(f"{uri}/current/public.orders").metadata().configuration
    assert json.loads(said["xidstream.key"]) == ["id"]
    types = json.loads(said["xidstream.types"])
    assert list(types) == list(ROWS[0])
    assert (types["price"], types["document"], types["uid"]) == ("numeric(12,2)", "jsonb", "uuid")


@pytest.mark.parametrize("engine", TO_ARROW)
def test_an_engine_finds_what_the_source_has(uri: str, engine: str) -> None:
    path, version = run("moment", uri=uri)["moment"]["public.orders"]
    found = TO_ARROW[engine](run(engine, path=path, version=version)["orders"])
    assert sorted(found.to_pylist(), key=lambda row: int(row["id"])) == ROWS
    types = {field.name: field.type for field in found.schema}
    assert types["price"] == pa.decimal128(12, 2)
    assert pa.types.is_timestamp(types["ordered_at"]) and types["ordered_at"].tz in ("UTC", "Etc/UTC")
    assert pa.types.is_timestamp(types["local_time"]) and types["local_time"].tz is None
    assert (types["n_small"], types["n_large"], types["day"]) == (pa.int16(), pa.int64(), pa.date32())


@pytest.mark.parametrize("engine", sorted({"deltalake", "duckdb", "polars"}))
def test_an_engine_reads_the_version_that_it_is_given(uri: str, engine: str) -> None:
    path, version = run("moment", uri=uri)["moment"]["public.order lines"]
    for n_lines in (1, 2):
        found = run(engine, path=path, version=version + n_lines - 2)["orders"]
        assert sorted(TO_ARROW[engine](found)["id"].to_pylist()) == list(range(1, n_lines + 1))


def test_engines_find_it_in_a_store_of_ones_own_too(uri: str) -> None:
    path, version = run("moment", uri=uri)["moment"]["public.orders"]
    with counted_s3() as store:
        endpoint = store.options["AWS_ENDPOINT_URL"]
        there = fs.S3FileSystem(
            endpoint_override=endpoint.partition("//")[2],
            scheme="http",
            region="us-east-1",
            access_key="key",
            secret_key="secret",
        )
        place = f"{store.uri}/current/public.orders"
        fs.copy_files(path, place.partition("//")[2], destination_filesystem=there)
        found = run("store", path=place, version=version, endpoint=endpoint, key_id="key", secret="secret")
        tables = [
            found["by_deltalake"],
            TO_ARROW["polars"](found["by_polars"]),
            TO_ARROW["duckdb"](found["by_duckdb"]),
        ]
        for table in tables:
            assert sorted(table.to_pylist(), key=lambda row: int(row["id"])) == ROWS
