"""The twin: a slot made before the tables had a row, read without streaming, its rows kept as Parquet files.

``LocalPipeline`` reads it, so this is the log that a run would have that began before everything.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.differential.local_pipeline import LocalPipeline, Options, Sink, read_segment
from tests.differential.local_stages import batches_of
from tests.memory_parts import part_rows
from tests.postgres_fixtures import Database
from xidstream.pipeline.exchange import Batch
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.postgres.admin import create_slot
from xidstream.pipeline.storage.storage import Storage

_WAITING_BYTES = 128 << 20
_OPTIONS = Options(
    streaming="off",
    block_bytes=4 << 20,
    pending_limit_bytes=16 << 20,
    buffer_memory_bytes=128 << 20,
    batch_rows=100_000,
    batch_bytes=32 << 20,
)


class ParquetSink(Sink):
    """Files for each table below ``folder``, each of many batches; what is not in a file yet is bounded. ``flush`` at
    the end."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._waiting: dict[tuple[str, pa.Schema], list[pa.Table]] = {}
        self._n_waiting_bytes = 0
        self._n_files = 0
        self.commit_lsns: list[int] = []

    def write(self, batch: Batch, storage: Storage) -> None:
        for unit in batch.units:
            parts = [(p.relation, part_rows(p, batches_of)) for p in unit.memory]
            parts += [(p.relation, read_segment(p, storage)) for p in unit.segments]
            for relation, rows in parts:
                above = rows.filter(pa.compute.greater(rows["_commit_lsn"], self.watermark))
                self._waiting.setdefault((relation.table, above.schema), []).append(above)
                self._n_waiting_bytes += above.nbytes
            self.commit_lsns += [n for n in unit.transactions["commit_lsn"].to_pylist() if n > self.watermark]
        self.watermark = max([self.watermark, *self.commit_lsns[-1:]])
        if self._n_waiting_bytes > _WAITING_BYTES:
            self.flush()

    def flush(self) -> None:
        for (table, _), tables in self._waiting.items():
            folder = self._folder / table.encode().hex()
            folder.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.concat_tables(tables), folder / f"{self._n_files:06}.parquet")
            self._n_files += 1
        self._waiting, self._n_waiting_bytes = {}, 0

    def files(self, table: str) -> list[str]:
        return sorted(str(path) for path in (self._folder / table.encode().hex()).glob("*.parquet"))


class Twin:
    """Makes its slot at once."""

    def __init__(self, database: Database, folder: Path) -> None:
        self._dsn = database.dsn()
        self._slot = f"t_{database.name}"[:63]
        self._storage = folder / "storage"
        self._storage.mkdir(parents=True)
        self._n_lives = 0
        self.sink = ParquetSink(folder / "tables")
        create_slot(self._dsn, self._slot)

    def read_until(self, target: Lsn, timeout_s: float = 1200) -> None:
        """All that committed before ``target``, which must be flushed."""
        self._n_lives += 1
        epoch = f"{self._n_lives:04}"
        with LocalPipeline(
            self._dsn, self._slot, ("p",), self._storage, self.sink, _OPTIONS, epoch=epoch
        ) as pipeline:
            pipeline.read_until(target, timeout_s=timeout_s)
            pipeline.stop()
        self.sink.flush()
