"""Small parts of many tables in one object: what shares one, what counts, and what comes out."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from tests.memory_parts import part_rows
from xidstream.pipeline import packs
from xidstream.pipeline.packs import FEW_TABLES, PACK_BYTES, SMALL_BYTES, PackReader, PartsBuilder
from xidstream.pipeline.schema import Column, RelationVersion, ReplicaIdentity
from xidstream.pipeline.schema.rows import contract_schema


class Store(dict[int, pa.Table]):
    n_reads = 0

    def put(self, table: pa.Table) -> int:
        self[len(self)] = table
        return len(self) - 1

    def read(self, ref: int) -> Iterator[pa.RecordBatch]:
        self.n_reads += 1
        yield from self[ref].to_batches()


def relation(n: int) -> RelationVersion:
    return RelationVersion(n, "public", f"t{n}", ReplicaIdentity.DEFAULT, (Column("a", 25, -1, True),))


def released(n: int, *values: str) -> pa.Table:
    row = {"_change_type": "insert", "_commit_lsn": n, "_commit_timestamp": 0, "_xid": n}
    rows = [{"a": value, **row, "_seq": i, "_text": [("a", value)]} for i, value in enumerate(values)]
    return pa.Table.from_pylist(rows, schema=contract_schema(relation(n)))


@pytest.mark.parametrize(("n_tables", "n_objects"), [(FEW_TABLES, FEW_TABLES), (FEW_TABLES + 1, 1)])
def test_a_unit_of_few_tables_has_an_object_for_each_and_one_of_many_shares(
    n_tables: int, n_objects: int
) -> None:
    store = Store()
    parts = PartsBuilder(store.put, n_tables)
    tables = {relation(n): released(n, f"of {n}", "", "é") for n in range(n_tables)}
    for version, table in tables.items():
        parts.add(version, table)
    found = parts.finish()
    assert len(store) == len({part.ref for part in found}) == n_objects
    assert {part.relation: part_rows(part, store.read) for part in found} == tables
    assert [part.n_rows for part in found] == [3] * n_tables
    assert [part.first_commit_lsn for part in found] == list(range(n_tables))


def test_what_is_large_has_an_object_of_its_own_and_what_is_empty_has_none() -> None:
    store = Store()
    parts = PartsBuilder(store.put, 1_000)
    parts.add(relation(1), released(1, "x" * SMALL_BYTES))
    parts.add(relation(2), released(2))
    parts.add(relation(3), released(3, "small"))
    large, small = parts.finish()
    assert (large.relation.relid, large.pack_index, large.n_bytes) == (1, None, store[0].nbytes)
    assert (small.relation.relid, small.pack_index) == (3, 0)
    assert part_rows(small, store.read) == released(3, "small")


def test_parts_of_a_version_stay_in_order_and_rows_that_are_a_slice_bring_themselves_alone() -> None:
    store = Store()
    parts = PartsBuilder(store.put, 1_000)
    parts.add(relation(1), released(1, "x" * 2 * SMALL_BYTES))
    parts.add(relation(1), released(1, "y" * 1_000_000, "last").slice(1))
    whole = pa.concat_tables([part_rows(part, store.read) for part in parts.finish()])
    assert whole.column("a").to_pylist() == ["x" * 2 * SMALL_BYTES, "last"]
    assert store[1].nbytes < 10_000


def test_packs_are_closed_in_time_and_their_bytes_count_as_they_are_stored() -> None:
    store = Store()
    parts = PartsBuilder(store.put, 1_000)
    for n in range(300):
        parts.add(relation(n), released(n, "x" * 30_000))
    found = parts.finish()
    assert len(store) == 5, "18 MB: the text is in its column and in _text"
    for ref, table in store.items():
        n_bytes = sum(part.n_bytes for part in found if part.ref == ref)
        assert table.nbytes * 0.99 < n_bytes <= min(table.nbytes, PACK_BYTES + SMALL_BYTES)


def test_several_threads_read_each_pack_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "PACK_BYTES", 10_000)
    store = Store()
    parts = PartsBuilder(store.put, 1_000)
    for n in range(200):
        parts.add(relation(n), released(n, f"of {n}"))
    found = parts.finish()
    batch = PackReader(store.read)
    with ThreadPoolExecutor(8) as threads:
        got = list(threads.map(lambda part: list(batch.rows([part])), found))
    assert [rows[0].column(0).to_pylist() for rows in got] == [[f"of {n}"] for n in range(200)]
    assert store.n_reads == len(store) > 10
