"""Which run owns a root of tables, and which history it has: what a run may add to what earlier runs left there.

Every commit carries, besides its watermarks, two more of their kind. ``<application id>/owner`` is the
number of the run's hold on the slot (``Tenure``), and ``<application id>/timeline`` is the server's timeline. They are
compared whenever a table is opened:

- If the owner is higher, another run has taken the slot over, and this run yields (Superseded).
- If the owner is lower, all that it wrote must lie within what the server had when *this* run opened the slot. On the
  same timeline that is the end of the WAL. On an earlier timeline it is the point where the server's history left it.
  Anything beyond was read from another server than this one, which was restored, or failed over, to older WAL
  (SinkDiverged).

A snapshot counts like what the stream brought: it has what the server had written by then, flushed, and a standby that
is promoted may lack the last of it.

Positions alone do not reveal a server whose WAL has grown past the watermark again, on the same timeline, before the
run started. So a transaction at or below a watermark, which would be dropped as a repetition, must be in the table,
with its xid and commit timestamp. This costs something only after a crash, because nothing else is sent twice.
Transactions without rows are not compared: the logical messages of a rolled-back subtransaction are there or not,
depending on whether it was streamed.

Rejected: fingerprints of the WAL, which would have to be read at each confirmation. Also rejected: the slot's own
position, which may go back after an immediate stop.

A root that has nothing of this slot may have the log of the same slot and database of *another server*: after
``pg_upgrade`` the system identifier is a new one. Its rows would come a second time, with the snapshots of the new
server, and neither log could be told from the other. So such a root is refused (``check_server``). To take the old log
over was rejected: what committed between its end and the upgrade is in no WAL any more, and nothing says that there
was nothing. ``pg_upgrade`` itself checks it from 17 on, and tells nobody.

The sinks of tables call this, on the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from xidstream.pipeline.errors import ANOTHER_STORAGE, SinkDiverged, Superseded
from xidstream.pipeline.exchange import Tenure
from xidstream.pipeline.log_tables.locations import cut_id
from xidstream.pipeline.log_tables.log_table import LogTableWriter
from xidstream.pipeline.pg import Lsn

_KEYS = ("commit_lsn", "xid", "commit_timestamp")


class Ownership:
    """``root`` is shown to people, so it has no credentials."""

    def __init__(self, application_id: str, messages_id: str, root: str, tenure: Tenure) -> None:
        self._application_id = application_id
        self._messages_id = messages_id
        self._timeline_id = f"{application_id}/timeline"
        self._root = root
        self._tenure = tenure

    @staticmethod
    def owner_of(writer: LogTableWriter, application_id: str) -> int:
        """The number of the last run that wrote; 0 if there was none."""
        return writer.watermark(f"{application_id}/owner")

    @property
    def marks(self) -> dict[str, int]:
        """The application transactions that go with each commit."""
        tenure = self._tenure
        return {f"{self._application_id}/owner": tenure.number, self._timeline_id: tenure.timeline}

    def check(self, writer: LogTableWriter) -> None:
        """Check a new snapshot of the table. Raises Superseded, SinkDiverged."""
        tenure = self._tenure
        owner = self.owner_of(writer, self._application_id)
        if owner > tenure.number:
            raise Superseded(
                f"another run has taken over the slot: {writer.title} is written by run {owner} of it, "
                f"this is run {tenure.number}"
            )
        if owner == tenure.number:
            return
        # A commit's LSN is the start of its record, a message's LSN is the end.
        self._check_held(
            writer,
            max(
                writer.watermark(self._application_id) + 1 if writer.watermark(self._application_id) else 0,
                writer.watermark(self._messages_id),
                read_up_to(writer.watermark(f"{self._application_id}/snapshot")),
            ),
        )

    def claim(self, writer: LogTableWriter) -> None:
        """Leave this run's number in the table. From then on an earlier owner of the slot can commit nothing to it."""
        if self.owner_of(writer, self._application_id) < self._tenure.number:
            writer.commit([], {}, marks=self.marks)

    def check_snapshots(self, writer: LogTableWriter, valid_from: int) -> None:
        """Check ``_snapshots``: the last generation of this slot that stands is valid from ``valid_from``. Raises
        SinkDiverged. A snapshot has what the server had written, which may be more than it had sent, and than a standby
        had."""
        if self.owner_of(writer, self._application_id) < self._tenure.number:
            self._check_held(writer, read_up_to(valid_from))

    def _check_held(self, writer: LogTableWriter, held: int) -> None:
        tenure = self._tenure
        timeline = writer.watermark(self._timeline_id)
        reachable = tenure.reachable(timeline)
        if reachable is None and held:
            raise self.diverged(
                f"{writer.title} was written from timeline {timeline}, from which the server's timeline "
                f"{tenure.timeline} does not come"
            )
        if reachable is not None and held > reachable:
            raise self.diverged(
                f"{writer.title} holds what lies beyond {reachable}, where the WAL that the server shares "
                f"with it ends (timeline {tenure.timeline}): the server was restored, or failed over, to an older state"
            )

    def check_repeated(
        self, writer: LogTableWriter, transactions: pa.Table, above: int = 0, prefix: str = ""
    ) -> None:
        """Check that the table has the repeated transactions: of ``transactions`` (TRANSACTIONS_SCHEMA) all that have
        rows, lie above the LSN ``above``, and not above the table's watermark. Its columns have the same names after
        ``prefix``. Raises SinkDiverged."""
        watermark = writer.watermark(self._application_id)
        lsns = transactions["commit_lsn"]
        # What the run has cut itself is not there any more.
        above = max(above, writer.watermark(cut_id(self._application_id)))
        asked = pc.and_(pc.greater(lsns, above), pc.less_equal(lsns, watermark))
        repeated = transactions.filter(pc.and_(asked, pc.greater(transactions["rows"], 0)))
        if not repeated.num_rows:
            return
        columns = [f"{prefix}{key}" for key in _KEYS]
        bounds = pc.min_max(repeated["commit_lsn"]).as_py()
        held = writer.read(columns, columns[0], bounds["min"], bounds["max"])
        known = set(_identities(held.group_by(columns).aggregate([]), columns))
        for lsn, xid, timestamp_us in _identities(repeated, _KEYS):
            if (lsn, xid, timestamp_us) not in known:
                raise self.diverged(
                    f"transaction {xid}, with its commit at {Lsn(lsn)}, is not in {writer.title}, which "
                    f"holds everything up to {Lsn(watermark)}: the server was restored, or failed over, to an older "
                    "state, or rows were deleted from that table, or the publications were changed after a crash"
                )

    def check_server(self, transactions: LogTableWriter, slots: Callable[[], Sequence[str]]) -> None:
        """Check a root that this slot has never written to: whether the same slot of the same database has, on another
        server. ``slots``: the application ids that have written to ``transactions``; asked where that may be.

        Raises SinkDiverged: each row would stand there once for each server, and the log of neither could be told."""
        mine = self._application_id
        if transactions.watermark(mine) or self.owner_of(transactions, mine):
            return
        same = [each for each in slots() if each != mine and each.partition("/")[2] == mine.partition("/")[2]]
        if same:
            raise self.another_server(same[0].partition("/")[0], Lsn(transactions.watermark(same[0])))

    def another_server(self, system_identifier: str, lsn: Lsn) -> SinkDiverged:
        """The error that says so. ``lsn``: of the last commit that the root has of that server."""
        database, _, slot = self._application_id.partition("/")[2].rpartition("/")
        return SinkDiverged(
            f"{self._root} has the log of slot {slot} of database {database} on another server (system identifier "
            f"{system_identifier}, up to {lsn}), which this one may have replaced (pg_upgrade, a restored dump). "
            "A log does not go on with another server",
            remedy="give another, empty --sink and another --storage, and take the rows from before: "
            "`--snapshot initial`. The old log stays as it is, and answers up to its end. Changes that the old server "
            "had behind it are in no log; the snapshots have what came of them. If both servers are to write "
            "here, give this slot another name",
        )

    def diverged(self, message: str) -> SinkDiverged:
        """The error that says so, with its remedy."""
        return SinkDiverged(
            f"{message}. What the server has committed since would be taken for repetitions, and left out",
            remedy=f"give the sink another root than {self._root}; {ANOTHER_STORAGE} (only where publications were "
            "changed: put them back until the run has passed that position)",
        )


def read_up_to(lsn: int) -> Lsn:
    """The end of the last WAL record that a snapshot can contain. ``lsn`` is its place or its ``valid_from``, which lie
    at an insert position or a few bytes before it. 0 for 0."""
    return Lsn(lsn).next_record.record_end


def _identities(rows: pa.Table, columns: Sequence[str]) -> list[tuple[int, int, int]]:
    lsns, xids, timestamps = (rows[column] for column in columns)
    times = timestamps.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
    return list(zip(lsns.to_pylist(), xids.to_pylist(), times.to_pylist(), strict=True))
