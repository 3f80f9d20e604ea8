"""Journals for tests: files with a few rows each, and the record that names them."""

from __future__ import annotations

import pyarrow as pa

from tests.unit.storage.conftest import COMMIT, XID, make_batch
from xidstream.pipeline.exchange import (
    InlineMessages,
    JournalFile,
    JournalSpan,
    MemoryPart,
    Sealed,
    SegmentPart,
    UnitEnd,
)
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import RelationVersion, rows
from xidstream.pipeline.storage.journal_file import write_journal_file
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import write_progress
from xidstream.pipeline.storage.segment_file import write_segment
from xidstream.pipeline.storage.storage import Storage


class Made:
    """Files of a journal, written one after the other, and the record that names them."""

    def __init__(self, storage: Storage, layout: Layout, relation: RelationVersion) -> None:
        self.storage, self.layout, self.relation = storage, layout, relation
        self.files: list[JournalFile] = []

    def write(self, number: int, *commit_lsns: int, with_segment: bool = False) -> JournalFile:
        """Of one row a commit; without a commit of a message."""
        storage, layout = self.storage, self.layout
        row = {"_change_type": "insert", "_commit_timestamp": 0, "_xid": 7, "_seq": 0, "_text": []}
        made = [{"id": lsn, "ordinal": "x", "_commit_lsn": lsn, **row} for lsn in commit_lsns]
        table = pa.Table.from_pylist(made, schema=rows.contract_schema(self.relation))
        segments = ()
        if with_segment:
            key = layout.segment_key(Xid(XID), Lsn(commit_lsns[0]), 0)
            segments = (
                SegmentPart(
                    write_segment(storage, key, self.relation, XID, [make_batch(self.relation, 0, 9)]), COMMIT
                ),
            )
        unit = Sealed(
            transactions=self._transactions(*commit_lsns),
            memory=(MemoryPart(self.relation, len(made), 10, commit_lsns[0], "ref"),) if commit_lsns else (),
            segments=segments,
            messages=() if commit_lsns else (InlineMessages(self._message()),),
            n_rows=len(made),
            n_bytes=10,
        )
        first, last = (commit_lsns[0], commit_lsns[-1]) if commit_lsns else (0, 0)
        end = UnitEnd(Lsn(first), Lsn(last), Lsn(last + 0x30 if last else 0), len(commit_lsns))
        file = write_journal_file(storage, layout, number, [unit], [end], lambda ref: table)
        self.files.append(file)
        return file

    def record(self, confirmed: int, delivered: int, *spans: tuple[int, int]) -> None:
        named = [JournalSpan(self.layout.epoch, first, last) for first, last in spans]
        write_progress(self.storage, self.layout, Lsn(confirmed), delivered_lsn=Lsn(delivered), journal=named)

    def key(self, number: int) -> str:
        return self.layout.journal_key(number)

    def _transactions(self, *commit_lsns: int) -> pa.RecordBatch:
        made = [
            {
                "xid": 7,
                "commit_lsn": lsn,
                "end_lsn": lsn + 0x30,
                "commit_timestamp": 1_700_000_000_000_000,
                "streamed": False,
                "rows": 1,
                "tables": [self.relation.name],
            }
            for lsn in commit_lsns
        ]
        return pa.RecordBatch.from_pylist(made, schema=rows.TRANSACTIONS_SCHEMA)

    @staticmethod
    def _message() -> pa.RecordBatch:
        message = {"lsn": 0x90, "xid": None, "transactional": False, "prefix": "p", "content": b"c"}
        return pa.RecordBatch.from_pylist([message], schema=rows.MESSAGES_SCHEMA)


def made_journal(storage: Storage, layout: Layout, relation: RelationVersion) -> Made:
    """Four files: of two transactions, of a large one with a segment, of a message alone, and of one transaction."""
    made = Made(storage, layout, relation)
    made.write(3, 0x1000, 0x1100)
    made.write(4, 0x2000, with_segment=True)
    made.write(5)
    made.write(7, 0x4000)
    made.record(0x4100, 0x1000, (3, 5), (7, 7))
    return made
