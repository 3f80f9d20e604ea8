"""Everything that can go wrong, by whose fault it is and what is to be done about it.

One base class, four kinds of fault (the server broke protocol, we were misused, it is not supported, the
environment fails), and one table, ``POLICY``, that maps each class to what the supervisor does (retry,
restart, stop), the exit status of the command line, and the remedy that a person reads. An error may carry a
more exact remedy than its class has.

Errors cross process borders inside Ray's own exceptions, so each pickles: the state is the arguments of
``XidstreamError`` and nothing else. No message ever holds a row's value, a password or a conninfo string.

In Python nobody looks for an attribute ``remedy``. So the remedy is a note of the exception (PEP 678): tracebacks and
notebooks show it below the message, and ``str`` stays one sentence. Python 3.10 has no notes; there it is a line of
``str``. The command line prints ``message`` and ``remedy`` itself.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from xidstream.pipeline.quantities import visible

HAS_NOTES: Final = hasattr(BaseException, "add_note")


_OS_ERROR: Final = re.compile(r"\(os error (\d{1,4})\)")
"""How libraries in Rust tell the number of a failed system call, deltalake among them."""
_HTTP_STATUS: Final = re.compile(r"status (\d{3}(?: [A-Z][A-Za-z]+)*)")
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*m|↳")


def known_reason(error: BaseException) -> str | None:
    """Why the system or a store refused: ``No space left on device``, ``status 403 Forbidden``. None where a foreign
    error does not say. The rest of its text may hold values of rows, or a secret."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = _ESCAPES.sub("", str(error))
    if status := _HTTP_STATUS.search(text):
        return f"status {status[1]}"
    if number := _OS_ERROR.search(text):
        return os.strerror(int(number[1]))
    return None


class Action(enum.Enum):
    """What the supervisor does when an error ends a part of the pipeline."""

    RETRY = "retry"  # the same operation again, with backoff
    RESTART = "restart"  # a new epoch from the slot's confirmed position
    STOP = "stop"  # end the run: repeating cannot help


class ExitStatus(enum.IntEnum):
    """The contract of the command line."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    PRECONDITION = 3
    TERMINAL = 4


class XidstreamError(Exception):
    """Base of all errors that this project raises on purpose.

    ``message`` is one clear sentence; ``remedy`` what the reader can do, or None for the class's own. ``facts`` are
    those of the message that programs look for (``xid``, ``lsn``, ``commit_lsn``).
    """

    def __init__(
        self, message: str, *, remedy: str | None = None, facts: Mapping[str, str | int] | None = None
    ) -> None:
        message = visible(message)
        super().__init__(message)
        self.message = message
        self.facts: Mapping[str, str | int] = facts or {}
        self._remedy = None if remedy is None else visible(remedy)
        if HAS_NOTES:
            self.add_note(f"  remedy: {self.remedy}")

    def __str__(self) -> str:
        return self.message if HAS_NOTES else f"{self.message}\n  remedy: {self.remedy}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self._remedy, self.facts))

    @property
    def policy(self) -> Policy:
        for cls in type(self).__mro__:
            if cls in POLICY:
                return POLICY[cls]
        raise AssertionError("XidstreamError itself is in POLICY")

    @property
    def remedy(self) -> str:
        return self._remedy if self._remedy is not None else self.policy.remedy


def _rebuild(
    cls: type[XidstreamError], message: str, remedy: str | None, facts: Mapping[str, str | int]
) -> XidstreamError:
    return cls(message, remedy=remedy, facts=facts)


# -- the server broke protocol -------------------------------------------------------------------------


class ProtocolViolation(XidstreamError):
    """The server sent what the protocol does not allow; the message names the LSN."""


class MalformedMessage(ProtocolViolation):
    """The bytes of one message cannot be parsed."""


class IllegalTransition(ProtocolViolation):
    """A message that is well-formed, but not at this place of the stream."""


# -- we were misused -----------------------------------------------------------------------------------


class UsageError(XidstreamError):
    """A caller passed what the documentation excludes."""


class ConfigError(UsageError):
    """A setting is missing, unknown or out of range."""


# -- not supported -------------------------------------------------------------------------------------


class Unsupported(XidstreamError):
    """Valid, but beyond what this project does."""


class ColumnNameClash(Unsupported):
    """Two columns of one table, or a column and a contract column, differ in case only."""


# -- the data cannot pass ------------------------------------------------------------------------------


class PoisonedChange(XidstreamError):
    """A change that cannot be decoded, in a transaction that kept it; the message names xid, LSNs, relation and column,
    never the value."""


# -- the environment -----------------------------------------------------------------------------------


class EnvironmentFault(XidstreamError):
    """Something around us fails: server, network, storage, a process."""


class PreconditionMissing(EnvironmentFault):
    """Something that must be set up by a person is not (wal_level, a privilege, a publication)."""


class TableUnreadable(PreconditionMissing):
    """The role may not read one table, which a snapshot has to. The message names it."""


class LoginRefused(PreconditionMissing):
    """The server does not let this role in: password, pg_hba.conf, role or TLS. Where it did before, somebody is
    changing one of them, and the other half of the change is on its way."""


class PasswordCommandFailed(EnvironmentFault):
    """The program of ``password_command`` gave no password. The message has neither its text nor its output."""


class ConnectionLost(EnvironmentFault):
    """The connection to the server broke, or was not made."""


class SlotInUse(EnvironmentFault):
    """Another process reads the slot."""


class SlotLost(EnvironmentFault):
    """The slot can no longer give what was not yet delivered."""


class SnapshotInterrupted(EnvironmentFault):
    """The snapshot of a table cannot be finished: the table was changed, dropped or rewritten. The message names it."""


class SnapshotLost(SnapshotInterrupted):
    """The snapshot that a table is read under is gone: the session that held it, or the server, has ended."""


class StorageFault(EnvironmentFault):
    """The object storage failed; the message names the object."""


class SegmentCorrupt(StorageFault):
    """A stored object is not what was written: length or checksum differ."""


class SinkFailed(EnvironmentFault):
    """The sink, or the user's function, raised."""


class Superseded(EnvironmentFault):
    """Another run has taken over the slot: what this one still does must not count."""


class SinkDiverged(SinkFailed):
    """The sink holds, under this slot's name, what the server never had."""


class ComponentLost(EnvironmentFault):
    """A process of ours ended without saying why."""


@dataclass(frozen=True, slots=True)
class Policy:
    """``once_logged_in``: the action of a run that the server has let in before, where it is another."""

    action: Action
    exit_status: ExitStatus
    remedy: str
    once_logged_in: Action | None = None

    def action_of(self, *, logged_in: bool) -> Action:
        return self.once_logged_in if logged_in and self.once_logged_in is not None else self.action


ANOTHER_STORAGE: Final = (
    "give another, empty --storage (the first run there says how to begin anew) and take new snapshots of the tables "
    "(`--snapshot initial`); nothing in this storage is deleted"
)
"""How to go on where the storage cannot, and the slot can. No remedy may have anybody delete what may be the only copy
of something: the slot's WAL, a journal, prepared transactions."""
ANOTHER_SLOT: Final = (
    "make the slot anew with another storage (`xidstream slot drop` without a storage, then `xidstream slot create "
    "--storage NEW`) and take new snapshots of the tables (`--snapshot initial`); nothing in this storage is deleted"
)
"""How to go on where the slot cannot, though the server still has it and takes it for well."""
RESYNC: Final = (
    "`xidstream resync` makes the slot anew, and the next run takes new snapshots of all tables; what committed "
    "meanwhile stays missing in the history (docs/faults.md)"
)
"""How to go on where the slot is lost: invalidated, dropped, or read by somebody else."""

POLICY: Final[dict[type[XidstreamError], Policy]] = {
    XidstreamError: Policy(Action.STOP, ExitStatus.FAILED, "this is a defect of xidstream: please report it"),
    ProtocolViolation: Policy(
        Action.STOP,
        ExitStatus.TERMINAL,
        "report the server's version and this message; nothing was confirmed past it",
    ),
    UsageError: Policy(Action.STOP, ExitStatus.USAGE, "correct what the message names, and start again"),
    ConfigError: Policy(
        Action.STOP,
        ExitStatus.USAGE,
        "correct this setting: `xidstream run --help-all` and docs/settings.md give the unit, default and meaning of "
        "each",
    ),
    Unsupported: Policy(Action.STOP, ExitStatus.PRECONDITION, "see docs/limits.md"),
    ColumnNameClash: Policy(
        Action.STOP,
        ExitStatus.PRECONDITION,
        "give the column another name with the setting column_names, or leave it out of the publication with a "
        "column list, and take the table up again with `xidstream table resume` (docs/parked.md)",
    ),
    PoisonedChange: Policy(
        Action.STOP,
        ExitStatus.TERMINAL,
        "everything before this transaction is delivered. Changing the row now does not help: the slot keeps the old "
        "change. Give the whole transaction up with `xidstream slot skip --xid XID --commit-lsn LSN`, and the next "
        "run goes on after it",
    ),
    EnvironmentFault: Policy(
        Action.RESTART, ExitStatus.FAILED, "correct the cause, and start again; nothing is lost"
    ),
    PreconditionMissing: Policy(
        Action.STOP, ExitStatus.PRECONDITION, "see `xidstream check`, or ChangeStream(…).check() in Python"
    ),
    LoginRefused: Policy(
        Action.STOP,
        ExitStatus.PRECONDITION,
        "check user and password, and the server's pg_hba.conf",
        # A password is changed in two places, and one of them is the first.
        once_logged_in=Action.RETRY,
    ),
    PasswordCommandFailed: Policy(
        # It asks a service, which may be away for a moment.
        Action.RETRY,
        ExitStatus.FAILED,
        "run the program of password_command by hand, as the user and on the machine that connects: it must write the "
        "password, in one line, to its standard output, and end with status 0",
    ),
    ConnectionLost: Policy(Action.RETRY, ExitStatus.FAILED, "check that the server is up and reachable"),
    SlotInUse: Policy(
        Action.RETRY,
        ExitStatus.FAILED,
        "end the other reader, or give each run a slot of its own (a PID that the server names is the server's own; "
        "`xidstream status` lists the runs of this machine)",
    ),
    Superseded: Policy(
        # The slot decides: it has one reader at a time, and whoever does not get it ends with SlotInUse.
        Action.RETRY,
        ExitStatus.FAILED,
        "end one of the two runs, or give each a slot of its own",
    ),
    SlotLost: Policy(
        Action.STOP,
        ExitStatus.TERMINAL,
        RESYNC,
    ),
    SnapshotInterrupted: Policy(Action.RETRY, ExitStatus.FAILED, "the table's snapshot is taken again"),
    SnapshotLost: Policy(
        Action.RESTART,
        ExitStatus.FAILED,
        "the table is read again under a new snapshot; finished ones are not",
    ),
    StorageFault: Policy(
        Action.RETRY, ExitStatus.FAILED, "check space, permissions and reachability of the storage"
    ),
    SegmentCorrupt: Policy(Action.RESTART, ExitStatus.FAILED, "the transaction is read again from the slot"),
    SinkFailed: Policy(
        Action.STOP, ExitStatus.FAILED, "repair the sink, and start again; the batch was not confirmed"
    ),
    SinkDiverged: Policy(
        Action.STOP,
        ExitStatus.TERMINAL,
        f"give the sink another root; {ANOTHER_STORAGE}",
    ),
    ComponentLost: Policy(
        Action.RESTART, ExitStatus.FAILED, "the run starts again from the last confirmed position"
    ),
}
