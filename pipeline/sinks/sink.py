"""What a sink is, and the one way from the setting ``sink`` to an object.

``make_sink`` runs in the process that drives Spark. It imports what the kind needs and no more, and touches
nothing outside: a bad setting fails at once, before anything is started. Which kinds there are says
``pipeline.settings.sink_kinds``.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from xidstream.pipeline.errors import ConfigError, StorageFault
from xidstream.pipeline.exchange import Pace, SlotIdentity, Tenure
from xidstream.pipeline.log_tables.locations import REMOTE_SCHEMES
from xidstream.pipeline.pg import INVALID_LSN, Lsn
from xidstream.pipeline.settings.credentials import redacted
from xidstream.pipeline.settings.file_modes import make_folders
from xidstream.pipeline.settings.sink_kinds import DELTA, KINDS, SinkKind
from xidstream.pipeline.settings.sink_settings import DEFAULT_SETTINGS, SinkSettings

if TYPE_CHECKING:
    from xidstream.pipeline.account.model import LogPart
    from xidstream.pipeline.log_tables.batch_parts import TableName
    from xidstream.pipeline.log_tables.snapshot_tables import SnapshotTables
    from xidstream.pipeline.sinks.sink_findings import SinkCheck
    from xidstream.pipeline.snapshot.bounds import SnapshotBounds
    from xidstream.pipeline.snapshot.generation import GenerationState
    from xidstream.pipeline.spark.frames import SinkBatch
    from xidstream.pipeline.spark.session import GetSession
    from xidstream.pipeline.spark.snapshot_batch import SnapshotBatch


class Sink(Protocol):
    """Takes batches in order, from one thread. ``write`` returns when the batch is durable in the sink: the
    caller confirms it after that, and a batch may come again after a crash, cut differently."""

    kind: SinkKind
    """What it can do. By ``kind.snapshots`` it gets the rows that tables had before through ``write_snapshot``, or
    through ``snapshot_log``, or not at all."""

    def open(self, session: GetSession) -> None:
        """Once, before the first batch; may take seconds. A sink that does without Spark does not call ``session``."""

    def watermark(self) -> Lsn:
        """The commit LSN up to which the sink surely holds everything; 0/0 for one that cannot tell."""

    def last_owner(self) -> int:
        """The number of the last ``Tenure`` that wrote to the sink; 0 for none, or one that cannot tell."""

    def claim(self, tenure: Tenure) -> None:
        """Once, before the first batch: from here on the sink is this tenure's, and no earlier one's.

        Raises Superseded where it is a later one's, SinkDiverged where it holds what this server never had."""

    def pace(self) -> Pace:
        """How it takes the next batch, as of now."""

    def write(self, batch: SinkBatch) -> None:
        """Raises an XidstreamError; then nothing of the batch may be confirmed."""

    def snapshot_log(self) -> SnapshotTables:
        """Where tables' snapshots are committed. Raises Unsupported where the sink takes none."""

    def write_snapshot(self, batch: SnapshotBatch) -> None:
        """The rows that one table had before; it may come again after a crash. Raises as ``write``."""

    def exclude_contained(self, contained: Mapping[TableName, SnapshotBounds]) -> None:
        """From now on ``write`` ignores the changes that these snapshots contain. By table: the bounds of the
        snapshot that ``write_snapshot`` got."""

    def log_part(self) -> LogPart | None:
        """For the run's account: what is left of the change log; None for one from which the run removes nothing. On
        any thread, and at once."""

    def close(self) -> None:
        """Once, after the last batch or a failure. Never raises for a session that is gone."""


RecordedGenerations = Mapping[tuple[str, int, Lsn], tuple["GenerationState", str]]
"""The state of each generation, by table, number and place, and the reason why one has ended."""


class SinkType(ABC):
    """A setting ``sink`` of one kind: how its sink is made, and what may be known of it before. ``argument``: what the
    setting has after the colon. In any process."""

    def __init__(self, argument: str) -> None:
        self.argument = argument

    @abstractmethod
    def make(self, identity: SlotIdentity, settings: SinkSettings) -> Sink:
        """Raises ConfigError, UsageError for an argument that no sink
        can be made of. Nothing outside is touched."""

    def checked(self) -> str:
        """The argument as any other process understands it. Raises as ``make``."""
        return self.argument

    def may_take_segments(self, storage_uri: str) -> bool:
        """Whether the sink may make segments of this storage its own files. Asks neither of the two.

        Where it may, a buffer makes segments of what is left of a large transaction at its COMMIT."""
        return False

    def local_root(self) -> str | None:
        """Its root, if that is a folder. Raises ConfigError."""
        return None

    @abstractmethod
    def check(self, storage_uri: str) -> SinkCheck:
        """Its part of the preflight. ``storage_uri``: the setting; empty where it is not given."""

    def holds(self, application_id: str) -> tuple[int, Lsn]:
        """The number of the slot's last run that wrote to it, and the last commit of it that it holds whole; 0 for
        none. Raises ConfigError, StorageFault."""
        return 0, INVALID_LSN

    def recorded_generations(self) -> RecordedGenerations | None:
        """The generations that the sink records now, without a run; None for one that keeps nothing. Raises as
        ``holds``."""
        return None


def sink_type(spec: str) -> SinkType:
    """Raises ConfigError for a setting that names no sink."""
    kind, argument = parse_sink_spec(spec)
    module, _, name = kind.implementation.partition(":")
    made = getattr(importlib.import_module(module), name)(argument)
    assert isinstance(made, SinkType)
    return made


def make_sink(spec: str, identity: SlotIdentity, settings: SinkSettings = DEFAULT_SETTINGS) -> Sink:
    """Raises ConfigError for what names no sink, UsageError where the function cannot be found."""
    return sink_type(spec).make(identity, settings)


def check_sink_spec(spec: str) -> str:
    """Check the setting without making a sink, for the process that is given it. Raises as ``make_sink``.

    Returns the setting as any other process understands it: a relative path of Delta tables made absolute.
    """
    return parse_sink_spec(spec)[0].spec(sink_type(spec).checked())


def make_root(spec: str) -> None:
    """Make a sink's local root where it is missing, with the mode that was chosen. Raises StorageFault."""
    root = sink_type(spec).local_root()
    if root is not None:
        try:
            make_folders(root)
        except OSError as error:
            raise StorageFault(f"cannot make the sink's root {root}: {error.strerror}") from error


def parse_sink_spec(spec: str) -> tuple[SinkKind, str]:
    """The kind, and what it writes to. Raises ConfigError for what names no sink."""
    name, colon, argument = spec.partition(":")
    kind = KINDS.get(name)
    if kind is not None and bool(argument) == bool(kind.argument) == bool(colon):
        return kind, argument
    if kind is not None and kind.argument:
        raise ConfigError(f"sink {name}: names no {kind.names}", remedy=f"give a {kind.names}: {kind.form}")
    *others, last = (each.form for each in KINDS.values())
    forms = f"{', '.join(others)} or {last}"
    if not colon or name.lower() in ("file", *REMOTE_SCHEMES):
        remedy = f"did you mean {DELTA.spec(redacted(spec))}?" if spec else f"give {DELTA.form}"
    else:
        remedy = f"give {forms}"
    raise ConfigError(f"unknown sink {redacted(spec)!r}: it is {forms}", remedy=remedy)
