"""The settings of a run: one frozen dataclass, validated at construction, filled from TOML and options.

Each field has its unit in its name. Its metadata has the sentence that ``--help`` and docs/settings.md show. A wrong
value raises ConfigError with the setting's name and the values that are allowed (``config_checks``).

No setting is a secret by itself, but ``dsn``, ``storage``, ``sink`` and ``spark_conf`` may hold one. ``repr`` leaves
them out or redacts them, and code that shows a URI to people shows ``redacted(uri)``. No secret travels in an actor's
argument: ``refuse_credentials`` checks ``storage``, ``sink`` and ``spark_conf``, and ``actors.runtime.secrets`` takes
care of the DSN's password. libpq resolves passfiles, service files and ``PG*`` variables itself, on the reader's node.

Nested sections were considered and rejected: every option of the command line is a key of the file, and people should
not have to learn two spellings. The only list is ``[[slots]]``, for several slots in one run. Each entry may have any
of the same keys except those of the whole run (``pipeline.settings.slot_list``). A key outside the list is the default
of every slot.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xidstream.pipeline.errors import ConfigError
from xidstream.pipeline.pg_rules import check_publication_names, renamed_columns
from xidstream.pipeline.settings.addresses import check_address
from xidstream.pipeline.settings.config_checks import check_values
from xidstream.pipeline.settings.credentials import redacted, refuse_in_spark_conf, refuse_in_uris
from xidstream.pipeline.settings.delta_retention import DeltaRetention
from xidstream.pipeline.settings.file_modes import DEFAULT
from xidstream.pipeline.settings.local_paths import absolute, is_path
from xidstream.pipeline.settings.log_layout import LogLayout
from xidstream.pipeline.settings.setting_types import check_type, spark_settings
from xidstream.pipeline.settings.settings_file import load_toml, unknown_setting
from xidstream.pipeline.settings.sink_kinds import SinkKind, kind_named, kind_of
from xidstream.pipeline.settings.sink_settings import SinkSettings
from xidstream.pipeline.settings.sizes import parse_size
from xidstream.pipeline.settings.times import duration_s, parse_time

MIB = 1 << 20
GIB = 1 << 30
_LIBPQ = frozenset({"PGSERVICE", "PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER"})
"""Variables that say where the server is."""


def _setting(
    default: Any,
    text: str,
    *,
    size: bool = False,
    time: bool = False,
    within: tuple[float, float] | None = None,
) -> Any:
    """``size``, ``time``: people write it as ``parse_size`` or ``parse_time`` reads it. ``within``: the least and the
    most."""
    return field(default=default, metadata={"help": text, "size": size, "time": time, "within": within})


@dataclass(frozen=True)
class Config:
    """All settings of ``run`` and ``ChangeStream``."""

    # -- what to read, where to put it
    dsn: str = field(
        default="",
        repr=False,
        metadata={
            "help": "libpq connection string or URI; parts it leaves out come from PG* variables, service and passfile"
        },
    )
    password_command: tuple[str, ...] = field(
        default=(),
        repr=False,
        metadata={
            "help": "program whose standard output is the password, called anew for each connection, for tokens that "
            "expire (docs/security.md): a list of strings, or one string that is split as a shell would, without a "
            "shell"
        },
    )
    slot: str = _setting("", "replication slot (a-z, 0-9, _)")
    publication: tuple[str, ...] = _setting((), "publications, comma-separated")
    storage: str = _setting("", "URI for spilled segments and progress (file:, s3:, gs:, abfs:, or a path)")
    sink: str = _setting("", "delta:URI, iceberg:CATALOG/namespace, console, or foreach:module:function")
    storage_mode: str = _setting(
        DEFAULT,
        "mode of the folders that a run makes on a local disk, files the same without x: storage and Delta tables are "
        "the user's alone, as they hold rows; 0750 lets the group read (docs/security.md)",
    )

    # -- how to read
    streaming: str = _setting("on", "stream transactions in progress: off, on or parallel")
    proto_version: int | None = _setting(
        None, "pgoutput protocol 1 to 4; default: the highest that both sides have"
    )
    logical_decoding_work_mem: str = _setting(
        "4MB",
        "memory that the walsender fills before it streams, so at most this much is left to send after COMMIT; "
        "'server' keeps the server's setting. 4MB was measured to drain as fast as 64MB",
    )
    create_slot: bool = _setting(False, "create the slot if it is missing")
    begin_anew: str = _setting(
        "",
        "the LSN that the error names where a storage or a sink is empty or older, and should not be: go on from "
        "there, without what lies before (docs/recovery.md). It fits that one position, so it decides nothing another "
        "time; default: never",
    )
    two_phase: bool = _setting(False, "decode two-phase commit (sets the slot's flag for good)")
    failover: bool = _setting(
        False,
        "have standbys synchronise the slot (sets the slot's flag for good; PostgreSQL 17, docs/failover.md)",
    )
    snapshot: str = _setting(
        "",
        "read the rows that published tables have before the stream: initial (and go on), only (and end), or never; "
        "default: initial if the run creates the slot and the sink is Delta, else never. What was decided for a slot "
        "is kept until this is given again",
    )
    snapshot_connections: int | None = _setting(
        None,
        "how many connections read snapshots at a time, beside as many that hold them, where the server has room; "
        "each reader is a process; default: 4, but on one machine no more than it has CPUs, and at least 2",
        within=(1, 64),
    )
    snapshot_bytes_per_s: int = _setting(
        0,
        "the most bytes per second that all readers of snapshots together take from the server; 0: no limit",
        size=True,
        within=(0, 1 << 40),
    )
    on_poison: str = _setting(
        "stop",
        "what a change that cannot be delivered does (docs/parked.md): stop ends the run behind all before it; park "
        "leaves its table out from there on, recorded and counted, and goes on with the others",
    )
    column_names: tuple[str, ...] = _setting(
        (),
        "schema.table.column=name, comma-separated: columns that are delivered under another name, for those whose own "
        "name equals another's but for its case, or one of the contract's (docs/parked.md)",
    )
    on_slot_lost: str = _setting(
        "stop",
        "what a start does where the slot was invalidated, dropped, or read by somebody else: stop ends with status 4; "
        "resync does what `xidstream resync` does, and goes on: what committed between is missing in the history",
    )
    available_now: bool = _setting(False, "handle all transactions committed before the start, then end")

    # -- memory and batching
    block_bytes: int = _setting(
        4 * MIB,
        "raw bytes sent to a buffer at once; below 1MB sending blocks is slower than the walsender",
        size=True,
        within=(1 << 10, 1 << 30),
    )
    linger_ms: int = _setting(
        10,
        "how long a small transaction may wait for others to share its block; up to ten times that in a flood, or "
        "while earlier blocks wait to be sent",
        time=True,
        within=(0, 60_000),
    )
    stream_linger_ms: int = _setting(
        2000,
        "how long rows of an open transaction may wait in the reader; shorter makes smaller blocks, which cost more",
        time=True,
        within=(0, 600_000),
    )
    reader_memory_bytes: int = _setting(
        64 * MIB,
        "raw bytes the reader may hold: gathered, or sent to buffers and not decoded yet",
        size=True,
        within=(MIB, 1 << 40),
    )
    buffer_memory_bytes: int = _setting(
        64 * MIB,
        "decoded bytes one buffer may hold before it spills the largest part to storage",
        size=True,
        within=(MIB, 1 << 40),
    )
    backlog_bytes: int = _setting(
        128 * MIB,
        "bytes of memory that committed small transactions may take while they wait for the sink, before reading "
        "stops: their rows, and what each takes beside them (docs/sizing.md)",
        size=True,
        within=(MIB, 1 << 40),
    )
    journal_after_bytes: int = _setting(
        64 * MIB,
        "decoded bytes of committed small transactions that may wait for the sink before they are written to the "
        "journal in the storage, and confirmed (docs/journal.md); half of backlog_bytes, so that reading does not "
        "stop. 0: all that is committed is written, also while the sink keeps up",
        size=True,
        within=(0, 1 << 40),
    )
    journal_after_s: float = _setting(
        5.0,
        "how long a committed transaction may wait for the sink before it is written to the journal: longer than a "
        "batch takes while the sink keeps up",
        time=True,
        within=(0, 86_400),
    )
    journal_max_bytes: int = _setting(
        64 * GIB,
        "the most bytes in the storage that the journal may hold; from then on transactions wait in the slot, and "
        "reading stops at backlog_bytes. 0: no journal, so that the slot is confirmed only behind the sink",
        size=True,
        within=(0, 1 << 50),
    )
    buffers_min: int = _setting(1, "how many buffer actors are kept ready", within=(1, 10_000))
    buffers_max: int = _setting(
        4, "the most buffer actors; more open transactions than that share them", within=(1, 10_000)
    )
    buffer_cpus: float = _setting(0.1, "CPUs that one buffer actor asks Ray for", within=(0, 1_000))
    buffer_resource: str = _setting(
        "",
        "custom Ray resource; each buffer beyond buffers_min asks for one, so that nodes with it are added",
    )
    buffers_idle_s: float = _setting(
        30.0,
        "how long a buffer beyond buffers_min may have nothing to do before it is given back",
        time=True,
        within=(0, 86_400),
    )
    batch_rows: int = _setting(
        1_000_000,
        "rows after which a batch is full; one transaction with more is a batch of its own",
        within=(1, 1 << 40),
    )
    batch_bytes: int = _setting(
        64 * MIB,
        "bytes of rows after which a batch is full: Arrow in memory, Parquet in storage",
        size=True,
        within=(1, 1 << 40),
    )
    status_interval_ms: int = _setting(
        10_000,
        "how often the reader reports to the server when nothing happens; a sixth of wal_sender_timeout's default",
        time=True,
        within=(100, 600_000),
    )
    receive_timeout_ms: int = _setting(
        60_000,
        "how long the server may stay silent, although asked each status_interval_ms, before the connection counts as "
        "lost; not less than two of these intervals, and 0: for ever. It is like PostgreSQL's wal_receiver_timeout: "
        "nothing else notices a link that only one side has lost",
        time=True,
        within=(0, 86_400_000),
    )
    heartbeat_interval_s: float = _setting(
        0.0,
        "how often the reader writes a heartbeat into the server's WAL; 0: never (docs/failover.md says why)",
        time=True,
        within=(0, 86_400),
    )
    status_address: str = _setting(
        "",
        "HOST:PORT of the run's status page (docs/status.md), or off; default: a free port of 127.0.0.1 if Ray is the "
        "run's own, off on a cluster. Whoever can reach it may read it: names of tables and texts of errors are in it",
    )
    log_format: str = _setting(
        "text",
        "what `xidstream run` writes to stderr: text for people, or json, an event a line (docs/status.md)",
    )
    metrics_address: str = _setting(
        "",
        "HOST:PORT where the run's metrics are for Prometheus (docs/metrics.md), if Ray is the run's own; default: "
        "nowhere, and nothing is collected. Whoever can reach it may read them",
    )

    # -- base tables
    mirror_every: str = _setting(
        "",
        "how often the run brings the base tables beside a Delta or Iceberg sink's log up to it, in its Spark session, "
        "e.g. 60s; empty: never. Each refresh writes whole files, so a short interval writes more",
    )
    mirror_file_bytes: int = _setting(
        32 * MIB,
        "size of a base table's files, of which none has much more than a million rows: a refresh writes each file "
        "anew that holds a changed key, so smaller ones cost less to refresh, and larger ones less to list and open",
        size=True,
        within=(MIB, 1 << 32),
    )
    mirror_vacuum: bool = _setting(
        True,
        "after a refresh, every ten minutes at most, remove the files of base tables that no reader needs within "
        "mirror_retention: else each refresh leaves what it has replaced for ever",
    )
    mirror_retention: str = _setting(
        "24h", "how long a reader may take for one moment of the base tables: a day covers the longest query"
    )
    mirror_catalog: str = _setting(
        "",
        "glue:DATABASE: after a refresh, register the base tables in this AWS Glue database, so that Athena, Trino and "
        "Spark find them (docs/mirror.md); empty: nowhere, because it needs a database and a role that may write to it",
    )

    log_retention: str = _setting(
        "",
        "for how long the change log keeps the changes of a table: a time (30d), a size of the table's files (100 GB), "
        "or base, as far back as the oldest base table; PATTERN=VALUE before it, with commas, for some tables; empty: "
        "everything, because what is cut cannot be had again (docs/delta.md)",
    )
    log_layout: str = _setting(
        "",
        "PATTERN=COLUMN, with commas: by which column, of a date, a timestamp or a whole number, the merged files of a "
        "Delta table are ordered, so that readers skip by it; empty: by commit, because only its users know what "
        "it is read by (docs/delta.md)",
    )
    delta_log_retention: str = _setting(
        "1h",
        "for how long a Delta table of the sink can be opened at a version by its number, or be followed from it: a "
        "commit lists all of the log, and an hour of it costs few milliseconds (docs/delta.md)",
    )
    delta_file_retention: str = _setting(
        "12h",
        "for how long files stay in a Delta table of the sink that others have replaced: half a day covers the longest "
        "query that has opened the table before",
    )

    iceberg_commit_every: str = _setting(
        "1s",
        "how long an Iceberg sink waits between two small batches: a commit of a table takes some 20 ms of CPU, and "
        "readers plan over what it leaves. A large transaction and a backlog are committed at once (docs/iceberg.md)",
    )

    # -- Spark
    spark: str = _setting(
        "auto",
        "where Spark's tasks run: local, in the driver's own JVM, which has the task slots and the heap of all "
        "spark_executors, and 512m more; raydp, in executors that Ray places on its nodes; auto: local on a Ray that "
        "the run itself starts, where executors would only cost three more JVMs, and raydp on any other",
    )
    spark_executors: int = _setting(
        1, "executors; the least, if spark_executors_max is more", within=(1, 10_000)
    )
    spark_executors_max: int = _setting(
        0,
        "the most executors that Spark's dynamic allocation may ask Ray for while tasks wait; 0: only spark_executors. "
        "It has no effect with spark = local",
        within=(0, 10_000),
    )
    spark_executors_idle_s: float = _setting(
        60.0,
        "how long an executor beyond spark_executors may have no task before it is given back",
        time=True,
        within=(1, 86_400),
    )
    spark_executor_cores: int = _setting(2, "task slots of an executor", within=(1, 1_000))
    spark_executor_memory: str = _setting(
        "512m",
        "JVM heap of an executor, with its unit, and at least 450m; rows live outside it",
    )
    spark_executor_cpus: float = _setting(
        0.5, "CPUs that one executor asks Ray for, with spark = raydp", within=(0, 1_000)
    )
    spark_conf: Mapping[str, str] = field(
        default_factory=dict, metadata={"help": "further Spark settings ([spark_conf] in the file)"}
    )

    def __repr__(self) -> str:
        """What differs from the defaults, without secrets: no DSN, no credentials in URIs, no values of Spark's."""
        shown = [f for f in dataclasses.fields(self) if f.repr]
        values = {f.name: getattr(self, f.name) for f in shown if getattr(self, f.name) != _default_of(f)}
        for name in ("storage", "sink"):
            if name in values:
                values[name] = redacted(values[name])
        if "spark_conf" in values:
            values["spark_conf"] = dict.fromkeys(self.spark_conf, "***")
        return f"Config({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value, is_size, is_time = getattr(self, f.name), f.metadata.get("size"), f.metadata.get("time")
            example = "a size such as 64MB" if is_size else "a time such as 10ms" if is_time else None
            check_type(f.name, str(f.type), value, example)
            if is_size:
                object.__setattr__(self, f.name, parse_size(value, f.name))
            elif is_time:
                object.__setattr__(self, f.name, parse_time(value, f.name))
        object.__setattr__(self, "publication", _entries(self.publication))
        check_publication_names(self.publication)
        object.__setattr__(self, "column_names", _entries(self.column_names))
        renamed_columns(self.column_names)
        object.__setattr__(self, "password_command", _words(self.password_command))
        object.__setattr__(self, "spark_conf", spark_settings(self.spark_conf))
        check_address(self.storage, "storage")
        if self.storage and is_path(self.storage):
            object.__setattr__(self, "storage", absolute(self.storage))
        kind, root = kind_named(self.sink), self.sink.partition(":")[2]
        is_folder_or_uri = kind is not None and kind.is_folder_or_uri(root)
        check_address(root if is_folder_or_uri else self.sink, "sink")
        if kind is not None and is_folder_or_uri and root and is_path(root):
            object.__setattr__(self, "sink", kind.spec(absolute(root)))
        check_values(self)

    @property
    def sink_kind(self) -> SinkKind:
        """What the sink can do. A function that a script holds has no setting ``sink``."""
        return kind_of(self.sink)

    @property
    def delta_retention(self) -> DeltaRetention:
        return DeltaRetention.of_settings(
            self.delta_log_retention, self.delta_file_retention, self.log_retention
        )

    @property
    def sink_settings(self) -> SinkSettings:
        commit_every_s = duration_s(self.iceberg_commit_every, "iceberg_commit_every")
        return SinkSettings(self.delta_retention, commit_every_s, LogLayout.parse(self.log_layout))

    @property
    def sink_root(self) -> str | None:
        """The folder or URI of the sink; None where it has none."""
        return self.sink.partition(":")[2] if self.sink_kind.has_root else None

    def refuse_credentials(self) -> None:
        """Raise ConfigError for a secret in a setting that travels to Ray's actors and Spark's executors.

        The DSN is not checked here, because the supervisor takes its secret out.
        """
        refuse_in_uris({name: getattr(self, name) for name in ("storage", "sink")})
        refuse_in_spark_conf(self.spark_conf)

    def require(self, *names: str) -> None:
        """Raise ConfigError naming the first of ``names`` that has no value.

        A ``dsn`` may also come from libpq's variables, a service file among them.
        """
        for name in names:
            if getattr(self, name) or (name == "dsn" and _LIBPQ.intersection(os.environ)):
                continue
            variables = ", or libpq's variables (PGHOST, PGSERVICE, …)" if name == "dsn" else ""
            raise ConfigError(
                f"{name} is missing",
                remedy=f"give {name} in the settings of ChangeStream or in the TOML file, or "
                f"--{name.replace('_', '-')} on the command line{variables}",
            )

    @classmethod
    def load(cls, source: Config | Mapping[str, Any] | str | Path) -> Config:
        """A Config as it is, a mapping as ``of`` takes it, or the path of a TOML file with one slot's settings."""
        if isinstance(source, (str, Path)):
            source = load_toml(Path(source))
        return source if isinstance(source, Config) else cls.of(source)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Config:
        """A Config from the keys of a TOML file or the command line; ``-`` and ``_`` are the same.

        Raises ConfigError for a key that is not a setting, and names the nearest one.
        """
        known = {f.name: f for f in dataclasses.fields(cls)}
        arguments: dict[str, Any] = {}
        for key, value in values.items():
            name = key.replace("-", "_")
            if name == "slots":
                raise ConfigError(
                    "only `xidstream run` takes a list of slots",
                    remedy="give the settings of one slot (in Python one ChangeStream each)",
                )
            if name not in known:
                raise unknown_setting(key, name, known)
            arguments[name] = value
        return cls(**arguments)


def _entries(given: str | Sequence[str]) -> tuple[str, ...]:
    """A list as it is, or the entries of a string, between commas."""
    if isinstance(given, str):
        return tuple(entry.strip() for entry in given.split(",") if entry.strip())
    return tuple(given)


def _words(command: str | Sequence[str]) -> tuple[str, ...]:
    """Program and arguments. No error quotes them."""
    if isinstance(command, str):
        try:
            command = shlex.split(command)
        except ValueError:
            raise ConfigError("password_command has a quote without its end") from None
    if command and not command[0]:
        raise ConfigError("password_command names no program")
    return tuple(command)


def _default_of(f: dataclasses.Field[Any]) -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
