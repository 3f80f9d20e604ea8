"""What is asked of an object store for the rows of its files: the wanted columns and row groups, in few requests."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.s3_server import CountedS3, counted_s3, n_bytes_of
from xidstream.pipeline.changelog.log_ranges import FileRange, ReadColumn
from xidstream.pipeline.log_tables.locations import Location
from xidstream.pipeline.spark import parquet_frames
from xidstream.pipeline.spark.parquet_frames import StoredFiles

N_COLUMNS, N_ROWS, GROUP_ROWS = 30, 40_000, 10_000
FILE = "part.parquet"


@pytest.fixture(scope="module")
def s3() -> Iterator[CountedS3]:
    with counted_s3() as made:
        yield made


@pytest.fixture(scope="module")
def wide(s3: CountedS3) -> tuple[Location, pa.Table, int]:
    """A file of 30 columns, some with awkward names, and what it takes in the store."""
    dice = np.random.default_rng(1)
    names = ["_commit_lsn", "a", "a.b", "list", *(f"c{i}" for i in range(4, N_COLUMNS))]
    columns: list[pa.Array] = [pa.array(np.arange(N_ROWS) // 10)]
    columns += [pa.array(dice.integers(0, 1 << 60, N_ROWS)) for _ in names[1:]]
    columns[3] = pa.array([[i, i + 1] if i % 3 else None for i in range(N_ROWS)], pa.list_(pa.int64()))
    rows = pa.table(columns, names)
    location = Location.parse(f"{s3.uri}/wide", s3.options)
    with location.create(FILE) as sink:
        pq.write_table(rows, sink, row_group_size=GROUP_ROWS)
    with location.open(FILE) as file:
        return location, rows, int(file.size())


def read(
    location: Location,
    schema: pa.Schema,
    wanted: pc.Expression | None = None,
    paths: tuple[str, ...] = (FILE,),
) -> pa.Table:
    """As an executor does: the function arrives there pickled."""
    files = pickle.loads(pickle.dumps(StoredFiles(paths, schema, location, wanted=wanted)))
    numbers = pa.RecordBatch.from_arrays([pa.array(range(len(paths)))], ["id"])
    return pa.Table.from_batches(files([numbers]), schema)


def test_of_thirty_columns_two_are_read_and_in_a_handful_of_requests(
    s3: CountedS3, wide: tuple[Location, pa.Table, int]
) -> None:
    location, rows, n_bytes = wide
    two = rows.select(["_commit_lsn", "c7"])
    s3.asked()
    assert read(location, two.schema) == two
    asked = s3.asked()
    assert n_bytes_of(asked) < n_bytes / 10
    # The size, the footer, and of each of four row groups its two columns.
    assert len(asked) <= 2 + 2 * N_ROWS // GROUP_ROWS
    assert read(location, rows.schema) == rows
    assert len(s3.asked()) <= 5, "neighbours come together"


def test_row_groups_without_a_wanted_row_are_not_read(
    s3: CountedS3, wide: tuple[Location, pa.Table, int]
) -> None:
    location, rows, n_bytes = wide
    wanted = (pc.field("_commit_lsn") > 2_100) & (pc.field("_commit_lsn") <= 2_200)
    s3.asked()
    found = read(location, rows.schema, wanted)
    assert found == rows.slice(2 * GROUP_ROWS, GROUP_ROWS), "a caller filters what is in it"
    assert n_bytes_of(s3.asked()) < n_bytes / 3
    assert read(location, rows.schema, pc.field("_commit_lsn") == -1).num_rows == 0


def test_no_more_than_a_portion_is_asked_for_ahead(
    s3: CountedS3, wide: tuple[Location, pa.Table, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    location, rows, n_bytes = wide
    monkeypatch.setattr(parquet_frames, "_AHEAD_BYTES", n_bytes // 2)
    s3.asked()
    batches = StoredFiles((FILE,), rows.schema, location)(
        iter([pa.RecordBatch.from_arrays([pa.array([0])], ["id"])])
    )
    first = next(batches)
    assert n_bytes_of(s3.asked()) < n_bytes * 2 / 3
    assert pa.Table.from_batches([first, *batches], rows.schema) == rows


def test_columns_are_told_apart_whose_names_look_like_paths_and_missing_ones_are_null(
    wide: tuple[Location, pa.Table, int],
) -> None:
    location, rows, _ = wide
    for names in (["a"], ["a.b"], ["a.b", "a"], ["list"]):
        assert read(location, rows.select(names).schema) == rows.select(names)
    found = read(location, pa.schema([("added", pa.int32())]), paths=(FILE, FILE))
    assert found.num_rows == found["added"].null_count == 2 * N_ROWS


def test_format_xidstream_reads_the_row_groups_of_its_lsns_alone(s3: CountedS3) -> None:
    dice = np.random.default_rng(2)
    lsns, values = np.arange(N_ROWS) // 10, [dice.integers(0, 1 << 60, N_ROWS) for _ in range(3)]
    names = ["_commit_lsn", "_change_type", "a", "b", "c"]
    rows = pa.table([lsns, pa.repeat("insert", N_ROWS), *values], names)
    location = Location.parse(f"{s3.uri}/ranges", s3.options)
    with location.create(FILE) as sink:
        pq.write_table(rows, sink, row_group_size=GROUP_ROWS)
    columns = tuple(ReadColumn(name, pa.int64(), (name,)) for name in ("_commit_lsn", "a", "b", "c"))

    def changes(since: int, until: int, number: int = 0, of: int = 1) -> tuple[pa.Table, int, int]:
        made = FileRange("public.t", location.uri, (FILE,), columns, since, until, number, of)
        s3.asked()
        found = list(pickle.loads(pickle.dumps(made)).batches(s3.options))
        asked = s3.asked()
        empty = rows.select([column.name for column in columns]).slice(0, 0)
        return (
            pa.concat_tables([empty, pa.Table.from_batches(found, empty.schema)]),
            n_bytes_of(asked),
            len(asked),
        )

    whole, all_bytes, n_requests = changes(-1, 1 << 40)
    assert whole == rows.select([column.name for column in columns])
    # The size, the footer, and of each of four row groups its columns together.
    assert n_requests <= 2 + 2 * N_ROWS // GROUP_ROWS
    few, few_bytes, _ = changes(2_100, 2_200)
    assert few == whole.slice(21_010, 1_000) and few_bytes < all_bytes / 3
    slices = [changes(999, 2_999, number, 2)[0] for number in range(2)]
    assert sorted(pa.concat_tables(slices)["a"].to_pylist()) == sorted(whole["a"][10_000:30_000].to_pylist())
