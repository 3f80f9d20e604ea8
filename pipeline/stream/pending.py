"""One transaction whose rows make blocks of its own, as far as they are not cut into blocks yet.

This is the cutter's own data: a streamed transaction, a plain one that outgrew a block, or one between BEGIN PREPARE
and PREPARE. The messages are in ``MessageBuffer``'s arrays. A compiled loop may append to these, too.
"""

from __future__ import annotations

from typing import Final

from xidstream.pipeline.exchange import TransactionEnd
from xidstream.pipeline.pg import INVALID_LSN, Lsn, Xid
from xidstream.pipeline.pgoutput.message_buffer import MessageBuffer
from xidstream.pipeline.pgoutput.messages import Commit, Prepare, StreamCommit, StreamPrepare
from xidstream.pipeline.pgoutput.spares import Spares
from xidstream.pipeline.stream.relation_scope import RelationScope
from xidstream.pipeline.stream.stream_events import Committed, Prepared, StreamEvent

CopyData = bytes | memoryview
"""One CopyData message. Gathering copies it."""
NO_EVENTS: Final[tuple[StreamEvent, ...]] = ()


def lsn_of(data: CopyData) -> Lsn:
    """The start LSN of an XLogData message; some messages have 0 (fact 2)."""
    return Lsn(int.from_bytes(bytes(data[1:9]), "big"))


class PendingMessages(MessageBuffer):
    """The messages of one transaction that are not cut yet, and what their blocks and the end need."""

    __slots__ = (
        "_aborted",
        "_newly_aborted",
        "commit_lsn",
        "first_lsn",
        "has_blocks",
        "origin",
        "relations",
        "streamed",
        "xid",
    )

    def __init__(
        self,
        spares: Spares,
        xid: Xid,
        first_lsn: Lsn,
        *,
        commit_lsn: Lsn = INVALID_LSN,
        streamed: bool = False,
    ) -> None:
        super().__init__(spares)
        self.xid = xid
        """The top-level xid."""
        self.first_lsn = first_lsn
        """The LSN of its first message. It names the spill."""
        self.commit_lsn = commit_lsn
        """The LSN of its COMMIT or PREPARE. 0/0 for a streamed transaction, because nobody knows it yet."""
        self.streamed = streamed
        """Whether the server streams it: then its rows name their subtransactions."""
        self.origin: str | None = None
        """The name of the replication origin, where it has one."""
        self.relations: RelationScope | None = None
        """What its own stream has declared. None for a plain transaction, and before the stream's first R or Y."""
        self.has_blocks = False
        """Whether a block of it was cut."""
        self._aborted: list[Xid] = []
        """The subtransactions that were rolled back before the last stream block began, for the next cut."""
        self._newly_aborted: list[Xid] = []
        """The subtransactions that were rolled back since: perhaps not all of one rollback yet."""

    # -- rolled-back subtransactions -------------------------------------------------------------------

    def abort(self, subxid: Xid) -> None:
        """A subtransaction was rolled back, perhaps as one of several: their rows make a suffix together alone."""
        self._newly_aborted.append(subxid)

    def resume(self) -> None:
        """Another stream block begins: the rollback before it is told in full, and goes with the next block."""
        if self._newly_aborted:
            self._aborted += self._newly_aborted
            self._newly_aborted = []

    def take_aborted(self) -> tuple[Xid, ...]:
        """What was rolled back before the last stream block began, and not taken yet."""
        if not self._aborted:
            return ()
        aborted, self._aborted = tuple(self._aborted), []
        return aborted

    def _left_to_abort(self) -> tuple[Xid, ...]:
        """At the end, if any block is there to be told."""
        self.resume()
        return self.take_aborted() if self.has_blocks else ()

    # -- ends ------------------------------------------------------------------------------------------

    def committed(self, message: Commit | StreamCommit) -> Committed:
        end = TransactionEnd(
            xid=self.xid,
            commit_lsn=message.commit_lsn,
            end_lsn=message.end_lsn,
            commit_timestamp_us=message.commit_timestamp_us,
            streamed=self.streamed,
            origin=self.origin,
        )
        return Committed(end, self.has_blocks, self._left_to_abort())

    def prepared(self, message: Prepare | StreamPrepare) -> Prepared:
        return Prepared(
            xid=message.xid,
            gid=message.gid,
            prepare_lsn=message.prepare_lsn,
            end_lsn=message.end_lsn,
            streamed=self.streamed,
            origin=self.origin,
            has_blocks=self.has_blocks,
            aborted=self._left_to_abort(),
        )
