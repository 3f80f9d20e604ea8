"""What a buffer does: raw blocks in, Arrow out. It holds a transaction from its first block to its end.

It decodes (``pipeline.decode``), holds (``pipeline.transactions``) and spills (``pipeline.storage``). At a
transaction's end it gives a ``Sealed``: references to the Arrow bytes that ``put`` stored, and names of segments. In
production the bytes belong to the buffer's process and die with it: nothing is confirmed that only a buffer holds, and
a lost buffer costs a new epoch, no row.

It is called from one thread, in the order of the stream: ``actors.xid_buffer`` makes a Ray actor of it, and tests call
it directly. The memory limit is the whole buffer's, however many transactions it serves at a time. One of several may
move to another buffer: ``give_up`` there, ``adopt`` here.

Invariants:

- A call that fails may leave a transaction without a block or a group, and the calls after it are on their way
  already. So a buffer that has failed once fails everything from then on, with the same error, and never seals what is
  torn. (A change that cannot be decoded is no failure: it is noted, and judged at the commit, ``pipeline.poison``.)
- No call may be missing. Ray drops one whose argument is lost (what another buffer gave up before it died) without
  telling this buffer, and goes on with those after it. So each call says how many blocks of its transaction came
  before it (``step``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pyarrow as pa

from xidstream.pipeline.errors import ComponentLost
from xidstream.pipeline.exchange import (
    ArrowRef,
    BufferedTransaction,
    MessagePart,
    PreparedTransaction,
    Sealed,
    Segment,
    SpilledMessages,
)
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.packs import PartsBuilder
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.schema import RelationVersion, rows
from xidstream.pipeline.schema.rows import Stamp
from xidstream.pipeline.storage.prepared import write_prepared
from xidstream.pipeline.storage.segment_file import (
    shorten_segment,
    write_messages,
    write_segment,
    write_side_by_side,
)
from xidstream.pipeline.storage.storage import Storage
from xidstream.pipeline.transactions.buffer_calls import (
    BlockHead,
    BufferSettings,
    End,
    RawBlock,
)
from xidstream.pipeline.transactions.groups import is_too_large_for_memory
from xidstream.pipeline.transactions.memory import MOST_CHUNKS, BufferMemory, take_last_segments
from xidstream.pipeline.transactions.messages import message_parts
from xidstream.pipeline.transactions.relation_cache import RelationCache
from xidstream.pipeline.transactions.transaction import OpenTransaction

if TYPE_CHECKING:
    from xidstream.pipeline.decode.table_decoder import DecodedTable
    from xidstream.pipeline.stream import Prepared


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _unless_failed(method: _Method) -> _Method:
    """Raise the buffer's first error again, instead of going on after it."""

    @functools.wraps(method)
    def guarded(self: TransactionBuffer, *args: Any, **kwargs: Any) -> Any:
        if self._failure is not None:
            raise self._failure
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            self._failure = error
            raise

    return cast(_Method, guarded)


Put = Callable[[pa.Table | pa.RecordBatch], ArrowRef]
"""Stores rows or messages in contract layout and returns the reference by which the sink reads them."""


class TransactionBuffer:
    """``put`` stores what leaves the buffer in memory."""

    def __init__(self, settings: BufferSettings, put: Put) -> None:
        self._put = put
        self._storage = Storage(settings.storage_uri)
        """Where segments go."""
        self._layout = settings.layout
        """The keys of this epoch."""
        self._skips = settings.skips
        self._bind_late = settings.bind_late
        self._parks = settings.parks
        self._memory = BufferMemory(settings.memory_bytes)
        """Decides what has to be spilled, and when."""
        self._open: dict[Xid, OpenTransaction] = {}
        """The open transactions, by their top-level xid."""
        self._relation_cache = RelationCache()
        """The relation versions that calls name by number."""
        self._failure: BaseException | None = None
        """The first error: every later call fails with it."""
        # Not at the top: the reader imports this class, too, and must not wait for numba at each recovery.
        from xidstream.pipeline import decode

        decode.warm_up()
        self._decode = decode

    @_unless_failed
    def decode_plain(
        self,
        numbers: tuple[int, ...],
        new_versions: Mapping[int, RelationVersion],
        block: RawBlock,
    ) -> Sealed:
        """Whole small transactions, decoded and released at once; nothing of them stays here."""
        self._relation_cache.exchange(numbers, new_versions)
        reach("decoding_block")
        relations = self._relation_cache.relations(numbers)
        parts = PartsBuilder(self._put, len(relations))
        decoded = self._decode.decode_plain_block(
            *block, relations, self._skips, functools.partial(_release_plain, parts), parks=self._parks
        )
        reach("block_decoded")
        if not decoded.is_whole:
            parts = PartsBuilder(self._put, len(relations))
            for table in decoded.tables:
                _release_plain(parts, table, decoded.stamp)
        memory = parts.finish()
        messages = self._plain_messages(decoded.messages)
        return Sealed(
            transactions=decoded.transactions,
            memory=memory,
            segments=(),
            messages=tuple(messages),
            n_rows=decoded.n_rows,
            n_bytes=sum(p.n_bytes for p in memory) + sum(p.n_bytes for p in messages),
            undeliverable=decoded.undeliverable,
            skipped=decoded.skipped,
            bad_tables=decoded.bad_tables,
        )

    def _plain_messages(self, messages: pa.RecordBatch | None) -> list[MessagePart]:
        if messages is None:
            return []
        if not is_too_large_for_memory(messages.nbytes):
            return message_parts([messages], messages.nbytes, self._put)
        # A message between transactions that is larger than a block. Its LSN is its own, and 0 is no transaction's xid.
        key = self._layout.messages_key(Xid(0), Lsn(messages.column("lsn")[0].as_py()), 0)
        reach("writing_segment")
        return [SpilledMessages(write_messages(self._storage, key, [messages]))]

    @_unless_failed
    def add_blocks(
        self,
        heads: Sequence[BlockHead],
        new_versions: Mapping[int, RelationVersion],
        blocks: Sequence[RawBlock],
    ) -> list[BufferedTransaction]:
        """Take blocks of one or several transactions, in this order. ``new_versions``: those of the
        versions that the heads name which this buffer does not remember."""
        self._learn(heads, new_versions)
        return self._add_all(heads, blocks)

    def add_and_commit(
        self,
        heads: Sequence[BlockHead],
        new_versions: Mapping[int, RelationVersion],
        blocks: Sequence[RawBlock],
        ends: Sequence[End],
    ) -> Iterator[Sealed | list[BufferedTransaction]]:
        """``add_blocks`` with the commits of some of the transactions in between, in the order of the stream. Yields a
        ``Sealed`` for each end, and the list behind them. Ray keeps what was yielded before an error: a block that
        cannot be decoded takes nothing with it that was committed before."""
        self._learn(heads, new_versions)
        held: list[BufferedTransaction] = []
        for each in ends:
            held += self._add_all(heads[len(held) : each.n_blocks], blocks[len(held) : each.n_blocks])
            yield self._commit(each)
        held += self._add_all(heads[len(held) :], blocks[len(held) :])
        yield held

    @_unless_failed
    def _learn(self, heads: Sequence[BlockHead], new_versions: Mapping[int, RelationVersion]) -> None:
        self._relation_cache.exchange([number for head in heads for number in head.relations], new_versions)

    @_unless_failed
    def _add_all(self, heads: Sequence[BlockHead], blocks: Sequence[RawBlock]) -> list[BufferedTransaction]:
        return [self._add(*each) for each in zip(heads, blocks, strict=True)]

    def _add(self, head: BlockHead, block: RawBlock) -> BufferedTransaction:
        transaction = self._whole(head.xid, head.step)
        if transaction is None:
            transaction = self._open[head.xid] = OpenTransaction(
                head.xid, head.first_lsn, streamed=head.streamed
            )
        self._roll_back(transaction, head.aborted)
        reach("decoding_block")
        decoded = self._decode.decode_transaction_block(
            *block,
            self._relation_cache.relations(head.relations),
            streamed=head.streamed,
            xid=head.xid,
            first_ordinal=transaction.n_rows,
            aborted=head.aborted,
            take=functools.partial(self._add_table, transaction),
        )
        transaction.add(decoded.messages, (decoded.run_subxid, decoded.run_first), decoded.n_rows)
        transaction.note(decoded.notes)
        reach("block_decoded")
        held = self._hold(transaction)
        self._shorten(transaction, transaction.due_cuts())
        return held

    def _add_table(self, transaction: OpenTransaction, table: DecodedTable) -> None:
        transaction.add_rows(table.relation, table.batch)
        self._spill_what_is_too_much()

    @_unless_failed
    def give_up(self, xid: Xid, step: int) -> OpenTransaction:
        """All of an open transaction, for the buffer that goes on with it."""
        transaction = self._started(xid, step)
        del self._open[xid]
        return transaction

    @_unless_failed
    def adopt(self, transaction: OpenTransaction) -> BufferedTransaction:
        """Go on with a transaction that another buffer gave up."""
        self._open[transaction.xid] = transaction
        return self._hold(transaction)

    def _hold(self, transaction: OpenTransaction) -> BufferedTransaction:
        self._spill_what_is_too_much()
        return BufferedTransaction(
            transaction.xid,
            transaction.n_rows,
            transaction.n_bytes,
            transaction.n_segments,
            transaction.n_bytes_spilled,
        )

    def _spill_what_is_too_much(self) -> None:
        while (spill := self._memory.next_spill(self._open.values())) is not None:
            self._spill(spill.transaction, spill.relation)

    @_unless_failed
    def abort(self, xid: Xid, step: int) -> None:
        """Forget it, in memory and in storage."""
        transaction = self._started(xid, step)
        del self._open[xid]
        self._storage.delete(transaction.segment_keys())

    @_unless_failed
    def _commit(self, each: End) -> Sealed:
        """Metadata alone, but for what is still in memory (bounded by the setting, whatever was written), and for the
        segments that a rollback has cut since they were written (one at most of each relation version)."""
        end = each.end
        transaction = self._started(end.xid, each.step)
        self._roll_back(transaction, each.aborted)
        reach("sealing")
        is_skipped = (end.xid, end.commit_lsn) in self._skips
        if not is_skipped and (self._parks or transaction.poison() is None):
            self._shorten(transaction, transaction.cuts())
            if self._bind_late:
                self._write_last_segments(transaction)
        written = transaction.segment_keys()
        sealed = transaction.seal(end, self._put, self._skips, parks=self._parks)
        reach("sealed")
        del self._open[end.xid]
        self._delete_unnamed(written, set(sealed.stored_keys()))
        return sealed

    @_unless_failed
    def prepare(self, prepared: Prepared, step: int) -> PreparedTransaction:
        """Make a transaction durable: all its rows and messages in storage, and its record beside them."""
        transaction = self._whole(prepared.xid, step)
        if transaction is None:
            transaction = OpenTransaction(prepared.xid, prepared.prepare_lsn, streamed=prepared.streamed)
        self._roll_back(transaction, prepared.aborted)
        for relation in list(transaction.spillable()):
            self._spill(transaction, relation)
        self._shorten(transaction, transaction.cuts())
        record = transaction.prepared(prepared.gid, prepared.prepare_lsn, prepared.end_lsn, prepared.origin)
        reach("writing_prepared")
        write_prepared(self._storage, self._layout, record)
        reach("prepared_written")
        self._open.pop(prepared.xid, None)
        self._delete_unnamed(transaction.segment_keys(), set(record.stored_keys()))
        return record

    def _delete_unnamed(self, keys: Iterable[str], given: set[str]) -> None:
        """Delete the segments of ``keys`` that are not in ``given``: their rows cannot be delivered, or were given
        up."""
        self._storage.delete([key for key in keys if key not in given])

    def _roll_back(self, transaction: OpenTransaction, aborted: Collection[int]) -> None:
        self._storage.delete(transaction.roll_back(aborted))

    def _shorten(self, transaction: OpenTransaction, cuts: Iterable[tuple[Segment, int]]) -> None:
        """Carry out cuts that were noted."""
        for segment, end in cuts:
            reach("shortening_segment")
            shorter = shorten_segment(self._storage, segment, end, self._next_key(transaction))
            reach("segment_shortened")
            transaction.shortened(segment, shorter)
            self._storage.delete([segment.key])

    def _spill(self, transaction: OpenTransaction, relation: RelationVersion | None) -> None:
        if relation is None:
            reach("writing_segment")
            key = self._layout.messages_key(transaction.xid, transaction.first_lsn, transaction.n_segments)
            file = write_messages(self._storage, key, transaction.take_messages())
            transaction.messages_spilled(file)
            return
        # Before the next one of this version is written: so there is never more than one to shorten at the end.
        self._shorten(transaction, transaction.cuts(relation))
        batches = transaction.take_group(relation)
        segment = write_segment(
            self._storage, self._next_key(transaction), relation, transaction.xid, batches
        )
        transaction.spilled(segment, batches)

    def _write_last_segments(self, transaction: OpenTransaction) -> None:
        chunks = [
            (self._next_key(transaction, ahead), *chunk)
            for ahead, chunk in enumerate(take_last_segments(transaction))
        ]
        segments = write_side_by_side(self._storage, transaction.xid, chunks, MOST_CHUNKS)
        for segment, (_, _, batches) in zip(segments, chunks, strict=True):
            transaction.spilled(segment, batches)

    def _next_key(self, transaction: OpenTransaction, ahead: int = 0) -> str:
        return self._layout.segment_key(
            transaction.xid, transaction.first_lsn, transaction.n_segments + ahead
        )

    def _whole(self, xid: Xid, step: int) -> OpenTransaction | None:
        """The transaction after its first ``step`` blocks; None before the first."""
        transaction = self._open.get(xid)
        n_steps = 0 if transaction is None else transaction.n_steps
        if n_steps != step:
            raise ComponentLost(
                f"the buffer of transaction {int(xid)} has got {n_steps} of its first {step} blocks"
            )
        return transaction

    def _started(self, xid: Xid, step: int) -> OpenTransaction:
        transaction = self._whole(xid, step)
        assert transaction is not None, "the pool passes on nothing before the first block"
        return transaction


def _release_plain(parts: PartsBuilder, table: DecodedTable, stamp: Stamp) -> None:
    released = rows.release(table.batch, table.relation, stamp, plain=True)
    parts.add(table.relation, pa.Table.from_batches([released]))
