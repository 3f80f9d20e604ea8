"""Rows in the order of a column, in Parquet files and row groups that each have a short range of it.

A merge of small files gives its rows here where a table has a layout (``layout``). Rows with the same values, or with
none, keep the order of ``_commit_lsn`` and ``_seq``. Nothing that reads a change log relies on the order of rows in a
file: all sort by these two.

``RUN_BYTES`` bound the memory: where more comes, it is ordered in several runs, and each has files of its own. Small
row groups (``GROUP_ROWS``) let an engine read a part of a file.

Rejected: partitions of the table. Each commit would write a file for each of their values, the file of a large
transaction could not be linked as it is, and what a row's folder is would be seen by every reader.

Called by ``small_files``. Plain pyarrow.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from xidstream.pipeline.log_tables.parquet_files import ParquetFiles, WrittenFile

RUN_BYTES: Final = 128 << 20
"""In Arrow memory. To order them takes as much again."""
GROUP_ROWS: Final = 16 << 10
_COMMIT_ORDER: Final = ("_commit_lsn", "_seq")


class ClusteredFiles:
    """``files`` writes them, with row groups of ``GROUP_ROWS``. ``by``: its columns, the first one first.
    ``file_rows``: rows of a file, more or less. Errors are those of ``ParquetFiles``."""

    def __init__(self, files: ParquetFiles, by: Sequence[str], file_rows: int) -> None:
        self._files = files
        self._by = by
        self._file_rows = file_rows
        self._run: list[pa.RecordBatch] = []
        self._run_bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._run.append(batch)
        self._run_bytes += batch.nbytes
        if self._run_bytes >= RUN_BYTES:
            self._end_run()

    def close(self) -> list[WrittenFile]:
        self._end_run()
        return self._files.close()

    def _end_run(self) -> None:
        if not self._run:
            return
        rows = pa.Table.from_batches(self._run)
        self._run, self._run_bytes = [], 0
        order = [*self._by, *(name for name in _COMMIT_ORDER if name in rows.column_names)]
        rows = rows.sort_by([(name, "ascending") for name in order]).combine_chunks()  # nulls come last
        n_files = max(1, round(rows.num_rows / self._file_rows))
        starts = [rows.num_rows * each // n_files for each in range(n_files + 1)]
        for start, end in itertools.pairwise(starts):
            for batch in rows.slice(start, end - start).to_batches(max_chunksize=GROUP_ROWS):
                self._files.write(batch)
            self._files.end_file()
