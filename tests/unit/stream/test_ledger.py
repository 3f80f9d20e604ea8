"""The ledger of open transactions: who opens a record, who removes it, and what it keeps."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from tests.pgoutput import writer
from tests.pgoutput.messages import ColumnKind, Insert, Message, TupleColumn, TupleData
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.pgoutput.messages import (
    Relation,
    RelationColumn,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
)
from xidstream.pipeline.schema import RelationVersion, ReplicaIdentity
from xidstream.pipeline.stream import Block, StreamCutter, StreamEvent, TransactionBlock, UsedRelations
from xidstream.pipeline.stream.ledger import TransactionLedger, TransactionRecord

XID, LSN = Xid(740), Lsn(0x100)
R = Relation(XID, 5, "public", "t", "d", (RelationColumn(True, "id", 23, -1),))
ROW = Insert(XID, 5, TupleData((TupleColumn(ColumnKind.TEXT, b"1"),)))
ENDS: dict[str, Message] = {
    "commit": StreamCommit(XID, Lsn(0x200), Lsn(0x208), 0),
    "prepare": StreamPrepare(Lsn(0x200), Lsn(0x208), 0, XID, "g"),
    "abort": StreamAbort(XID, XID),
}


class Read:
    """The reading thread's part of the reader."""

    def __init__(self) -> None:
        self.ledger = TransactionLedger()
        self._cutter = StreamCutter(
            block_bytes=1 << 20, pending_limit_bytes=1 << 20, parallel=False, ledger=self.ledger
        )
        self.events: list[StreamEvent] = []

    def take(self, *messages: Message) -> None:
        for message in messages:
            self.events += self._cutter.feed(writer.xlog_data(LSN, writer.write(message)))

    def cut_open(self) -> None:
        self.events += self._cutter.flush_open()


def test_a_record_has_all_that_one_stream_is_while_it_is_open() -> None:
    read = Read()
    read.take(StreamStart(XID, True), R, ROW, StreamStop())
    (record,) = read.ledger.records()
    assert record is read.ledger.get(XID) and record in read.ledger.streams
    assert record.xid == XID and record.stream_lsn == LSN
    pending = record.pending
    assert pending is not None and pending.n_messages == 1
    assert pending.relations is not None and list(pending.relations.heads) == [5]
    read.take(StreamAbort(XID, Xid(741)), StreamStart(XID, False), ROW, StreamStop())
    assert read.ledger.records() == [record] and record.pending is pending
    read.take(ENDS["commit"])
    block = read.events[0]
    assert isinstance(block, TransactionBlock) and block.aborted == (741,)


@pytest.mark.parametrize("end", ENDS)
def test_the_reading_thread_removes_what_it_cut_nothing_of_and_leaves_the_rest_to_the_sending_one(
    end: str,
) -> None:
    read = Read()
    read.take(StreamStart(XID, True), StreamStop(), ENDS[end])
    assert not read.ledger.records() and not read.ledger.streams
    read.take(StreamStart(XID, True), R, ROW, StreamStop())
    read.cut_open()
    read.take(ENDS[end])
    (record,) = read.ledger.records()
    assert record.stream_lsn is None and record.pending is None and not read.ledger.streams


def test_a_stream_that_begins_again_has_a_record_in_which_nothing_old_counts() -> None:
    read = Read()
    read.take(StreamStart(XID, True), R, ROW, StreamStop())
    read.cut_open()
    read.take(ENDS["commit"])
    (old,) = read.ledger.records()
    old.note(TransactionBlock(XID, _block(UsedRelations({})), True, LSN))
    read.take(StreamStart(XID, True), StreamStop())
    (new,) = read.ledger.records()
    assert new is not old and new.n_bytes == 0 and list(read.ledger.streams) == [new]


def test_what_is_buffered_is_open_from_its_first_block_until_its_end_has_a_ticket() -> None:
    record = TransactionLedger().of(XID)
    record.buffer = 0
    assert not record.is_buffered, "a PREPARE without a row: an account called it as old as the machine"
    assert [record.next_step(), record.next_step()] == [0, 1] and record.is_buffered
    record.ticket = -1
    assert not record.is_buffered


def test_of_the_relations_of_an_open_transaction_the_names_are_kept_and_no_version() -> None:
    """One of ten thousand tables kept the columns of all, for as long as it was open."""
    record = TransactionRecord(Xid(700))
    versions = [RelationVersion(i, "public", f"t{i % 2}", ReplicaIdentity.DEFAULT, ()) for i in range(4)]
    kept = [weakref.ref(version) for version in versions]
    for number, version in enumerate(versions):
        record.note(TransactionBlock(Xid(700), _block(UsedRelations({number: version})), True, Lsn(1)))
    del versions, version
    gc.collect()
    assert record.tables == {"public.t0", "public.t1"} and record.n_bytes == 4
    assert not any(ref() for ref in kept)


def _block(relations: UsedRelations) -> Block:
    return Block(np.zeros(1, np.uint8), np.ones(1, np.int32), relations)
