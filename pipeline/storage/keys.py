"""The keys of stored objects: building and parsing them, nothing else.

A key is relative to the storage root, its parts are joined by ``/``, and it is made of the system identifier,
the slot, the epoch, xids, LSNs and numbers. A gid may be ``../../etc`` (facts 21) and a table may be named
anything, so neither is ever part of one.

What a prepared transaction leaves carries the epoch that wrote it, so that a buffer of an earlier epoch, late
with its own record, replaces nobody's. Epochs begin with their time (``20260101T000000-…``): they sort by age.

LSNs are 16 upper case hexadecimal digits, so that a listing is in LSN order within an xid. The slot is
checked against what PostgreSQL allows (``ReplicationSlotValidateName``: a-z, 0-9, _), an epoch against
letters, digits and ``-``: no part can be ``..`` or hold a separator.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from xidstream.pipeline.errors import UsageError
from xidstream.pipeline.pg import Lsn, Xid
from xidstream.pipeline.pg_rules import check_slot_name

_EPOCH: Final = re.compile(r"[A-Za-z0-9-]{1,64}")
_TRANSACTION: Final = r"(?P<xid>\d{1,10})-(?P<lsn>[0-9A-F]{16})"
_SEGMENT: Final = re.compile(
    rf"(?P<epoch>[A-Za-z0-9-]{{1,64}})/{_TRANSACTION}/(?P<number>\d+)\.(arrow|parquet)"
)
_PREPARED: Final = re.compile(rf"{_TRANSACTION}\.(?P<epoch>[A-Za-z0-9-]{{1,64}})\.json")
_SNAPSHOT: Final = re.compile(r"(?P<relid>\d{1,10})\.(?P<kind>(?:taken|told)-\d+|request|cancelled)\.json")
_JOURNAL: Final = re.compile(r"(?P<number>[0-9]{16})\.(?P<epoch>[A-Za-z0-9-]{1,64})\.journal")
_RECORD: Final = re.compile(r"(?P<owner>[0-9]{16})\.(?P<epoch>[A-Za-z0-9-]{1,64})\.(?P<kind>json|claim)")
_TRANSACTION_FOLDER: Final = re.compile(rf"\d+/[a-z0-9_]+/epochs/[A-Za-z0-9-]+/{_TRANSACTION}")


class SegmentName(NamedTuple):
    """The parts of a segment's key."""

    epoch: str
    xid: Xid
    first_lsn: Lsn
    number: int


class PreparedName(NamedTuple):
    """The parts of the key of a prepared transaction's manifest."""

    xid: Xid
    prepare_end_lsn: Lsn
    epoch: str

    @property
    def transaction(self) -> tuple[Xid, Lsn]:
        """The transaction's name, whatever epoch wrote it."""
        return self.xid, self.prepare_end_lsn


class RecordName(NamedTuple):
    """What the key of a record of progress, or of a claim, says: ``epoch`` has the slot under the number ``owner``."""

    owner: int
    epoch: str
    is_claim: bool = False


@dataclass(frozen=True)
class Layout:
    """Where one epoch of one slot keeps its objects.

    Raises UsageError for names that cannot be part of a key.

    ``epoch`` names one life of the reader and its buffers; ``prepared`` and ``progress`` outlive it.
    """

    system_identifier: int
    slot: str
    epoch: str

    def __post_init__(self) -> None:
        if not 0 <= self.system_identifier < 1 << 64:
            raise UsageError(f"a system identifier has 64 bits, got {self.system_identifier}")
        check_slot_name(self.slot)
        if not _EPOCH.fullmatch(self.epoch):
            raise UsageError(f"an epoch has 1 to 64 letters, digits and -, got {self.epoch!r}")

    # -- folders ---------------------------------------------------------------------------------------

    @property
    def root(self) -> str:
        return f"{self.system_identifier}/{self.slot}"

    @property
    def epochs_prefix(self) -> str:
        return f"{self.root}/epochs"

    @property
    def prepared_prefix(self) -> str:
        return f"{self.root}/prepared"

    @property
    def journal_prefix(self) -> str:
        return f"{self.root}/journal"

    @property
    def progress_prefix(self) -> str:
        return f"{self.root}/progress"

    @property
    def skipped_prefix(self) -> str:
        return f"{self.root}/skipped"

    @property
    def resumed_prefix(self) -> str:
        return f"{self.root}/resumed"

    @property
    def erasures_prefix(self) -> str:
        return f"{self.root}/erasures"

    @property
    def snapshots_prefix(self) -> str:
        return f"{self.root}/snapshots"

    # -- objects ---------------------------------------------------------------------------------------

    @property
    def progress_key(self) -> str:
        """Where the record was before each owner had its own: what is there is refused."""
        return f"{self.root}/progress.json"

    def record_key(self, owner: int) -> str:
        """The record that this epoch writes, under the number that it took the slot over with."""
        return f"{self._owned(owner)}.json"

    def claim_key(self, owner: int) -> str:
        """Says that this epoch takes the slot over under the number."""
        return f"{self._owned(owner)}.claim"

    def _owned(self, owner: int) -> str:
        if not 0 <= owner < 10**16:
            raise UsageError(f"a number of an owner has 16 digits, got {owner}")
        return f"{self.progress_prefix}/{owner:016d}.{self.epoch}"

    @property
    def server_key(self) -> str:
        return f"{self.root}/server.json"

    @property
    def beginning_key(self) -> str:
        return f"{self.root}/beginning.json"

    @property
    def snapshot_rows_prefix(self) -> str:
        """The prefix of rows that wait for a user's function."""
        return f"{self.snapshots_prefix}/rows"

    @property
    def snapshot_decision_key(self) -> str:
        return f"{self.snapshots_prefix}/decision.json"

    def snapshot_key(self, relid: int, kind: str) -> str:
        """The key of one table's record: ``taken-`` or ``told-`` and the generation's number, ``request`` or
        ``cancelled``."""
        return f"{self.snapshots_prefix}/{relid}.{kind}.json"

    def segment_key(self, xid: Xid, first_lsn: Lsn, number: int) -> str:
        """``number`` counts what is stored of the transaction, from 0. ``first_lsn`` tells apart uses of one xid."""
        return f"{self._numbered(xid, first_lsn, number)}.parquet"

    def messages_key(self, xid: Xid, first_lsn: Lsn, number: int) -> str:
        """The key of a file of logical messages."""
        return f"{self._numbered(xid, first_lsn, number)}.arrow"

    def _numbered(self, xid: Xid, first_lsn: Lsn, number: int) -> str:
        if number < 0:
            raise UsageError(f"segments are numbered from 0, got {number}")
        return f"{self.epochs_prefix}/{self.epoch}/{_transaction(xid, first_lsn)}/{number}"

    def handed_rows_key(self, number: int) -> str:
        """Rows of a batch that go to Spark through the storage; ``number`` counts the epoch's from 0."""
        return f"{self.epochs_prefix}/{self.epoch}/batches/{number}.arrow"

    def prepared_key(self, xid: Xid, prepare_end_lsn: Lsn) -> str:
        """The manifest that this epoch writes."""
        return f"{self.prepared_prefix}/{_transaction(xid, prepare_end_lsn)}.{self.epoch}.json"

    def journal_key(self, number: int) -> str:
        """The journal file that this epoch writes; ``number`` counts the slot's over all epochs, from 0."""
        if not 0 <= number < 10**16:
            raise UsageError(f"journal files are numbered from 0, with 16 digits, got {number}")
        return f"{self.journal_prefix}/{number:016d}.{self.epoch}.journal"

    def skip_key(self, xid: Xid, commit_lsn: Lsn) -> str:
        """The record that a transaction is skipped."""
        return f"{self.skipped_prefix}/{_transaction(xid, commit_lsn)}.json"

    def resume_key(self, relid: int) -> str:
        """The wish that a parked table be delivered again."""
        return f"{self.resumed_prefix}/{relid}.json"

    def erasure_key(self, id_: str) -> str:
        """The record of an erasure. ``id_``: as ``erasure_record.check_id`` lets it through."""
        return f"{self.erasures_prefix}/{id_}.json"

    # -- parsing ---------------------------------------------------------------------------------------

    def parse_snapshot_key(self, key: str) -> tuple[int, str] | None:
        """Relid and kind; None for the decision."""
        match = _SNAPSHOT.fullmatch(_below(key, self.snapshots_prefix))
        return None if match is None else (int(match["relid"]), match["kind"])

    def parse_journal_key(self, key: str) -> tuple[str, int]:
        """Parse the key of a journal file of any epoch: its epoch and number. Raises UsageError on every other key."""
        match = _JOURNAL.fullmatch(_below(key, self.journal_prefix))
        if match is None:
            raise UsageError(f"not a journal file of slot {self.slot!r}: {key!r}")
        return match["epoch"], int(match["number"])

    def parse_segment_key(self, key: str) -> SegmentName:
        """Parse the key of rows or of messages, of any epoch of this slot. Raises UsageError on every other key."""
        match = _SEGMENT.fullmatch(_below(key, self.epochs_prefix))
        if match is None:
            raise UsageError(f"not a segment of slot {self.slot!r}: {key!r}")
        xid, first_lsn = Xid(int(match["xid"])), Lsn(int(match["lsn"], 16))
        return SegmentName(match["epoch"], xid, first_lsn, int(match["number"]))

    def parse_prepared_key(self, key: str) -> PreparedName:
        """Parse the key of a manifest of any epoch. Raises UsageError on every other key."""
        match = _PREPARED.fullmatch(_below(key, self.prepared_prefix))
        if match is None:
            raise UsageError(f"not a prepared transaction of slot {self.slot!r}: {key!r}")
        xid, lsn = Xid(int(match["xid"])), Lsn(int(match["lsn"], 16))
        return PreparedName(xid, lsn, match["epoch"])

    def parse_record_key(self, key: str) -> RecordName:
        """Parse the key of a record or a claim, of any epoch. Raises UsageError on every other key."""
        match = _RECORD.fullmatch(_below(key, self.progress_prefix))
        if match is None:
            raise UsageError(f"not a record of slot {self.slot!r}: {key!r}")
        return RecordName(int(match["owner"]), match["epoch"], match["kind"] == "claim")


def is_transaction_folder(folder: str) -> bool:
    """Whether a folder holds one transaction's segments and so has a single writer at any time."""
    return _TRANSACTION_FOLDER.fullmatch(folder) is not None


def _transaction(xid: Xid, lsn: Lsn) -> str:
    return f"{int(xid)}-{int(lsn):016X}"


def _below(key: str, prefix: str) -> str:
    return key[len(prefix) + 1 :] if key.startswith(f"{prefix}/") else ""
