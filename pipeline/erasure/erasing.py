"""An erasure: no row of some keys, with a commit up to an LSN, in anything that xidstream keeps; beside a run.

**Who does it.** The process of the command, beside the run and without it. Nothing of a run is stopped or asked. A
request that the run carries out, as ``snapshot request`` is one, was rejected: it would have to have the keys in the
storage, in one more place to erase from, and a run that is down would erase nothing. What keeps the two apart is
the format's own check of commits. Each step is one commit of one table, which is refused if anybody came before, and
has everybody refused who began before it. No watermark and no owner moves. So the run's exactly-once does not know of
erasures. What a format does otherwise says ``erased_store``.

**The LSN.** What the server has flushed when the command begins. The erasure waits until the sink has everything up to
there, by the slot's record, and no further: a row that commits later is not its business, and stays. How many of these
there are is told.

**The order**, so that nothing brings a row back:

1. *The sink gets everything up to the LSN.* The journal, segments and the memory of buffers have only later commits
   then, and copies of what is delivered. A row up to there that comes again, after a crash, is dropped by the table's
   watermark; and the record confirms it, so the server does not send it. So no journal file and no segment is ever
   written anew, with their checksums: they go by themselves when they are delivered.
2. *The log* (``log_tables.erased_rows``). The sink's batch, a merge and a compaction in hand are refused and done anew.
   A snapshot that was read before is taken again.
3. *The base table* (``mirror.erased_base``). A refresh in hand, which read the log of before, is done anew.
4. *Copies are listed* (``ErasureRecord``): files that the log's table does not name any more (``delta.erased_copies``),
   files and log files of older versions of the base table, and what the storage has: files of the journal, and segments
   of transactions that began up to the LSN.

**The end.** No file that a table names can become a copy after step 4. A file without a name may still be written by
what was in work: a merge, a snapshot or a refresh that is refused then. So ``look`` asks for these, too, and it needs
no key for that: no batch writes rows of such old LSNs any more. In the storage it may be a journal file that was in
work, or a segment of a transaction that began before: the journal's summaries and the segments' names say so. The
erasure is finished when nothing of all this is there. Files that were replaced stay for readers:
``delta_file_retention`` for the log, ``mirror_retention`` for base tables; or go at once where a person says that no
reader is at work (``at_once``).

**States that stay.** Where the log is not cut, a state that came from an older version of the base table is folded from
the log then. Where it is cut after such a version (``log_retention``), the version is all that there is of the rows
before. So ahead of step 2 its state, without the rows, is written into the log (``kept_states``), and every state that
the log answered it answers still. Where that cannot be, ``tell`` says from where on states can be read.

**Again and again.** Each step looks at what is there, and does what is left to do. So a command that was killed
anywhere is given again, with its ID or with another one, and ends in the same state.

What lies in a parked table's range, or in a skipped transaction, was never kept (``pipeline.parked``,
``pipeline.poison``): their records have names, LSNs and reasons, and no value. ``_transactions`` and ``_snapshots``
have no value either. ``_messages`` has what applications wrote, in a form that nobody but them knows: it is not looked
at.

Used by ``actors.cli.erase``.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from xidstream.pipeline.changelog.slot_log import SlotLog
from xidstream.pipeline.erasure.erased_store import ErasedStore, store_of
from xidstream.pipeline.errors import PreconditionMissing, SegmentCorrupt, UsageError
from xidstream.pipeline.faultpoints import reach
from xidstream.pipeline.log_tables.erased_keys import ErasedKeys, rows_of_keys
from xidstream.pipeline.pg import Lsn
from xidstream.pipeline.spark_errors import fault_of
from xidstream.pipeline.storage.envelope import now
from xidstream.pipeline.storage.erasure_record import (
    BASE,
    IN_WORK,
    LOG,
    STORAGE,
    Copy,
    ErasureRecord,
    read_erasure,
    write_erasure,
)
from xidstream.pipeline.storage.journal_file import read_journal_files
from xidstream.pipeline.storage.keys import Layout
from xidstream.pipeline.storage.progress import read_progress
from xidstream.pipeline.storage.storage import Storage

_POLL_S: Final = 0.5
_IN_USE: Final = datetime.timedelta(hours=1)
"""For so long a reader may have files of the log open that the erasure has replaced."""


@dataclass(frozen=True)
class SlotStores:
    """What holds the slot's rows: its log, and its storage with the keys of its objects."""

    log: SlotLog
    storage: Storage
    layout: Layout


@dataclass(frozen=True)
class ErasureSettings:
    """``at_once``: remove replaced files now, from under whoever reads them. ``timeout_s``: how long to
    wait for the sink. ``settle_s``: what was in work then has its file by now. ``check`` raises where it is to be given
    up."""

    at_once: bool = False
    timeout_s: float = 300.0
    settle_s: float = 5.0
    tell: Callable[[str], None] = lambda text: None
    check: Callable[[], None] = lambda: None


def erase(
    stores: SlotStores,
    table: str,
    keys: ErasedKeys,
    asked: ErasureRecord,
    settings: ErasureSettings,
) -> ErasureRecord:
    """Erase the keys' rows of ``table`` as ``asked`` for, or go on with what is recorded under its ID.

    Raises UsageError for a table or key that is none, and PreconditionMissing where the sink does not get as far in
    time, both with nothing changed; Unsupported, SinkFailed, StorageFault. It may be called again."""
    log, storage, layout = stores.log, stores.storage, stores.layout
    label, found = log.log_table(table)
    _check_server(log, layout)
    # What is wrong with a key is told before anything is waited for.
    stored_columns = rows_of_keys(keys, found.columns, found.properties, label).stored_columns
    before = read_erasure(storage, layout, asked.id)
    if before is not None and (before.table, before.n_keys) != (label, keys.n_keys):
        raise UsageError(
            f"erasure {asked.id} is one of {before.n_keys} keys of table {before.table}",
            remedy="give the same keys again to go on with it, or another --id",
        )
    record = replace(asked, table=label, n_keys=keys.n_keys) if before is None else before
    write_erasure(storage, layout, record)
    settings.tell(
        f"table {label}: erasing {record.n_keys} keys up to LSN {record.upto_lsn} (erasure {record.id})"
    )
    _wait(stores, record.upto_lsn, settings)
    oldest = log.oldest_lsn(label)
    try:
        store = store_of(log, label)
        store.keep_states(keys, stored_columns, settings.check)
        done = store.erase_rows(keys, int(record.upto_lsn), settings.check)
        base = store.erase_base(keys, stored_columns, settings.check)
        copies, cleared = _copies(stores, store, keys, record, settings)
    except Exception as error:
        raise fault_of(error, f"erasing from table {label}") from error
    _tell_states(log, label, oldest, settings)
    record = replace(
        record,
        n_rows=record.n_rows + done.n_rows,
        n_files=record.n_files + done.n_files,
        n_behind=done.n_behind,
        n_changed=record.n_changed + done.n_changed,
        base_rows=record.base_rows + (0 if base is None else base.n_rows),
        base_files=record.base_files + (0 if base is None else base.n_files),
        erased_at=record.erased_at or now(),
        finished_at=None if copies else record.finished_at,
        copies=copies,
        cleared=cleared,
    )
    write_erasure(storage, layout, record)
    reach("erasure_told")
    if copies:
        return record
    if done.n_files or (base is not None and base.n_files):
        time.sleep(settings.settle_s)
    return look(stores, record)


def look(stores: SlotStores, record: ErasureRecord) -> ErasureRecord:
    """The record with the copies that are still there; kept where something has changed. An erasure that was never done
    stays as it is. Raises StorageFault and what deltalake raises."""
    if record.erased_at is None or record.finished_at is not None:
        return record
    label, _ = stores.log.log_table(record.table)
    store = store_of(stores.log, label)
    by_store = {where: [c.path for c in record.copies if c.where == where] for where in (LOG, BASE)}
    left = {(LOG, path) for path in store.left_in_log(by_store[LOG])}
    left |= {(BASE, path) for path in store.left_in_base(by_store[BASE])}
    of_tables = [copy for copy in record.copies if (copy.where, copy.path) in left]
    known = {
        where: {c.path for c in (*record.copies, *record.cleared) if c.where == where}
        for where in (LOG, BASE)
    }
    late = [Copy(IN_WORK, path) for path in store.in_work_in_log(int(record.upto_lsn), known[LOG])]
    late += [Copy(IN_WORK, path) for path in store.in_work_in_base(known[BASE])]
    copies = (*of_tables, *late, *_in_storage(stores, record))
    if copies == record.copies and copies:
        return record
    looked = replace(record, copies=copies, finished_at=None if copies else now())
    write_erasure(stores.storage, stores.layout, looked)
    return looked


def _check_server(log: SlotLog, layout: Layout) -> None:
    system, _, rest = log.application_id.partition("/")
    if (system, rest.rpartition("/")[2]) != (str(layout.system_identifier), layout.slot):
        raise PreconditionMissing(
            f"the change log is one of slot {rest.rpartition('/')[2]} of the server {system}, and this is slot "
            f"{layout.slot} of the server {layout.system_identifier}",
            remedy="give --dsn, --slot and --sink of the same run",
        )


def _tell_states(log: SlotLog, label: str, before: Lsn | None, settings: ErasureSettings) -> None:
    """Tell of states that the log answered from older versions of the base table alone, and does not any more."""
    oldest = log.oldest_lsn(label)
    if before is None or (oldest is not None and oldest <= before):
        return
    now_from = (
        "no state can be read before the next refresh or snapshot" if oldest is None else f"from {oldest} on"
    )
    settings.tell(
        f"table {label}: its states from {before} on came from older versions of the base table, which had the rows, "
        f"and from a log that is cut; what can be read now: {now_from}"
    )


def _wait(stores: SlotStores, upto: Lsn, settings: ErasureSettings) -> None:
    deadline_s = time.monotonic() + settings.timeout_s
    is_announced = False
    while True:
        settings.check()
        record = read_progress(stores.storage, stores.layout)
        delivered = Lsn(0) if record is None else record.delivered_lsn
        if delivered >= upto:
            return
        if time.monotonic() > deadline_s:
            raise PreconditionMissing(
                f"after {settings.timeout_s:.0f} s the sink has everything up to {delivered}, and {upto} is asked for: "
                "rows in the journal, or not read yet, would come behind the erasure",
                remedy="see whether a run of the slot is going on, and what it waits for: `xidstream status`; then "
                "give the command again",
            )
        if not is_announced:
            is_announced = True
            settings.tell(f"waiting for the sink, which has everything up to {delivered}")
        time.sleep(_POLL_S)


def _copies(
    stores: SlotStores, store: ErasedStore, keys: ErasedKeys, record: ErasureRecord, settings: ErasureSettings
) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
    """What may have such rows, and which files that no commit names have none."""
    _, found = stores.log.log_table(record.table)
    stored_columns = rows_of_keys(keys, found.columns, found.properties, record.table).stored_columns
    recent: set[str] | None = None
    if record.erased_at is not None:
        is_recent = now() - record.erased_at < _IN_USE
        recent = {copy.path for copy in record.copies if is_recent and copy.where == LOG}
    of_log = store.in_log(keys, int(record.upto_lsn), recent, at_once=settings.at_once)
    of_base = store.in_base(keys, stored_columns, at_once=settings.at_once)
    copies = [Copy(where, path) for where, each in ((LOG, of_log), (BASE, of_base)) for path in each.copies]
    cleared = [Copy(where, path) for where, each in ((LOG, of_log), (BASE, of_base)) for path in each.cleared]
    return (*copies, *_in_storage(stores, record)), tuple(cleared)


def _in_storage(stores: SlotStores, record: ErasureRecord) -> Iterator[Copy]:
    """What may have rows up to the LSN: files of the journal whose first commit is one, and segments of transactions
    that began before. Of rows of a batch on their way to Spark only what was there when the tables were erased from."""
    storage, layout, upto = stores.storage, stores.layout, record.upto_lsn
    keys = [key for key in storage.list_keys(layout.journal_prefix) if key.endswith(".journal")]
    names = [layout.parse_journal_key(key) for key in keys]
    for key, file in zip(keys, read_journal_files(storage, layout, names), strict=True):
        if isinstance(file, SegmentCorrupt):
            is_copy = storage.exists(key)  # damaged: nobody can know
        else:
            is_copy = 0 < file.first_commit_lsn <= upto
        if is_copy:
            yield Copy(STORAGE, key)
    of_then = {copy.path for copy in record.copies}
    for key in storage.list_keys(layout.epochs_prefix):
        try:
            is_copy = layout.parse_segment_key(key).first_lsn <= upto
        except UsageError:
            is_copy = record.erased_at is None or key in of_then
        if is_copy:
            yield Copy(STORAGE, key)
