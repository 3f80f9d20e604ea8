"""The snapshot reader actor: reads one range of a table after another into Parquet files
(``initial_copy.range_reading``).

All ranges are read on one thread of its own. Ray gives an actor's calls to its threads in turn, and memory allocators
keep what is freed for the thread that freed it. So each of Ray's two threads would take the memory of a range anew.

The command line's process imports this module to name the actor. So the decoder and numba, some 100 MB, are imported
where the actor lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from xidstream.actors.runtime.allocator import keep_freed_memory
from xidstream.actors.runtime.no_pandas import skip_pandas_import
from xidstream.actors.runtime.secrets import take_up
from xidstream.pipeline.errors import XidstreamError
from xidstream.pipeline.log_tables.parquet_files import WrittenFile
from xidstream.pipeline.log_tables.snapshot_tables import SnapshotOutput
from xidstream.pipeline.postgres.login import login_of
from xidstream.pipeline.settings.config import Config
from xidstream.pipeline.settings.file_modes import choose_for_process
from xidstream.pipeline.snapshot.bounds import SnapshotBounds
from xidstream.pipeline.snapshot.tables import RangeTask


class SnapshotReader:
    """One range at a time. ``cancel`` comes meanwhile."""

    def __init__(self, config: Config, secrets_path: str | None) -> None:
        keep_freed_memory()
        skip_pandas_import()
        choose_for_process(config.storage_mode)
        from xidstream.pipeline import decode
        from xidstream.pipeline.initial_copy.range_reading import RangeReader

        decode.warm_up()
        self._reader = RangeReader(login_of(take_up(config, secrets_path)))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="xidstream-range")

    def read(
        self,
        tasks: Sequence[RangeTask],
        bounds: SnapshotBounds,
        outputs: Sequence[SnapshotOutput],
        bytes_per_s: int,
    ) -> list[tuple[tuple[WrittenFile, ...], int] | XidstreamError]:
        """The files of each of these ranges, which have one snapshot, and how many rows are in them, or why it could
        not be read. ``bytes_per_s``: of COPY's rows at most; 0 for no limit."""
        from xidstream.pipeline.initial_copy.range_reading import RangeOutput

        places = [(RangeOutput(each.table, each.directory), each.conform) for each in outputs]
        reading = self._thread.submit(
            self._reader.read_together, tasks, bounds, places, bytes_per_s=bytes_per_s
        )
        return [
            each if isinstance(each, XidstreamError) else (tuple(each), sum(file.n_rows for file in each))
            for each in reading.result()
        ]

    def cancel(self, snapshot_name: str) -> None:
        """Stop reading for a snapshot that was given up."""
        self._reader.cancel(snapshot_name)
