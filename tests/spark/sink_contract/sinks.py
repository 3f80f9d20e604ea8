"""The sinks of the contract suite: how each is opened, made to fail, and read back. A new sink gets a class here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tests.iceberg_rest import IcebergRestServer
from tests.spark.sink_contract.null_sink import NullSink, newest
from tests.spark.support import IDENTITY
from xidstream.pipeline import faultpoints
from xidstream.pipeline.exchange import Tenure
from xidstream.pipeline.faultpoints import FaultPlan
from xidstream.pipeline.iceberg.catalogs import IcebergAddress
from xidstream.pipeline.log_tables.batch_parts import TableName
from xidstream.pipeline.log_tables.locations import encode_table
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.sinks.delta_sink import DeltaSink
from xidstream.pipeline.sinks.foreach import ForeachSink
from xidstream.pipeline.sinks.iceberg_sink import IcebergSink
from xidstream.pipeline.sinks.sink import Sink
from xidstream.pipeline.snapshot.bounds import SnapshotBounds

Row = tuple[int, int, str, Any, Any]
"""Commit LSN, ``_seq``, change type, ``id``, ``name``."""


class Tried(ABC):
    """One sink of a test, over several runs. ``steps``: where a write of it may be cut off."""

    steps: tuple[str, ...]

    def __init__(self, root: Path, spark: Any, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.spark = spark
        self.patch = patch
        self.n_runs = 0

    @abstractmethod
    def make(self) -> Sink: ...

    def next_run(self, contained: Mapping[TableName, SnapshotBounds] | None = None) -> Sink:
        """Of the run that has the slot from now on. ``contained``: what snapshots of it the sink has had."""
        sink = self.make()
        sink.open(lambda: self.spark)
        self.n_runs += 1
        sink.claim(Tenure(self.n_runs, f"epoch-{self.n_runs}", 1, {}, Lsn(10_000)))
        sink.exclude_contained(contained or {})
        return sink

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """When the test has ended."""

    def fail_at(self, step: str) -> None:
        """The next write ends there with an error, once."""
        self.patch.setattr(faultpoints, "_plan", FaultPlan(f"{step}:error", None))

    @abstractmethod
    def commits(self) -> list[int]:
        """Commit LSNs of transactions, as the sink got them."""

    @abstractmethod
    def rows(self, table: str) -> list[Row]:
        """All that the sink got of ``schema.table``, sorted."""


def row_of(row: Mapping[str, Any]) -> Row:
    return row["_commit_lsn"], row["_seq"], row["_change_type"], row["id"], row.get("name")


class Delta(Tried):
    steps = ("committing_table", "table_committed", "committing_transactions", "transactions_committed")

    def make(self) -> Sink:
        return DeltaSink(str(self.root), IDENTITY)

    def _read(self, directory: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = DeltaTable(str(self.root / directory)).to_pyarrow_table().to_pylist()
        return found

    def commits(self) -> list[int]:
        return sorted(row["commit_lsn"] for row in self._read("_transactions"))

    def rows(self, table: str) -> list[Row]:
        return sorted(map(row_of, self._read(encode_table(*table.split(".")))))


class Iceberg(Tried):
    steps = ("iceberg_committing", *Delta.steps)

    def make(self) -> Sink:
        return IcebergSink(self._address, IDENTITY, commit_every_s=0)

    @property
    def _address(self) -> IcebergAddress:
        return IcebergAddress.parse(f"{self.root}/shop")

    def _read(self, key: str) -> list[dict[str, Any]]:
        catalog = self._address.open(makes=False)
        assert catalog is not None
        found: list[dict[str, Any]] = catalog.load_table(f"shop.{key}").scan().to_arrow().to_pylist()
        return found

    def commits(self) -> list[int]:
        return sorted(row["commit_lsn"] for row in self._read("_transactions"))

    def rows(self, table: str) -> list[Row]:
        return sorted(map(row_of, self._read(table.replace(".", "__"))))


class IcebergTogether(Iceberg):
    """Behind a REST catalog that commits all tables of a batch in one request."""

    steps = ("committing_table", "iceberg_committing", "iceberg_tables_committed", "transactions_committed")

    def __init__(self, root: Path, spark: Any, patch: pytest.MonkeyPatch) -> None:
        super().__init__(root, spark, patch)
        root.mkdir()
        self._server = IcebergRestServer(root, together=True)
        patch.setenv("PYICEBERG_CATALOG__PROD__TYPE", "rest")
        patch.setenv("PYICEBERG_CATALOG__PROD__URI", self._server.uri)

    @property
    def _address(self) -> IcebergAddress:
        return IcebergAddress.parse("prod/shop")

    def rows(self, table: str) -> list[Row]:
        assert self._server.n_transactions, "nothing was committed together"
        return super().rows(table)

    def close(self) -> None:
        self._server.stop()


class Function(Tried):
    """``foreachBatch``: what a function was given is what there is of it."""

    steps = ("called", "all")

    def __init__(self, root: Path, spark: Any, patch: pytest.MonkeyPatch) -> None:
        super().__init__(root, spark, patch)
        self._fails_at = ""
        self._commits: list[int] = []
        self._rows: dict[str, list[Row]] = {}

    def make(self) -> Sink:
        return ForeachSink(self._take)

    def fail_at(self, step: str) -> None:
        self._fails_at = step

    def _take(self, batch: Any) -> None:
        self._fail("called")
        self._commits += [row["commit_lsn"] for row in batch.transactions.orderBy("commit_lsn").collect()]
        for table in batch.tables:
            given = [row_of(row.asDict()) for row in batch.dataframe(table).collect()]
            self._rows.setdefault(table, []).extend(given)
        self._fail("all")

    def _fail(self, step: str) -> None:
        if self._fails_at == step:
            self._fails_at = ""
            raise RuntimeError(step)

    def commits(self) -> list[int]:
        return self._commits

    def rows(self, table: str) -> list[Row]:
        return sorted(self._rows.get(table, []))


class Null(Tried):
    steps = ("committing_table", "table_committed")

    def make(self) -> Sink:
        return NullSink(self.root)

    def commits(self) -> list[int]:
        found: list[int] = newest(self.root)[1]["commits"]
        return found

    def rows(self, table: str) -> list[Row]:
        files = newest(self.root)[1]["tables"].get(table, [])
        return sorted(row_of(row) for file in files for row in pq.read_table(self.root / file).to_pylist())


SINKS: tuple[type[Tried], ...] = (Delta, Iceberg, IcebergTogether, Function, Null)
