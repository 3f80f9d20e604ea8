"""The two entry points: a block of raw messages to Arrow, for transaction blocks and for plain blocks.

Called by the buffer (in a buffer actor's process) and by nobody else. A pure function of its arguments. What
is returned owns its memory: nothing refers to ``payload``, which may then be released from the object store.

Kernels release the GIL, so the actor's other thread can answer while a block is decoded.

Rejected: a loop over messages that builds Python objects, because it costs about twenty times as much; and a kernel
generated for each relation, because each new table would wait for a compilation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from xidstream.pipeline.decode import codes, scan
from xidstream.pipeline.decode.bad_values import BlockStory, scan_fault
from xidstream.pipeline.decode.columns import Values
from xidstream.pipeline.decode.deliverable import deliverable
from xidstream.pipeline.decode.table_decoder import DecodedTable, RowIndex, decode_table
from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.exchange import Undeliverable
from xidstream.pipeline.parked import BadTable, SkippedTransaction
from xidstream.pipeline.pg import POSTGRES_EPOCH_UNIX_US
from xidstream.pipeline.pg_rules import HEARTBEAT_PREFIX
from xidstream.pipeline.poison import NO_SKIPS, BadRows, Skips, skipped_among
from xidstream.pipeline.schema import RelationVersion
from xidstream.pipeline.schema.rows import MESSAGES_SCHEMA, TRANSACTIONS_SCHEMA, Stamp


@dataclass(frozen=True)
class DecodedBlock:
    """A transaction block. ``tables`` are those with rows, in the order of their relids.

    ``messages`` has rows.MESSAGES_SCHEMA, and is None if there are none. Its ``commit_lsn`` is null, and is filled
    when the transaction is sealed. The rows, in the order of their ordinals, form runs that have one subxid each:
    ``run_subxid: uint32[k]`` and ``run_first: int64[k]`` (the first ordinal). ``n_rows`` counts preimages and truncates
    as well. ``notes`` name the rows that cannot be delivered, in case the transaction keeps them. There is nothing of
    rows that were left out.
    """

    tables: tuple[DecodedTable, ...]
    messages: pa.RecordBatch | None
    run_subxid: npt.NDArray[np.uint32]
    run_first: npt.NDArray[np.int64]
    n_rows: int
    notes: tuple[BadRows, ...] = ()


@dataclass(frozen=True)
class DecodedPlainBlock:
    """A plain block. ``stamp`` has every transaction of the block; ``owner`` in the tables is an index into it.

    ``transactions`` (rows.TRANSACTIONS_SCHEMA) has those with rows or messages. In ``messages``, ``commit_lsn`` and
    ``xid`` are null for messages that are not transactional.

    ``undeliverable`` is the first of its transactions that cannot be delivered. The other fields then have nothing of
    that transaction, and nothing of what follows it. ``skipped`` are the transactions of ``slot skip``. The other
    fields have nothing of these either. ``bad_tables`` are those of which rows were left out.
    """

    tables: tuple[DecodedTable, ...]
    messages: pa.RecordBatch | None
    n_rows: int
    transactions: pa.RecordBatch
    stamp: Stamp
    undeliverable: Undeliverable | None = None
    skipped: tuple[SkippedTransaction, ...] = ()
    bad_tables: tuple[BadTable, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether all that the block holds can be delivered."""
        return self.undeliverable is None and not self.skipped and not self.bad_tables


def decode_transaction_block(
    payload: npt.NDArray[np.uint8],
    lengths: npt.NDArray[np.int32],
    relations: Mapping[int, RelationVersion],
    *,
    streamed: bool,
    xid: int,
    first_ordinal: int,
    aborted: Collection[int] = (),
    take: Callable[[DecodedTable], None] | None = None,
) -> DecodedBlock:
    """Decode a block that holds only I U D T M of the transaction ``xid``.

    Rows of ``aborted`` subtransactions are checked, left out, and not counted.

    If ``take`` is given, it gets each table as soon as that is decoded, and ``tables`` of the result is empty. A
    decoded table of one row takes 10 KB, so a block of thousands of tables must not be in memory decoded as a whole.

    ``payload: uint8[n]`` has CopyData messages with their headers, ``lengths: int32[m]`` the length of each. Rows get
    ordinals from ``first_ordinal``. Raises MalformedMessage, ProtocolViolation, Unsupported (binary values), UsageError
    (lengths that do not add up to the payload).
    """
    block = _Block(payload, lengths, relations)
    block.scan(scan.TRANSACTION_BLOCK, streamed=streamed, xid=xid, first_ordinal=first_ordinal)
    if aborted:
        block.drop_owners(aborted, first_ordinal)
    owner = block.rows.owner
    n = len(owner)
    firsts = np.flatnonzero(np.concatenate((np.ones(min(n, 1), np.bool_), owner[1:] != owner[:-1])))
    run_subxid = owner[firsts]
    tables = block.tables(take)
    messages = None
    if len(block.logical):
        transactional = np.ones(len(block.logical), np.bool_)
        xids = pa.array(np.full(len(block.logical), xid, np.int64))
        messages = block.messages(pa.nulls(len(block.logical), pa.int64()), xids, transactional)
    return DecodedBlock(
        tables=tables,
        messages=messages,
        run_subxid=run_subxid,
        run_first=firsts + np.int64(first_ordinal),
        n_rows=n,
        notes=tuple(block.notes),
    )


def decode_plain_block(
    payload: npt.NDArray[np.uint8],
    lengths: npt.NDArray[np.int32],
    relations: Mapping[int, RelationVersion],
    skips: Skips = NO_SKIPS,
    take: Callable[[DecodedTable, Stamp], None] | None = None,
    *,
    parks: bool = False,
) -> DecodedPlainBlock:
    """Decode a block of whole plain transactions, B [O] (I U D T M)* C, and of messages between them.

    Arguments and errors are those of ``decode_transaction_block``. Ordinals count from 0 in each transaction. Nothing
    is returned of the transactions in ``skips``. ``parks``: a table that cannot be delivered is left out from there
    on, and the others go on.

    If ``take`` is given, it gets each table with the stamp of the block, and ``tables`` of the result is empty. There
    is one exception: if not all of the block can be delivered (``is_whole``), ``tables`` has what can be, and the
    caller must forget what ``take`` got.
    """
    block = _Block(payload, lengths, relations)
    block.scan(scan.PLAIN_BLOCK, streamed=False, xid=0, first_ordinal=0)
    begun = block.transactions
    stamp = Stamp(
        commit_lsn=np.ascontiguousarray(begun[:, codes.TX_COMMIT_LSN]),
        commit_timestamp_us=begun[:, codes.TX_TIMESTAMP] + POSTGRES_EPOCH_UNIX_US,
        xid=np.ascontiguousarray(begun[:, codes.TX_XID]),
    )
    logical = block.logical
    transactional = logical[:, codes.LOGICAL_TRANSACTIONAL] == 1
    message_owner = logical[transactional, codes.LOGICAL_OWNER]
    # This reads the row arrays, so it comes before the tables, which consume them.
    transactions = block.transactions_batch(stamp, message_owner)
    is_skipped = skipped_among(skips, stamp.xid, stamp.commit_lsn)
    if take is not None and not is_skipped.any():
        block.tables(functools.partial(_take_stamped, take, stamp))
        if block.notes:
            # Some rows must be left out, which is known only now. It is rare, so it may cost a second decoding.
            return decode_plain_block(payload, lengths, relations, skips, parks=parks)
        tables: tuple[DecodedTable, ...] = ()
    else:
        tables = block.tables()
    messages = None
    if len(logical):
        # A message between transactions has the owner -1, or the transaction before it. The mask covers both.
        commit_lsn, xid = np.zeros(len(logical), np.int64), np.zeros(len(logical), np.int64)
        commit_lsn[transactional] = stamp.commit_lsn[message_owner]
        xid[transactional] = stamp.xid[message_owner]
        messages = block.messages(
            pa.array(commit_lsn, mask=~transactional), pa.array(xid, mask=~transactional), transactional
        )
    decoded = DecodedPlainBlock(tables, messages, len(block.rows), transactions, stamp)
    if not (block.notes or is_skipped.any()):
        return decoded
    return deliverable(
        decoded,
        begun[:, codes.TX_END_LSN],
        block.notes,
        is_skipped,
        message_owner=logical[:, codes.LOGICAL_OWNER],
        is_transactional=transactional,
        parks=parks,
    )


class _Block:
    """One block while it is decoded: the checked arguments, and then what ``scan`` found."""

    rows: RowIndex
    transactions: npt.NDArray[np.int64]  # [n, 6], see scan
    logical: npt.NDArray[np.int64]  # [n, 8], see scan

    def __init__(
        self,
        payload: npt.NDArray[np.uint8],
        lengths: npt.NDArray[np.int32],
        relations: Mapping[int, RelationVersion],
    ) -> None:
        self._payload = np.require(payload, np.uint8, ["C", "A"])
        """All messages, one after the other."""
        self._lengths = np.require(lengths, np.int32, ["C", "A"])
        """Each message's bytes; together they are all of ``_payload``."""
        if len(payload) >= 1 << 31:
            raise UsageError(f"a block of {len(payload)} bytes: its places must fit in 31 bits")
        if int(self._lengths.sum(dtype=np.int64)) != len(payload):
            raise UsageError("the lengths of a block do not add up to its payload")
        self._relations = tuple(relations[relid] for relid in sorted(relations))
        """The relation versions, by ascending relid."""
        self._relids = np.array(sorted(relations), np.int64)
        """``int64[n_relations]``: the relid of each of ``_relations``."""
        self._story = BlockStory(self._payload, self._lengths)
        """The facts of the block for an error's text."""
        self.notes: list[BadRows] = []
        """The rows that cannot be delivered."""

    def scan(self, moves: npt.NDArray[np.uint8], *, streamed: bool, xid: int, first_ordinal: int) -> None:
        error = np.zeros(4, np.int64)
        counts = np.zeros(3, np.int64)
        code = scan.measure(self._payload, self._lengths, streamed, counts, error)
        if code < 0:
            raise scan_fault(code, error, self._story, self._relations)
        rows = RowIndex.empty(int(counts[0]))
        self.transactions = np.empty((int(counts[1]), 6), np.int64)
        self.logical = np.empty((int(counts[2]), 8), np.int64)
        n_columns = np.array([len(relation.columns) for relation in self._relations], np.int64)
        code = scan.scan(
            self._payload,
            self._lengths,
            moves,
            streamed,
            xid,
            first_ordinal,
            self._relids,
            n_columns,
            rows.change,
            rows.form,
            rows.relation,
            rows.owner,
            rows.ordinal,
            rows.cursor,
            rows.message,
            self.transactions,
            self.logical,
            error,
        )
        if code < 0:
            raise scan_fault(code, error, self._story, self._relations)
        self.rows = rows.pick(slice(code))
        if len(self.logical):
            self._drop_heartbeats()

    def _drop_heartbeats(self) -> None:
        """They were written to be confirmed, and for no sink. What a transaction has beside them stays.

        A heartbeat is transactional and empty. So a message of somebody else under our prefix is delivered if it says
        anything.
        """
        logical, prefix = self.logical, np.frombuffer(HEARTBEAT_PREFIX, np.uint8)
        ours = logical[:, codes.LOGICAL_PREFIX_LENGTH] == len(prefix)
        ours &= (logical[:, codes.LOGICAL_TRANSACTIONAL] == 1) & (
            logical[:, codes.LOGICAL_CONTENT_LENGTH] == 0
        )
        starts = logical[ours, codes.LOGICAL_PREFIX_START]
        ours[ours] = (self._payload[starts[:, None] + np.arange(len(prefix))] == prefix).all(axis=1)
        self.logical = logical[~ours]

    def drop_owners(self, owners: Collection[int], first_ordinal: int) -> None:
        """Forget the rows of ``owners``, and number the others without a gap."""
        gone = np.isin(self.rows.owner, np.fromiter(owners, np.uint32, len(owners)))
        kept = self.rows.pick(np.flatnonzero(~gone))
        self.rows = dataclasses.replace(
            kept, ordinal=np.arange(first_ordinal, first_ordinal + len(kept), dtype=np.int64)
        )

    def tables(self, take: Callable[[DecodedTable], None] | None = None) -> tuple[DecodedTable, ...]:
        """Decode the rows. This consumes the row arrays, and adds to ``notes`` what cannot be delivered.

        If ``take`` is given, it gets each table, and no table is kept here.
        """
        if take is None:
            return tuple(self._each_table())
        for table in self._each_table():
            take(table)
        return ()

    def _each_table(self) -> Iterator[DecodedTable]:
        which = self.rows.relation
        n_rows = np.bincount(which, minlength=len(self._relations))
        used = np.flatnonzero(n_rows).tolist()
        if len(used) == 1:
            picked: Iterator[RowIndex] = iter([self.rows])
        else:
            order = np.argsort(which, kind="stable")
            ends = np.cumsum(n_rows)
            picked = (self.rows.pick(order[ends[r] - n_rows[r] : ends[r]]) for r in used)
        for r, rows in zip(used, picked, strict=True):
            table = self._table(r, rows)
            if table is not None:
                yield table

    def _table(self, r: int, rows: RowIndex) -> DecodedTable | None:
        return decode_table(self._payload, self._relations[r], rows, self._story, self.notes)

    def _piece(self, table: npt.NDArray[np.int64], start: int, length: int) -> Values:
        starts = table[:, start].astype(np.int32)
        lengths = table[:, length].astype(np.int32)
        present = lengths >= 0
        n_bytes = int(lengths[present].sum(dtype=np.int64))
        return Values(self._payload, starts, lengths, n_bytes, len(lengths) - int(np.count_nonzero(present)))

    def messages(
        self, commit_lsn: pa.Array, xid: pa.Array, transactional: npt.NDArray[np.bool_]
    ) -> pa.RecordBatch:
        """The logical messages of the block."""
        logical = self.logical
        prefix = self._piece(logical, codes.LOGICAL_PREFIX_START, codes.LOGICAL_PREFIX_LENGTH).labels()
        content = self._piece(logical, codes.LOGICAL_CONTENT_START, codes.LOGICAL_CONTENT_LENGTH).binaries()
        lsn = pa.array(np.ascontiguousarray(logical[:, codes.LOGICAL_LSN]))
        columns = [commit_lsn, lsn, xid, pa.array(transactional), prefix, content]
        return pa.RecordBatch.from_arrays(columns, schema=MESSAGES_SCHEMA)

    def transactions_batch(self, stamp: Stamp, message_owner: npt.NDArray[np.int64]) -> pa.RecordBatch:
        """The transactions that have rows or messages; ``message_owner`` indexes those with messages."""
        n = len(self.transactions)
        owner = self.rows.owner
        n_rows = np.bincount(owner, minlength=n)
        full = n_rows > 0
        full[message_owner] = True
        kept = np.flatnonzero(full)
        origin = self._piece(self.transactions, codes.TX_ORIGIN_START, codes.TX_ORIGIN_LENGTH).labels()
        timestamps = pa.array(stamp.commit_timestamp_us[kept]).cast(
            TRANSACTIONS_SCHEMA.field("commit_timestamp").type
        )
        columns = [
            pa.array(stamp.xid[kept]),
            pa.array(stamp.commit_lsn[kept]),
            pa.array(self.transactions[kept, codes.TX_END_LSN]),
            timestamps,
            pa.nulls(len(kept), pa.string()),
            origin.take(pa.array(kept)),
            pa.array(np.zeros(len(kept), np.bool_)),
            pa.array(n_rows[kept]),
            self._tables_of_transactions(n).take(pa.array(kept)),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=TRANSACTIONS_SCHEMA)

    def _tables_of_transactions(self, n: int) -> pa.Array:
        """list<string>[n]: each transaction's tables, sorted; empty where it has no rows."""
        names = sorted({relation.name for relation in self._relations})
        rank_of = {name: i for i, name in enumerate(names)}
        rank = np.array([rank_of[relation.name] for relation in self._relations], np.int64)
        pairs = self.rows.owner * np.int64(max(len(names), 1)) + rank[self.rows.relation]
        # Rows of one table mostly stand together, so this removes most repetitions before the sort.
        pairs = np.unique(pairs[np.flatnonzero(np.diff(pairs, prepend=-1))])
        offsets = np.zeros(n + 1, np.int32)
        np.cumsum(np.bincount(pairs // max(len(names), 1), minlength=n), out=offsets[1:])
        values = pa.array(names, pa.string()).take(pa.array(pairs % max(len(names), 1)))
        return pa.ListArray.from_arrays(pa.array(offsets), values)


def _take_stamped(take: Callable[[DecodedTable, Stamp], None], stamp: Stamp, table: DecodedTable) -> None:
    take(table, stamp)


def warm_up() -> None:
    """Run every kernel once, so that the first block pays for no loading or compilation.

    Kernels have explicit signatures, so the import of this package compiles them, or loads them from numba's cache on
    disk. Little is left for a first call to do, and this function makes that call.
    """
    nothing = np.empty(0, np.uint8)
    decode_plain_block(nothing, np.empty(0, np.int32), {})
