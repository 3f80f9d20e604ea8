"""The file that holds a transaction's rows while it is open, and that is the table's own file once it has committed.

It is Parquet. All of a row is known before COMMIT but two constants: the commit's LSN and its timestamp. The file is
written with placeholders for both, while the transaction is open. At COMMIT they are filled in: a few dozen bytes a
file, however many rows it has. So no row is written twice, and the lag after COMMIT does not grow with the
transaction.

How that is possible: the two are the file's last columns, INT64, uncompressed, with a dictionary and without
statistics. Each has one value, so its dictionary page has one entry, and the value stands in each row group once, as
8 bytes behind the page's header. That header also holds the page's checksum, which is filled in with it.

``write_rows`` writes such a file and returns its ``RowFile``: what anybody needs to know of it later. ``fill`` fills a
local file in, and ``bound_tail`` gives the end of one that cannot be changed in place. ``read_rows`` gives the rows in
the contract's layout, of a file that is filled or not: it takes the two constants from its caller, not from the file.
``rewrite_head`` is for what a rolled-back savepoint takes away.

Invariants:

- A file has the contract's columns and no other: a table's log may name it.
- A file that is not filled can be recognised, and must not be read as a table's: its LSNs are negative.
- Filling is idempotent, in any process and at any later time. Another commit's constants are refused.
- ``RowFile.checksum`` is of the file as written. Whoever reads by ``read_rows`` checks it before the first row, with
  the placeholders put back where the file is filled. Other engines check the sums of pages, if they check any.

Considered and rejected: partition values in Delta's log as the constants (then a file cannot be of many tables'
folders, and rows of several commits cannot share one); a view that joins them in (other engines do not see it); Arrow
IPC, and Spark to write it anew (twice the work, after COMMIT).
"""

from xidstream.pipeline.parquet.checking import verify, verify_tail
from xidstream.pipeline.parquet.filling import FilledOtherwise, FillRefused, bound_tail, fill
from xidstream.pipeline.parquet.reading import read_rows, rewrite_head
from xidstream.pipeline.parquet.row_file import CommitStamp, PageOffsets, RowFile, file_schema, unbound
from xidstream.pipeline.parquet.writing import SPARK_METADATA, halved, statistics_leaves, write_rows

__all__ = [
    "SPARK_METADATA",
    "CommitStamp",
    "FillRefused",
    "FilledOtherwise",
    "PageOffsets",
    "RowFile",
    "bound_tail",
    "file_schema",
    "fill",
    "halved",
    "read_rows",
    "rewrite_head",
    "statistics_leaves",
    "unbound",
    "verify",
    "verify_tail",
    "write_rows",
]
