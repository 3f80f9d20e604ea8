"""Whether the change log is right: the source's rows under a snapshot, against the log's state of the same moment.

*The moment.* A session's snapshot sees transactions by their ids, and a log's state has them by commit LSN. The two are
not the same order: a commit is in the WAL before other sessions see it, for as long as its flush takes, and with
synchronous replication for as long as a standby needs. So in general no LSN belongs to a snapshot. The rule of the
product's own snapshots decides (``snapshot.bounds``): E is where the WAL ends after the snapshot, and of the
transactions that committed up to E the snapshot has those below ``xmax`` that are not in ``xip``. The log's state is
taken at E, without the others (``moment``): mostly none, under load some that were committing at that very moment. That
state is exact. A transaction that the snapshot sees cannot have built on one that it does not see: it would have waited
for the other's row locks, which are held until the other is visible. The transactions that are left out are counted in
the result, and are a matter of the next verification.

On a standby commits become visible in the order of the WAL, so its snapshot has an LSN, which nobody tells. It lies
between how far the standby had replayed before and after the snapshot. Where a change of the table lies in between,
another snapshot is taken.

Rejected: ``CREATE_REPLICATION_SLOT … EXPORT_SNAPSHOT``, which gives a snapshot and its one LSN. It needs REPLICATION, a
free slot and walsender, holds back WAL while it is there, waits for every transaction of the server that is open, some
of which never end, and fails with many subtransactions. Rejected as well: to try snapshots until one has an LSN. Where
some sessions commit synchronously and others do not, hardly any has.

*The rows.* Both sides go through one definition of a value. The source's rows are read as snapshots read them (the same
session settings, the same COPY, the same decoder, the same Parquet layout: ``initial_copy.range_reading``) into a
folder that is removed at the end. Spark reads them beside the log's state, and one expression hashes both
(``comparison``). Rejected: hashes made by the server, which would save the way of the rows over the network. Their text
would have to be made a second time from the log's values, for all types; where that text were wrong, so would the
verdict be, and the server would pay for it.

*How far.* A table is compared when the log answers at E. ``moment.answered_up_to`` is the one place that says how far
the log answers.

``verifying`` runs it, ``change_log`` is the public class, ``result`` what comes out.
"""
