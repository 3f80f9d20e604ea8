"""``_transactions`` of one moment, read in as few of its files as a question needs: its age does not count.

It has a row for each transaction, for ever. The Delta log has the least and the greatest commit LSN of each file, so a
range of LSNs is found without a look at any other file. The files' ranges hardly overlap, because they are written in
commit order and merged with their neighbours (``log_tables.small_files``).

Timestamps and xids have no such order. A backend takes its timestamp before its place in the WAL, a clock may be set
back, and a transaction that was open for an hour commits with an xid of an hour ago. So nothing is inferred from one
commit about the next. What bounds the search is each file's own range of the values, which the Delta log has, too
(``table_metadata``):

- *The first commit with a later timestamp* lies in no file whose greatest timestamp is not later. The files that are
  left are read by LSN, until one begins behind what was found. So one file is opened, and a further one for each that
  overlaps it.
- *An xid* lies in no file whose range excludes it. A file's range is wide where it has the commit of an old
  transaction, or where the 32 bits of xids began anew. Each such file costs a look at its footer.

A table of an earlier xidstream has no such ranges, of the files that were written before and after: its files are asked
one by one, in the order of LSNs, and answer by the statistics in their footers.

Called by ``change_log``, ``log_ranges`` and ``pipeline.verify``. deltalake and pyarrow, no Spark.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from xidstream.pipeline.changelog.log_root import LogRoot
from xidstream.pipeline.changelog.log_table import LogFile, reading
from xidstream.pipeline.errors import StorageFault
from xidstream.pipeline.log_tables import locations

_LSN: Final = "commit_lsn"
_TIME: Final = "commit_timestamp"
_ROUNDED: Final = datetime.timedelta(milliseconds=1)
"""Other tools cut the greatest timestamp of a file to whole milliseconds."""


class TransactionsTable:
    """Raises StorageFault where there is none, and for what cannot be read."""

    def __init__(self, root: LogRoot) -> None:
        self._title = root.title(locations.TRANSACTIONS)
        table = root.open(locations.TRANSACTIONS)
        if table is None:
            raise StorageFault(f"{self._title} is not there any more")
        self._table = table
        with self._reading():
            self._files = sorted(self._table.files(column=_LSN), key=lambda file: (file.min_lsn, file.path))

    @property
    def oldest_lsn(self) -> int | None:
        """The first commit LSN that there is; None where there is none."""
        return self._files[0].min_lsn if self._files else None

    @property
    def newest_timestamp(self) -> datetime.datetime | None:
        """The greatest commit timestamp; None where a file does not say."""
        greatest = self._table.greatest(_TIME)
        return None if None in greatest.values() else max(greatest.values(), default=None)

    def watermark(self, application_id: str) -> int:
        """The version last committed under ``application_id``; 0 for none."""
        return self._table.watermark(application_id) or 0

    def between(
        self, since: int, until: int, names: Sequence[str] = (_LSN,), at_most: int | None = None
    ) -> pa.Table:
        """The transactions after ``since`` up to ``until``, in commit order, and no more than ``at_most``."""
        wanted = (pc.field(_LSN) > since) & (pc.field(_LSN) <= until)

        def is_enough(found: pa.Table, file: LogFile) -> bool:
            return at_most is not None and pc.sum(pc.less(found[_LSN], file.min_lsn)).as_py() >= at_most

        found = self._read(
            [file for file in self._files if file.min_lsn <= until and file.max_lsn > since],
            list(dict.fromkeys((_LSN, *names))),
            wanted,
            is_enough,
        )
        return found.sort_by(_LSN).slice(0, at_most)

    def of_xids(self, xids: Collection[int], until: int, names: Sequence[str] = ()) -> pa.Table:
        """The transactions with these xids up to ``until``, in commit order. An xid comes again after 2³² of them."""
        least, greatest = self._table.least("xid"), self._table.greatest("xid")

        def may_have(file: LogFile) -> bool:
            low, high = least[file.path], greatest[file.path]
            return low is None or high is None or any(low <= xid <= high for xid in xids)

        wanted = pc.field("xid").isin(pa.array(sorted(xids), pa.int64())) & (pc.field(_LSN) <= until)
        files = [file for file in self._files if file.min_lsn <= until and may_have(file)]
        return self._read(files, list(dict.fromkeys((_LSN, "xid", *names))), wanted).sort_by(_LSN)

    def first_later(self, moment: datetime.datetime, until: int) -> int | None:
        """The first commit LSN up to ``until`` with a timestamp later than ``moment``; None where there is none."""
        greatest = self._table.greatest(_TIME)
        later = [
            file
            for file in self._files
            if file.min_lsn <= until
            and (greatest[file.path] is None or greatest[file.path] + _ROUNDED > moment)
        ]
        wanted = (pc.field(_TIME) > pa.scalar(moment, pa.timestamp("us", "UTC"))) & (pc.field(_LSN) <= until)
        found = self._read(
            later, [_LSN, _TIME], wanted, lambda rows, file: pc.min(rows[_LSN]).as_py() < file.min_lsn
        )
        return int(pc.min(found[_LSN]).as_py()) if found.num_rows else None

    def _read(
        self,
        files: Sequence[LogFile],
        names: Sequence[str],
        wanted: pc.Expression,
        is_enough: Callable[[pa.Table, LogFile], bool] = lambda rows, file: False,
    ) -> pa.Table:
        """``names``: those of ``wanted`` among them. ``is_enough``: whether with these rows the file, and those after
        it, need not be read."""
        schema = pa.schema([self._table.schema.field(name) for name in names])
        found = schema.empty_table()
        with self._reading():
            for file in files:
                if found.num_rows and is_enough(found, file):
                    break
                found = pa.concat_tables([found, self._table.read_file(file, names, wanted)])
        return found

    def _reading(self) -> AbstractContextManager[None]:
        return reading(self._title)
